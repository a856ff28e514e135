"""What a run is, as frozen structs; each field says what it means. Loading and checking: `recipe.py`.

The tree follows the stages: data → sampling, generation, rollout → algorithm, actor → evaluation, checkpoints →
cluster. A value the program can measure is not a setting.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class NewModel(_Section, frozen=True):
    """Shape of a model that is built from scratch."""

    seed: int = 0
    """Of its initial weights."""
    family: Literal["llama", "qwen2", "qwen3"] = "llama"
    hidden_size: int = 96
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    max_positions: int = 64
    alphabet: str = "0123456789+="
    """Characters of its tokenizer."""


class ModelSection(_Section, frozen=True):
    """Where the model comes from: a Hugging Face folder, or built from scratch."""

    path: str | None = None
    """Hugging Face folder (safetensors). Excludes `new`."""
    new: NewModel | None = None


class SourceSection(_Section, frozen=True):
    """One set of prompts, and which of its rows are held out."""

    source: str = "arithmetic"
    """What is read (`docs/own_data.md` has examples):
    "arithmetic" (`12+39=` → the sum, its digits reversed), "arithmetic:words" (`What is 12 + 39?` → the sum) or
    "arithmetic:products" (`(12+39)*7=` → its value);
    "reasoning_gym:TASK", any of its tasks by name;
    a .jsonl, .json or .parquet file, a folder of such files, or a pattern like `data/*.parquet`;
    a folder written by the library datasets (`folder:split` where it has splits), or "hf:NAME:CONFIG:SPLIT" of the hub;
    "stream:PATH", JSON lines that are still being written (a named pipe; "stream:-" is standard input);
    a folder that `kintsugi rollout` filled, whose samples are trained on as they are."""
    eval_source: str | None = None
    """Where held-out rows come from, if not from `source`: its first `num_eval` rows."""
    num_eval: int = 500
    """Problems held out from training: the last ones of a file, a fixed choice of generated ones."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a conversation (a list of `{role, content}`). A conversation that ends with an
    assistant's turn is the prompt of that turn."""
    completion_column: str | None = None
    """Column that SFT learns to write; not needed where prompts are conversations that end with an answer."""
    max_digits: int = 2
    """Generated arithmetic: digits per operand."""
    options: dict[str, Any] = {}
    """Options of a reasoning-gym task, its `seed` among them."""


class MixedSource(SourceSection, frozen=True):
    """A source among others."""

    weight: float = 1.0
    """Its share of the prompts is its weight over the sum of all weights."""


class DataSection(SourceSection, frozen=True):
    """Where prompts come from: one source, or several that are mixed."""

    sources: tuple[MixedSource, ...] = ()
    """Instead of `source`: several, each with its own columns and held-out rows. Each row gets a column `source`."""
    chat_template: bool = False
    """Put each prompt into the model's chat template, as a user's turn; otherwise text is plain. Conversations always
    go through it."""
    system: str | None = None
    """A system prompt before every conversation that has none of its own."""
    shuffle: bool = True
    """In an order that depends on seed, stage and epoch only. A stream is always taken as it comes."""
    max_bad_share: float = 0.01
    """Malformed rows are left out, counted and named in `<run>/data.json`; with more than this share of a source, the
    run does not start."""
    cache_dir: str = "~/.cache/kintsugi"
    """What is derived from data files, keyed by their content; it may be deleted at any time between runs."""


class SamplingSection(_Section, frozen=True):
    """How completions are drawn for training."""

    temperature: float = 1.0
    max_new_tokens: int = 16
    top_p: float = 1.0
    """Anything but 1 is refused for training: the trainer would see another distribution than was sampled."""
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


AlgorithmName = Literal[
    "sft", "reward_model", "dpo", "ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "rollout"
]
LEARN_PAIRS = frozenset({"reward_model", "dpo"})
"""Algorithms that learn from pairs of a chosen and a rejected completion."""
LEARN_ROWS = LEARN_PAIRS | {"sft"}
"""Those that learn from what the data says, and sample nothing."""
COMPARE_SAMPLES = frozenset({"grpo", "dr_grpo", "dapo", "rloo", "gspo"})
"""Those whose baseline is the other samples of the group, of which there must be at least two."""
LEARN_SAMPLES = COMPARE_SAMPLES | {"ppo", "reinforce_pp"}
"""Those that learn from what the model samples."""


class AlgorithmSection(_Section, frozen=True):
    """What is learned from, and how the loss is made. None means the algorithm's own value (`ALGORITHM_DEFAULTS`)."""

    name: AlgorithmName = "grpo"
    steps: int = 100
    batch_size: int = 32
    """Prompts per step; rows for SFT, pairs for the reward model and DPO."""
    group_size: int | None = None
    """Samples per prompt; 1 for SFT, 2 for pairs."""
    updates_per_step: int = 1
    """Optimizer updates on each batch."""
    clip_low: float | None = None
    clip_high: float | None = None
    ratio: Literal["token", "sequence", "sequence_mean"] | None = None
    """What is compared with the proximal policy: each token; the whole completion (the tokens' product); or its
    geometric mean per token."""
    proximal: Literal["sampler", "recompute", "approximate"] | None = None
    """From which policy the updates of a step may go away only as far as clipping lets them: the one that sampled; the
    one with which the step begins, whose log-probabilities the trainer computes; or an estimate of these, between
    sampler and policy by the token's staleness. None: "sampler" in a synchronous run, otherwise "recompute"."""
    importance: Literal["cap", "mask", "truncate"] | None = None
    """What is done with the weights proximal/sampler that make up for who sampled: kept at most at `importance_cap`;
    or tokens above it are left out. "truncate", for "sampler": policy/sampler, kept at most at the cap, weighs each
    token's gradient, and nothing is clipped."""
    importance_cap: float | None = None
    beta: float = 0.0
    """Weight of the KL to the reference model; 0 loads no reference. For DPO, its inverse temperature."""
    kl: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL: k1 = log π/ref, k2 = ½ (log π/ref)², k3 = ref/π − 1 − log ref/π."""
    kl_in: Literal["loss", "reward"] | None = None
    """Whether `beta` × KL is added to the loss or taken off the reward."""
    entropy_weight: float = 0.0
    """Of an entropy bonus in the loss."""
    denominator: Literal["tokens", "sequences", "constant"] | None = None
    """What token losses are divided by: all loss tokens of the batch; each sequence's own, then the sequences; or
    sequences × max_new_tokens."""
    scale_by_std: bool | None = None
    """Divide the advantage by the group's standard deviation."""
    gamma: float = 1.0
    """Discount per token (PPO, REINFORCE++)."""
    gae_lambda: float = 0.95
    """Of generalised advantage estimation (PPO)."""
    mask_truncated: bool = False
    """Learn nothing from samples that ended by length; otherwise they count as cut off, not as finished."""
    resampling_rounds: int | None = None
    """DAPO: groups whose rewards are all equal are replaced, at most this many batches of them per step."""
    overlong_buffer: int = 0
    """DAPO: the last so many tokens before `max_new_tokens` cost reward, linearly up to `overlong_penalty`."""
    overlong_penalty: float = 1.0
    reward: tuple[str, ...] = ("kintsugi.rollout.rewards.exact_answer",)
    """Dotted paths of functions `f(completions, **columns) -> list[float]`; their weighted sum is the reward. A path
    may be followed by its weight: `my.module.length_bonus * 0.1`."""


ALGORITHM_DEFAULTS: dict[str, dict[str, Any]] = {
    "sft": {"group_size": 1},
    "reward_model": {"group_size": 2},
    "dpo": {"group_size": 2},
    "ppo": {"kl_in": "reward", "kl": "k1"},
    "dr_grpo": {"scale_by_std": False, "denominator": "constant"},
    "dapo": {"clip_high": 0.28, "resampling_rounds": 4},
    "rloo": {
        "ratio": "sequence",
        "scale_by_std": False,
        "kl_in": "reward",
        "kl": "k1",
        "denominator": "sequences",
    },
    "reinforce_pp": {"kl_in": "reward", "kl": "k1"},
    "gspo": {
        "ratio": "sequence_mean",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "denominator": "sequences",
    },
}
"""Where an algorithm's own values differ from the common ones."""


class Algorithm(AlgorithmSection, frozen=True):
    """The same with nothing left open; the common values stand here."""

    group_size: int = 8
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio: Literal["token", "sequence", "sequence_mean"] = "token"
    proximal: Literal["sampler", "recompute", "approximate"] = "sampler"
    importance: Literal["cap", "mask", "truncate"] = "cap"
    importance_cap: float = 5.0
    kl: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    denominator: Literal["tokens", "sequences", "constant"] = "tokens"
    scale_by_std: bool = True
    resampling_rounds: int = 0


def resolved(section: AlgorithmSection) -> Algorithm:
    """The recipe's values, where it says nothing the algorithm's own, where that has none the common ones."""
    said = {name: getattr(section, name) for name in section.__struct_fields__}
    given = {name: value for name, value in said.items() if value is not None}
    return Algorithm(**{**ALGORITHM_DEFAULTS.get(section.name, {}), **given})


class ReferenceSection(_Section, frozen=True):
    """What the KL is measured against; loaded only where something needs it (`algorithm.beta`, DPO)."""

    path: str | None = None
    """Hugging Face folder; None takes the weights with which the stage begins."""
    copy_every: int = 0
    """Replace it by the actor's weights every so many steps; 0 keeps it."""
    moving_average: float = 0.0
    """After every step move it to this share of itself plus the rest of the actor; 0 keeps it."""


class CriticSection(_Section, frozen=True):
    """PPO's value model: trained with the actor, by an optimizer of its own."""

    path: str | None = None
    """Hugging Face folder, with or without a value head; None begins with the actor's weights and a head of zeros."""
    learning_rate: float = 1e-3
    value_clip: float = 0.2
    """How far a value may move from what it was when the batch was sampled before it stops counting; 0: freely."""
    warmup_steps: int = 0
    """Steps at the beginning of the stage in which the critic learns and the actor waits."""


class RewardModelSection(_Section, frozen=True):
    """A trained reward model, served by the model workers; its score is added to the other rewards."""

    path: str
    """Folder of a checkpoint of `algorithm.name=reward_model`, or any Hugging Face folder with a score head."""
    weight: float = 1.0


class ActorSection(_Section, frozen=True):
    """The model that learns, its optimizer, and the workers that hold it."""

    workers: int = 2
    """Model workers; data parallel."""
    learning_rate: float = 5e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Optimizer updates (`algorithm.updates_per_step` of them in a step) in which the rate rises to its value."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 8192
    """Most tokens in one forward and backward pass."""
    logical_shards: int = 4
    """Parts of the optimizer batch whose gradients are summed in fixed order; at least as many as workers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward pass; master weights are float32."""


class WarmupSection(_Section, frozen=True):
    """SFT before the main algorithm, in the same run."""

    seed: int = 0
    """Of the order of its rows. Its own, so that runs with different seeds learn from the same starting point."""
    steps: int = 100
    batch_size: int = 64
    learning_rate: float = 3e-3
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0


Strategy = Literal["least_loaded", "round_robin", "prefix_affine"]
"""Which server gets a request; see `generation/router.py`."""


class GenerationSection(_Section, frozen=True):
    """The generation servers."""

    servers: int = 2
    slots: int = 64
    """Sequences decoded at once by one server."""
    max_length: int = 32
    """Longest prompt + completion, in tokens."""
    kv_cache_gib: float | None = None
    """Memory of one server for keys and values; unset: for all slots at full length, as far as there is memory."""
    strategy: Strategy = "least_loaded"
    """Which server gets a request: the one with the fewest tokens in flight, each in turn, or the one that computed the
    beginning of the prompt before."""
    backend: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Who computes: the engine of this package, or servers of another that are running already."""
    urls: tuple[str, ...] = ()
    """Of those other servers, one for each of `servers`: `["http://127.0.0.1:8000"]`."""


class AsynchronySection(_Section, frozen=True):
    """How far rollout may run ahead of training. With `max_staleness` 0 a run is synchronous."""

    max_staleness: int = 0
    """Steps: no token is trained that was sampled from weights older than this many steps before its own."""
    overtake: int = 0
    """Groups that a batch may pass over because they are not complete; it takes the next ones in the order of issue.
    What would become too old by being passed over once more is waited for."""
    decay: float = 1.0
    """Weight of a sample in the loss, to the power of its staleness."""
    running: Literal["keep", "recompute", "interrupt"] = "keep"
    """What becomes of completions that are being sampled when new weights arrive: they go on with the keys and values
    they have, or with new ones, or are cut off and continued like those of a server that died."""
    adaptive: bool = True
    """Let the master move how far rollout runs ahead, and the number of groups in flight, by what it measures."""


Transport = Literal["auto", "in_place", "shared_memory", "collective", "stream", "disk"]
"""How weights reach the servers; see `weights/`."""


class WeightsSection(_Section, frozen=True):
    """How new weights are published."""

    transport: Transport = "auto"
    """By itself: in place on one device, through shared memory on one host, by stream between hosts."""
    deadline_s: float = 60.0
    """How long a server may take to get and verify a version before it is left behind, and named."""


class RolloutSection(_Section, frozen=True):
    """The rollout workers."""

    workers: int = 2
    environment: str | None = None
    """What the model acts in, over several turns: a name (`calculator`, `number_game`, `reasoning_gym`), or the dotted
    path of a class with `reset`, `step` and `close`, or of an agent program; see `docs/own_environment.md`. Unset: one
    turn, scored by `algorithm.reward`."""
    options: dict[str, Any] = {}
    """Arguments of the environment."""
    max_turns: int = 8
    """Of one episode; then it is cut off."""
    turn_discount: float = 1.0
    """How much less each later turn's reward is worth: the reward of an episode is the sum of its turns' rewards, each
    times this to the power of the turn's number, which counts from 0."""
    turn_timeout_s: float = 30.0
    """For one `reset` or `step` of the environment."""
    attempts: int = 3
    """How often a group is tried before its samples are quarantined."""
    reward_timeout_s: float = 10.0
    """For the reward functions of one group; a function that takes longer is ended, and has failed this attempt."""
    allow_unsandboxed: bool = False
    """Where this machine can not isolate programs, run them with the rights of this user instead of refusing."""


class EvaluationSection(_Section, frozen=True):
    """Held-out evaluation, always at one pinned weight version."""

    every: int = 0
    """Steps between evaluations; 0 evaluates only before and after the main stage."""
    num_samples: int = 4
    """k of mean@k and pass@k, sampled beside the greedy answer; 0 leaves them out."""


class CheckpointSection(_Section, frozen=True):
    every: int = 25
    """Steps between checkpoints; the last step is always saved. 0 saves only there."""
    keep: int = 2


ShareDevice = Literal["no", "keep", "offload"]
"""See `lease/`."""


class BandwidthSection(_Section, frozen=True):
    """Bytes per second between hosts, at most, where other programs need the network too; null is no limit."""

    samples: float | None = None
    """What a host takes from others to train on."""
    copies: float | None = None
    """What a rank sends of its state for another host to keep; where steps are faster, some have no copy."""


class ClusterSection(_Section, frozen=True):
    """Where the processes run."""

    hosts: int = 1
    """Local node agents; hosts share nothing but the run folder."""
    port: int = 0
    """Port of the master; 0 takes a free one."""
    bandwidth: BandwidthSection = BandwidthSection()
    start_timeout_s: float = 120.0
    """Longest start-up of a process, import of libraries included."""
    share_device: ShareDevice = "no"
    """Let ranks and generation servers that compute on the same accelerator (or on the processors of a host that has
    none) take turns on it. "keep": everything stays in its memory. "offload": whose turn it is not keeps weights,
    optimizer and cache in the host's memory; needs an accelerator."""
    spares: int = 0
    """Processes per host that are started beforehand and wait, device and all, to take the place of a rank or server.
    Each takes the memory of an idle process, and that of a context on the accelerator where there is one."""


class LoggingSection(_Section, frozen=True):
    wandb: bool = False
    """Also log to Weights & Biases (needs the extra `wandb`)."""


class MonitoringSection(_Section, frozen=True):
    """How a run that goes on tells of itself; what it records does not depend on this (`docs/observation.md`)."""

    port: int = 0
    """Where Prometheus finds the run's figures, under /metrics; 0 offers none."""
    host: str = "127.0.0.1"
    """Who may ask for them: only this host; 0.0.0.0 lets everybody who can reach it."""
    webhook: str | None = None
    """URL to which alerts and diagnoses are posted as JSON: `https://hooks.example.com/kintsugi`."""


class Config(_Section, frozen=True):
    """A whole run. `kintsugi check RECIPE` prints it with the origin of every value."""

    name: str
    seed: int = 0
    run_dir: str | None = None
    """Folder of the run; must not exist. Default: runs/<name>-<number>."""
    deterministic: bool = True
    """Same seed, same bits, whatever the number of workers and servers. Of an asynchronous run only what is computed:
    who arrives when decides which weights a sample is drawn from."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    warmup: WarmupSection | None = None
    actor: ActorSection = ActorSection()
    critic: CriticSection = CriticSection()
    reference: ReferenceSection = ReferenceSection()
    reward_model: RewardModelSection | None = None
    sampling: SamplingSection = SamplingSection()
    generation: GenerationSection = GenerationSection()
    rollout: RolloutSection = RolloutSection()
    asynchrony: AsynchronySection = AsynchronySection()
    weights: WeightsSection = WeightsSection()
    eval: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    cluster: ClusterSection = ClusterSection()
    logging: LoggingSection = LoggingSection()
    monitoring: MonitoringSection = MonitoringSection()
