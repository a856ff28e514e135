"""The nouns that flow through the system. All frozen; arrays travel as little-endian bytes, never as lists.

A prompt's way: `Row` (data) → `Ticket` (one issuing of it) → `Trajectory` × n (tokens, scored) → `SampleMeta` (what
the control plane knows of each) → a training batch → a `WeightManifest` of the next version.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class Role(StrEnum):
    """What a process is for. Process ids are `<role>-<index>`: `model-0`, `server-1`, `master-0`."""

    LAUNCHER = "launcher"
    AGENT = "agent"
    MASTER = "master"
    MODEL = "model"
    ROLLOUT = "rollout"
    MANAGER = "manager"
    SERVER = "server"
    SPARE = "spare"
    """None yet: started, prepared, and waiting to be told. The master knows nothing of it."""


def process_id(role: Role, index: int) -> str:
    """`process_id(Role.MODEL, 0) == "model-0"`."""
    return f"{role.value}-{index}"


def role_of(process: str) -> Role:
    """`role_of("model-0") is Role.MODEL`."""
    return Role(process.rsplit("-", 1)[0])


class Peer(msgspec.Struct, frozen=True):
    """How to reach and recognise one process: `Peer("server-0", "a1b2", "host-0", "tcp://127.0.0.1:4001", b"…")`."""

    process: str
    incarnation: str
    """Changes whenever the process is replaced; messages of an older one are refused."""
    host: str
    address: str
    """Where its requests are received; empty until it has registered."""
    public_key: bytes
    """CURVE public key (Z85). Only this key may speak as `process`."""


class ChildReport(msgspec.Struct, frozen=True):
    """A living process as its agent knows it: `ChildReport("model-0", "1.4", 4711, b"…")`."""

    process: str
    incarnation: str
    pid: int
    public_key: bytes


class Placement(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where and how a process runs, so that exactly this one can be aimed at. Empty: like its agent."""

    cgroup: str | None = None
    """Folder of an existing control group to join before exec."""
    network_namespace: str | None = None
    """Name of an existing network namespace (as of `ip netns`) to enter before exec."""
    nice: int | None = None
    limits: dict[str, int] = {}
    """Resource limits by their names without RLIMIT_: {"AS": 4294967296, "NOFILE": 4096}."""
    environment: dict[str, str] = {}


class Row(msgspec.Struct, frozen=True):
    """One record of a data set: `Row(prompt="12+34=", columns={"answer": "46"})`."""

    prompt: str
    """As text, for rewards and for people."""
    columns: dict[str, Any] = {}
    """What the reward function gets by name; for SFT, `completion` is what to learn; a pair has `chosen` and
    `rejected`."""
    messages: tuple[dict[str, Any], ...] = ()
    """The prompt as a conversation, `{"role": "user", "content": "…"}` each, where the data has one."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """One issuing of one prompt; its group of `num_samples` answers is complete or not at all.

    `Ticket(id="grpo:0:17:0", stage="grpo", epoch=0, position=17, round=0, num_samples=8)`
    """

    id: str
    """Unique per stage, epoch, dataset position and resampling round; keys the sampling noise."""
    stage: str
    epoch: int
    position: int
    """Index in the stage's shuffled order of that epoch."""
    round: int
    """Counts resamplings of the same position within one epoch."""
    num_samples: int


def ticket_id(stage: str, *, epoch: int, position: int, round: int = 0) -> str:
    """`ticket_id("grpo", epoch=0, position=17) == "grpo:0:17:0"`."""
    return f"{stage}:{epoch}:{position}:{round}"


def sample_key(ticket: str, index: int) -> str:
    """The name of one sample: `sample_key("grpo:0:17:0", 3) == "grpo:0:17:0/3"`."""
    return f"{ticket}/{index}"


def ticket_of(key: str) -> str:
    """Whose sample it is: `ticket_of("grpo:0:17:0/3") == "grpo:0:17:0"`."""
    return key.rpartition("/")[0]


class Finish(StrEnum):
    """Why a completion ended: its own end token, a stop text, or the length limit (a truncation, not an end)."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


class Trajectory(msgspec.Struct, frozen=True):
    """One sample's tokens as they were fed and sampled; never re-encoded from text.

    Arrays have one entry per token of prompt + completion: `tokens` int32, `loss_mask` uint8 (1 where the policy
    chose the token), `logprobs` float32 (of the policy that sampled, 0 where the mask is 0), `versions` int32 (the
    weight version that produced the token, -1 where the mask is 0).
    """

    key: str
    tokens: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: bytes
    finish: Finish

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


class SampleText(msgspec.Struct, frozen=True, array_like=True):
    """A sample as people read it; for `samples.jsonl` only, no decision looks at it."""

    prompt: str
    completion: str


class SampleMeta(msgspec.Struct, frozen=True, array_like=True):
    """What the control plane knows of a scored sample; the trajectory itself stays with `holder`."""

    key: str
    ticket: str
    num_tokens: int
    num_loss_tokens: int
    reward: float
    reward_components: dict[str, float]
    finish: Finish
    version: int
    """Oldest weight version among its sampled tokens."""
    holder: str
    """Process that keeps the trajectory."""
    digest: str
    """xxh3-64 of the encoded trajectory, checked by who fetches it."""
    repetition: float = 0.0
    """Share of repeated 4-grams among the completion's tokens (0 when it is shorter)."""


def staleness(version: int, *, step: int) -> int:
    """Steps from the weights that sampled something to those with which the step that trains it begins.

    0 for what no weights of this run sampled (version -1), and where a rollback took back the weights that did.

    >>> staleness(3, step=6), staleness(5, step=6), staleness(-1, step=6)
    (2, 0, 0)
    """
    return max(step - 1 - version, 0) if version >= 0 else 0


class Completion(msgspec.Struct, frozen=True):
    sample: int
    tokens: bytes
    """int32, the end token included when it was sampled."""
    logprobs: bytes
    """float32, at the sampling temperature (at temperature 1 when greedy)."""
    versions: bytes
    """int32."""
    finish: Finish | None
    """None where it was interrupted; it can be resumed from what it has."""
    top_tokens: bytes = b""
    """int32, `Sampling.top_logprobs` per token: the most likely ones, most likely first."""
    top_logprobs: bytes = b""
    """float32, of `top_tokens`."""


class Fragment(msgspec.Struct, frozen=True, array_like=True):
    """More of a completion: its tokens from the one numbered `offset` on, with the arrays of `Completion`."""

    sample: int
    offset: int
    tokens: bytes
    logprobs: bytes
    versions: bytes
    top_tokens: bytes = b""
    top_logprobs: bytes = b""
    finish: Finish | None = None
    """Set where these are its last tokens."""


class ShardItem(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a shard, who holds it, and the scalars that the master computed for it."""

    key: str
    holder: str
    digest: str
    num_tokens: int
    num_loss_tokens: int
    values: dict[str, float] = {}
    """{"advantage": 0.7}"""


class LogicalShard(msgspec.Struct, frozen=True):
    """A fixed part of the optimizer batch; gradients are summed over these in a fixed order, whoever computes them."""

    index: int
    items: tuple[ShardItem, ...]


class PieceKind(StrEnum):
    """What a piece's bytes are: the values, a difference to add, or an adapter's factors."""

    FULL = "full"
    DELTA = "delta"
    ADAPTER = "adapter"


class Piece(msgspec.Struct, frozen=True):
    """A slice of one named tensor. Every slice is whole today; the format already names slices and mesh places.

    `Piece("lm_head.weight", "float32", (16, 96), ((0, 16), (0, 96)), {"dp": 0}, PieceKind.FULL, 0, 6144, "9f…")`
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    slice: tuple[tuple[int, int], ...]
    """[start, stop) per dimension of what these bytes hold."""
    mesh: dict[str, int]
    """Coordinates of the rank that owns the piece: {"dp": 0, "tp": 0, "pp": 0}."""
    kind: PieceKind
    offset: int
    """Byte offset in the stream, segment or file that carries the pieces."""
    size: int
    digest: str
    """xxh3-64 of the bytes."""


class WeightManifest(msgspec.Struct, frozen=True):
    """One published version: what it consists of and how to recognise it."""

    version: int
    step: int
    pieces: tuple[Piece, ...]
    size: int
    """Bytes in all."""
    digest: str
    """xxh3-64 over all pieces' names and digests in order."""


class SegmentSource(msgspec.Struct, frozen=True, tag="segment"):
    """The pieces lie in shared memory of one host, held by its agent under this name."""

    host: str
    name: str


class StreamSource(msgspec.Struct, frozen=True, tag="stream"):
    """The pieces can be fetched from a process by bulk stream."""

    process: str
    owners: tuple[str, ...] = ()
    """Of a meta-server: the ranks that upload to it, by their share (`Piece.mesh["dp"]`). What does not come through it
    can be asked of them."""


class FolderSource(msgspec.Struct, frozen=True, tag="folder"):
    """The pieces lie in a Hugging Face folder that every server can read."""

    path: str


class DeviceSource(msgspec.Struct, frozen=True, tag="device"):
    """The pieces lie in memory of an accelerator, which other processes on the same one can map (CUDA IPC)."""

    host: str
    chip: str
    """`device.identity` of the accelerator."""
    handle: bytes
    size: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_is_needed: bool


class CollectiveSource(msgspec.Struct, frozen=True, tag="collective"):
    """The pieces are broadcast, once, by a process to these servers, who all have to come."""

    process: str
    store: str
    """host:port at which they meet."""
    key: str
    servers: tuple[str, ...]


WeightSource = SegmentSource | StreamSource | FolderSource | DeviceSource | CollectiveSource


MIN_TEMPERATURE = 0.01
"""Below, logits divided by the temperature may leave float32; greedy is temperature 0."""


class Sampling(msgspec.Struct, frozen=True):
    """How completions are drawn. Training refuses anything that cuts or bends the distribution (top-p, …).

    In this order: `repetition_penalty` and `logit_bias` change the logits, `temperature` divides them, then `top_k`,
    `top_p` and `min_p` each leave out what they leave out of the distribution so far. Log-probabilities are always
    those that the trainer would compute: at the temperature (1 where it is 0), before anything was changed or left out.
    """

    temperature: float = 1.0
    """0 is greedy."""
    max_new_tokens: int = 16
    num_samples: int = 1
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; the token that completes one is its last."""
    top_k: int = 0
    """Only the k most likely tokens; 0 means all."""
    top_p: float = 1.0
    """Only the fewest tokens that together have this probability."""
    min_p: float = 0.0
    """Only tokens at least this probable, relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that stand in prompt or completion are divided by it, negative ones multiplied."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    ignore_end: bool = False
    """Go on over end tokens; stop tokens and texts still count."""
    top_logprobs: int = 0
    """How many of the most likely tokens are reported at each position."""


class Progress(msgspec.Struct, frozen=True):
    """Counters that only grow; which of them moved tells slow from stuck: {"steps": 12, "tokens": 40960}."""

    counters: dict[str, int]


class Wait(msgspec.Struct, frozen=True):
    """A declared wait: for whom, for what, since and until when (monotonic seconds of the waiting process)."""

    whom: str
    what: str
    since: float
    until: float
