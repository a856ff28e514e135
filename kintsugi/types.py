"""Types that all parts of the system share. All are frozen; arrays are little-endian bytes, never lists.

Path of a prompt: `Row` (data set) → `Ticket` (one issue of the row) → `Trajectory` × n (tokens and reward) →
`SampleMeta` (metadata for the control plane) → training batch → `WeightManifest` of the next version.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


def kind_of(struct: msgspec.Struct | type[msgspec.Struct]) -> str:
    """Name under which a message, fact, event or reading is stored and searched: its tag, else the name of its class.

    The tag stays when a class is renamed, so recorded runs stay readable.
    """
    kind = struct if isinstance(struct, type) else type(struct)
    tag = kind.__struct_config__.tag
    return tag if isinstance(tag, str) else kind.__name__


class Role(StrEnum):
    """Role of a process. Process ids are `<role>-<index>`: `model-0`, `server-1`, `master-0`."""

    LAUNCHER = "launcher"
    AGENT = "agent"
    MASTER = "master"
    MODEL = "model"
    ROLLOUT = "rollout"
    MANAGER = "manager"
    SERVER = "server"
    SPARE = "spare"
    """Process without a role yet: started, initialised, and waiting to be assigned one. Unknown to the master."""
    SUPERVISOR = "supervisor"
    """Process above the agent of a host that is not the launcher's. Unknown to the master."""
    HOST_MANAGER = "host_manager"
    """Process beside the launcher to which the supervisors report. Unknown to the master."""


def process_id(role: Role, index: int) -> str:
    """`process_id(Role.MODEL, 0) == "model-0"`."""
    return f"{role.value}-{index}"


def role_of(process: str) -> Role:
    """`role_of("model-0") is Role.MODEL`."""
    return Role(process.rsplit("-", 1)[0])


def is_process(name: str) -> bool:
    """`is_process("model-0")`, but not `is_process("checkpoints/step-4")`."""
    return name.rpartition("-")[0] in {role.value for role in Role}


class Peer(msgspec.Struct, frozen=True):
    """Address and identity of one process: `Peer("server-0", "a1b2", "host-0", "tcp://127.0.0.1:4001", b"…")`."""

    process: str
    incarnation: str
    """Changes whenever the process is replaced; messages of an older incarnation are refused."""
    host: str
    address: str
    """Address at which it receives requests; empty until it has registered."""
    public_key: bytes
    """CURVE public key (Z85). Only the owner of this key may send as `process`."""


class ChildReport(msgspec.Struct, frozen=True):
    """A running process, as reported by its agent: `ChildReport("model-0", "1.4", 4711, b"…")`."""

    process: str
    incarnation: str
    pid: int
    public_key: bytes


class Placement(msgspec.Struct, frozen=True, omit_defaults=True):
    """Operating-system context of one process, so that faults can be injected into it alone. Default: as its agent."""

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
    """Prompt as text, for reward functions and for display."""
    columns: dict[str, Any] = {}
    """Columns that reward functions receive by name. For SFT, `completion` is the target; a pair has `chosen` and
    `rejected`."""
    messages: tuple[dict[str, Any], ...] = ()
    """Prompt as a conversation, `{"role": "user", "content": "…"}` each, if the data has one."""


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """One issue of one prompt. Its group of `num_samples` completions is trained as a whole or not at all.

    `Ticket(id="grpo:0:17:0", stage="grpo", epoch=0, position=17, round=0, num_samples=8)`
    """

    id: str
    """Unique per stage, epoch, dataset position and resampling round; keys the sampling noise."""
    stage: str
    epoch: int
    position: int
    """Index in the stage's shuffled order of that epoch."""
    round: int
    """Number of earlier samplings of the same position in this epoch."""
    num_samples: int


def ticket_id(stage: str, *, epoch: int, position: int, round: int = 0) -> str:
    """`ticket_id("grpo", epoch=0, position=17) == "grpo:0:17:0"`."""
    return f"{stage}:{epoch}:{position}:{round}"


def place_of_ticket(ticket: str) -> tuple[str, int, int]:
    """Stage, epoch and position: `place_of_ticket("grpo:0:17:0") == ("grpo", 0, 17)`. ValueError for another text."""
    stage, epoch, position, _ = ticket.split(":")
    return stage, int(epoch), int(position)


def sample_key(ticket: str, index: int) -> str:
    """Name of one sample: `sample_key("grpo:0:17:0", 3) == "grpo:0:17:0/3"`."""
    return f"{ticket}/{index}"


def ticket_of(key: str) -> str:
    """Ticket of a sample: `ticket_of("grpo:0:17:0/3") == "grpo:0:17:0"`."""
    return key.rpartition("/")[0]


class FinishReason(StrEnum):
    """Reason for the end of a completion: end token, stop text, or length limit (a truncation)."""

    EOS = "eos"
    STOP = "stop"
    LENGTH = "length"


class Trajectory(msgspec.Struct, frozen=True):
    """Tokens of one sample, as the engine read and sampled them; never re-encoded from text.

    Arrays have one entry per token of prompt + completion: `tokens` int32, `loss_mask` uint8 (1 for tokens that the
    policy sampled), `logprobs` float32 (of the policy that sampled; 0 where the mask is 0), `versions` int32 (weight
    version that sampled the token; -1 where the mask is 0).
    """

    key: str
    tokens: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: bytes
    finish: FinishReason

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4


class SampleText(msgspec.Struct, frozen=True, array_like=True):
    """Text of a sample, for `samples.jsonl` only. No decision depends on it."""

    prompt: str
    completion: str
    answer: str = ""
    """Expected answer: the row's column `answer`, cut to a few hundred characters; empty if it has none."""
    source: str = ""
    """Data source of the row, where several are mixed."""


class SampleMeta(msgspec.Struct, frozen=True, array_like=True):
    """Metadata of a scored sample for the control plane. The trajectory stays in the process `holder`."""

    key: str
    ticket: str
    num_tokens: int
    num_loss_tokens: int
    reward: float
    reward_components: dict[str, float]
    finish: FinishReason
    version: int
    """Oldest weight version among its sampled tokens."""
    holder: str
    """Process that stores the trajectory."""
    digest: str
    """xxh3-64 of the encoded trajectory, verified when it is fetched."""
    repetition: float = 0.0
    """Share of repeated 4-grams among the completion's tokens (0 when it is shorter)."""


def staleness(version: int, *, step: int) -> int:
    """Number of steps between the weights that sampled a token and the weights at the start of the step that trains it.

    0 for tokens that were not sampled in this run (version -1), and if a rollback discarded the weights that sampled.

    >>> staleness(3, step=6), staleness(5, step=6), staleness(-1, step=6)
    (2, 0, 0)
    """
    return max(step - 1 - version, 0) if version >= 0 else 0


class Completion(msgspec.Struct, frozen=True):
    """Sampled tokens of one completion, with one entry per token in each array."""

    sample: int
    tokens: bytes
    """int32; includes the end token if it was sampled."""
    logprobs: bytes
    """float32, at the sampling temperature (at temperature 1 when greedy)."""
    versions: bytes
    """int32."""
    finish: FinishReason | None
    """None if it was interrupted; it can be resumed from these tokens."""
    top_tokens: bytes = b""
    """int32, the `SamplingParams.top_logprobs` most likely tokens per position, most likely first."""
    top_logprobs: bytes = b""
    """float32, log-probabilities of `top_tokens`."""


class Fragment(msgspec.Struct, frozen=True, array_like=True):
    """Part of a streamed completion: its tokens from index `offset` on, with the arrays of `Completion`."""

    sample: int
    offset: int
    tokens: bytes
    logprobs: bytes
    versions: bytes
    top_tokens: bytes = b""
    top_logprobs: bytes = b""
    finish: FinishReason | None = None
    """Set on the last fragment."""


class ShardItem(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a shard, the process that stores it, and the scalars that the master computed for it."""

    key: str
    holder: str
    digest: str
    num_tokens: int
    num_loss_tokens: int
    values: dict[str, float] = {}
    """{"advantage": 0.7}"""


class LogicalShard(msgspec.Struct, frozen=True):
    """A fixed part of the optimizer batch. Gradients are summed over the shards in a fixed order, on any rank."""

    index: int
    items: tuple[ShardItem, ...]


class PieceKind(StrEnum):
    """Content of a piece: the values, a difference to add, or the factors of an adapter."""

    FULL = "full"
    DELTA = "delta"
    ADAPTER = "adapter"


class Piece(msgspec.Struct, frozen=True):
    """A slice of one named tensor. Slices are whole tensors today; the format supports parts and mesh coordinates.

    `Piece("lm_head.weight", "float32", (16, 96), ((0, 16), (0, 96)), {"dp": 0}, PieceKind.FULL, 0, 6144, "9f…")`
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    slice: tuple[tuple[int, int], ...]
    """[start, stop) of the slice, per dimension."""
    mesh: dict[str, int]
    """Coordinates of the rank that owns the piece: {"dp": 0, "tp": 0, "pp": 0}."""
    kind: PieceKind
    offset: int
    """Byte offset in the stream, segment or file that carries the pieces."""
    size: int
    digest: str
    """`runtime.digests.piece_digest` of the bytes."""


class WeightManifest(msgspec.Struct, frozen=True):
    """Contents and digest of one published weight version."""

    version: int
    step: int
    pieces: tuple[Piece, ...]
    size: int
    """Total size in bytes."""
    digest: str
    """xxh3-64 over all pieces' names and digests in order."""


class SegmentSource(msgspec.Struct, frozen=True, tag="segment"):
    """The pieces are in a shared-memory segment of one host, held by its agent under this name."""

    host: str
    name: str


class StreamSource(msgspec.Struct, frozen=True, tag="stream"):
    """The pieces can be fetched from a process over the bulk channel."""

    process: str
    owners: tuple[str, ...] = ()
    """If the process is a meta-server: the ranks that upload to it, by their share (`Piece.mesh["dp"]`). Missing pieces
    can be fetched from them."""
    chain: tuple[str, ...] = ()
    """Agents that fetch one from the other, piece by piece; the first from the meta-server."""


class FolderSource(msgspec.Struct, frozen=True, tag="folder"):
    """The pieces are in a Hugging Face folder that every server can read."""

    path: str


class DeviceSource(msgspec.Struct, frozen=True, tag="device"):
    """The pieces are in device memory, which other processes on the same accelerator can map (CUDA IPC)."""

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
    number: int = 0
    """Number that the memory carries while it holds this version; 0: not known."""
    offsets: tuple[int, ...] = ()
    """Where each piece of the manifest begins in this memory; empty: where the manifest says."""


class CollectiveSource(msgspec.Struct, frozen=True, tag="collective"):
    """The pieces are broadcast once by a process to these servers, all of which must take part."""

    process: str
    store: str
    """host:port of the rendezvous store."""
    key: str
    servers: tuple[str, ...]


WeightSource = SegmentSource | StreamSource | FolderSource | DeviceSource | CollectiveSource


MIN_TEMPERATURE = 0.01
"""Smallest temperature: below it, logits / temperature may overflow float32. Greedy is temperature 0."""


class SamplingParams(msgspec.Struct, frozen=True):
    """Decoding parameters of one request. Training refuses those that change the distribution (top-p, …).

    Order of application: `repetition_penalty` and `logit_bias` change the logits, `temperature` divides them, then
    `top_k`, `top_p` and `min_p` each truncate the remaining distribution. Reported log-probabilities are always those
    that the trainer would compute: at the temperature (1 if greedy), without penalty, bias and truncation.
    """

    temperature: float = 1.0
    """0: greedy."""
    max_new_tokens: int = 16
    num_samples: int = 1
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens in addition to the end tokens of the model."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; the token that completes one of them is the last token."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the smallest set of most likely tokens with at least this total probability."""
    min_p: float = 0.0
    """Sample from tokens with at least this probability relative to the most likely token."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of negative ones, of tokens that occur in prompt or completion."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and the value that is added to its logit."""
    ignore_end: bool = False
    """Continue after end tokens; stop tokens and stop texts still apply."""
    top_logprobs: int = 0
    """Number of most likely tokens to report per position."""


class Progress(msgspec.Struct, frozen=True):
    """Monotonic counters of a process; they distinguish slow from stuck: {"steps": 12, "tokens": 40960}."""

    counters: dict[str, int]


class Wait(msgspec.Struct, frozen=True):
    """A declared wait; times are monotonic seconds of the waiting process."""

    whom: str
    """Process or resource that is waited for."""
    what: str
    """Expected event: "an answer to RunCall"."""
    since: float
    until: float
    """Deadline."""
