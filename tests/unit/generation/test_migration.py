"""A request that moves from one engine to another in the middle ends in the bits of one that did not."""

from collections.abc import Sequence

import pytest
import torch

from kintsugi.config.schema import Config, GenerationSection, ModelSection, NewModel
from kintsugi.generation.engine.factory import build_engine
from kintsugi.generation.server import GenerationServer
from kintsugi.model.plan import plan_model
from kintsugi.model.transformer import Transformer, initialize
from kintsugi.protocol.generation import Generated
from kintsugi.transport import Endpoint
from kintsugi.types import FolderSource, WeightManifest, WeightSource
from kintsugi.weights.fetch import Fetched
from tests.unit.generation.loopback import Loopback
from tests.unit.generation.world import Cluster, FakeAsker

_CONFIG = Config(
    name="migration",
    model=ModelSection(new=NewModel(hidden_size=32, intermediate_size=64, max_positions=128)),
    generation=GenerationSection(slots=8, max_length=64),
)


class _EngineServer:
    """A server over the engine of this package, with weights that its version says."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._architecture, tokenizer = plan_model(_CONFIG)
        self.engine = build_engine(
            self._architecture,
            tokenizer,
            slots=_CONFIG.generation.slots,
            max_length=_CONFIG.generation.max_length,
            dtype=torch.float32,
            device=torch.device("cpu"),
            deterministic=True,
        )
        self._loopback = Loopback(endpoint)
        self._server = GenerationServer(
            self._loopback, self.engine, fetch=self._fetch, background=lambda work: work()
        )

    def _fetch(self, manifest: WeightManifest, sources: Sequence[WeightSource]) -> Fetched:
        model = Transformer(self._architecture)
        initialize(model, manifest.version)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return Fetched(manifest, FolderSource("nowhere"), on_device=weights)

    def turn(self) -> None:
        self._server.turn(0)
        self._loopback.flush()


def _run(*, disturb: str) -> tuple[Generated, int]:
    """The answer, and how many tokens were known when it moved."""
    cluster = Cluster(_EngineServer)
    try:
        cluster.load(1)
        _, requester = cluster.ask("a", num_samples=4, max_new_tokens=40, endless=True)
        known = 0
        if disturb:
            cluster.until(lambda: _num_known(requester) >= 40)
            (busy,) = [name for name, server in cluster.servers.items() if not server.engine.idle]
            if disturb == "kill":
                known = _num_known(requester)
                cluster.kill(busy)
                cluster.publish_book()
            else:
                cluster.manager.retire(busy, lambda: None)
                known = _num_known(requester)
        cluster.until(lambda: requester.ended)
        assert requester.generated is not None
        return requester.generated, known
    finally:
        cluster.close()


def _num_known(requester: FakeAsker) -> int:
    return sum(map(len, requester.streamed.values()))


@pytest.fixture(scope="module")
def undisturbed() -> Generated:
    return _run(disturb="")[0]


@pytest.mark.parametrize("disturb", ["kill", "retire"])
def test_a_request_that_moves_in_the_middle_has_the_same_bits(undisturbed: Generated, disturb: str) -> None:
    moved, known = _run(disturb=disturb)
    assert 40 <= known < 160
    assert moved.server != undisturbed.server
    assert moved.completions == undisturbed.completions
