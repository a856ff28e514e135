import pytest
from hypothesis import given
from hypothesis import strategies as st

from kintsugi.config.schema import Strategy
from kintsugi.generation.router import AFFINITY_REQUESTS, PREFIX_BYTES, ServerHealth, ServerView, choose

_HEALTHY, _SUSPECT, _STALE, _DEAD = (
    ServerHealth.HEALTHY,
    ServerHealth.SUSPECT,
    ServerHealth.STALE,
    ServerHealth.DEAD,
)
_STRATEGIES: tuple[Strategy, ...] = ("least_loaded", "round_robin", "prefix_affine")


@pytest.mark.parametrize(
    ("servers", "chosen"),
    [
        pytest.param([], None, id="nobody is there"),
        pytest.param([("a", _HEALTHY, 3, 0)], "a", id="the only one"),
        pytest.param([("a", _HEALTHY, 3, 9), ("b", _HEALTHY, 3, 5)], "b", id="fewest tokens in flight"),
        pytest.param([("b", _HEALTHY, 3, 5), ("a", _HEALTHY, 3, 5)], "a", id="first name on a tie"),
        pytest.param(
            [("a", _HEALTHY, 2, 0), ("b", _HEALTHY, 3, 9)], "b", id="an older version is not enough"
        ),
        pytest.param([("a", _HEALTHY, 4, 0)], "a", id="a newer version is enough"),
        pytest.param([("a", _STALE, 3, 0), ("b", _HEALTHY, 3, 9)], "b", id="stale is never chosen"),
        pytest.param([("a", _STALE, 4, 0)], None, id="stale is not chosen alone either"),
        pytest.param([("a", _DEAD, 3, 0)], None, id="dead"),
        pytest.param([("a", _SUSPECT, 3, 0), ("b", _HEALTHY, 3, 99)], "b", id="healthy before suspect"),
        pytest.param([("a", _SUSPECT, 3, 0), ("b", _STALE, 3, 0)], "a", id="suspect is better than nobody"),
        pytest.param([("a", _HEALTHY, 3, 0, True), ("b", _SUSPECT, 3, 9)], "b", id="retired"),
        pytest.param([("a", _HEALTHY, 3, 0, False, True), ("b", _HEALTHY, 3, 9)], "b", id="full"),
        pytest.param([("a", _HEALTHY, 3, 0, False, True)], None, id="full and alone"),
    ],
)
def test_a_request_goes_to(servers: list[tuple[str, ServerHealth, int, int]], chosen: str | None) -> None:
    choice = choose([ServerView(*server) for server in servers], version=3)
    assert choice.server == chosen
    assert choice.reason


def test_the_reason_to_wait_names_every_server_and_what_it_lacks() -> None:
    servers = [
        ServerView("server-0", _STALE, 2),
        ServerView("server-1", _DEAD, 3),
        ServerView("server-2", _HEALTHY, 3, retired=True),
    ]
    assert choose(servers, version=3).reason == (
        "no server can serve version 3: server-0 stale at version 2, server-1 dead at version 3, "
        "server-2 retired at version 3"
    )


_VIEWS = st.lists(
    st.builds(
        ServerView,
        st.integers(0, 9).map("server-{}".format),
        st.sampled_from(ServerHealth),
        st.integers(-1, 4),
        st.integers(0, 500),
        st.booleans(),
    ),
    max_size=6,
    unique_by=lambda view: view.process,
)


@given(_VIEWS, st.sampled_from(_STRATEGIES), st.binary(max_size=8), st.integers(0, 99))
def test_no_strategy_chooses_a_server_that_may_not_serve_or_leaves_one_out_that_may(
    servers: list[ServerView], strategy: Strategy, prompt: bytes, turn: int
) -> None:
    choice = choose(servers, version=2, strategy=strategy, prompt=prompt, num_tokens=16, turn=turn)
    may = [
        view.process
        for view in servers
        if view.health in (_HEALTHY, _SUSPECT) and view.version >= 2 and not view.retired
    ]
    assert (choice.server in may) if may else (choice.server is None)
    backwards = choose(servers[::-1], version=2, strategy=strategy, prompt=prompt, num_tokens=16, turn=turn)
    assert backwards.server == choice.server


def _healthy(*loads: int) -> list[ServerView]:
    return [ServerView(f"server-{index}", _HEALTHY, 1, load) for index, load in enumerate(loads)]


def test_in_turn_every_server_gets_the_same_number() -> None:
    chosen = [
        choose(_healthy(9, 0, 3), version=1, strategy="round_robin", turn=turn).server for turn in range(6)
    ]
    assert chosen == ["server-0", "server-1", "server-2"] * 2


def _affine(servers: list[ServerView], prompt: bytes, *, num_tokens: int = 100) -> str | None:
    return choose(servers, version=1, strategy="prefix_affine", prompt=prompt, num_tokens=num_tokens).server


def test_prompts_that_begin_alike_go_to_the_same_server_and_all_servers_get_some() -> None:
    prompts = [bytes([number]) * PREFIX_BYTES for number in range(64)]
    first = [_affine(_healthy(0, 0, 0), prompt) for prompt in prompts]
    assert [_affine(_healthy(5, 90, 7), prompt + b"and more") for prompt in prompts] == first
    assert set(first) == {"server-0", "server-1", "server-2"}


def test_when_a_server_goes_only_its_own_prefixes_move() -> None:
    prompts = [bytes([number]) * PREFIX_BYTES for number in range(64)]
    before = [_affine(_healthy(0, 0, 0), prompt) for prompt in prompts]
    after = [_affine(_healthy(0, 0), prompt) for prompt in prompts]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != "server-2")


def test_a_server_that_is_too_far_behind_loses_its_prefixes_for_a_while_and_the_reason_says_so() -> None:
    prompt = b"the same"
    preferred = _affine(_healthy(0, 0), prompt)
    bound = 100 * AFFINITY_REQUESTS
    index = 0 if preferred == "server-0" else 1
    loads = [0, 0]
    loads[index] = bound
    assert _affine(_healthy(*loads), prompt) == preferred
    loads[index] = bound + 1
    choice = choose(_healthy(*loads), version=1, strategy="prefix_affine", prompt=prompt, num_tokens=100)
    assert choice.server != preferred
    assert choice.reason == (
        f"{preferred} has its prefix but is {bound + 1} tokens behind: "
        "0 tokens in flight, the fewest of 2 healthy servers"
    )
