"""The configuration of a run as frozen structs, with a docstring for every field.

The sections follow the data flow: data → sampling, generation, rollout → algorithm, actor → evaluation, checkpoints →
cluster. Values that the program can measure are not settings. `config/recipe.py` loads a configuration,
`config/validation.py` validates it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, Self

import msgspec


class _Section(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, repr_omit_defaults=True
):
    """A section of the configuration. Its text has the values that are not defaults."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values: `config.replace(seed=1)`, `config.actor.replace(learning_rate=3e-4)`."""
        return msgspec.structs.replace(self, **changes)


class NewModel(_Section, frozen=True):
    """Architecture of a model with random weights."""

    seed: int = 0
    """Seed of the initial weights."""
    family: Literal["llama", "qwen2", "qwen3"] = "llama"
    hidden_size: int = 96
    intermediate_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    max_positions: int = 64
    alphabet: str = "0123456789+="
    """Characters of the tokenizer, one token each."""


class ModelSection(_Section, frozen=True):
    """Source of the model: a Hugging Face folder, or a new model with random weights."""

    path: str | None = None
    """Hugging Face folder with safetensors files, or the name of a model on the hub, `owner/name`: taken from the local
    cache, or downloaded. Excludes `new`."""
    new: NewModel | None = None
    """Architecture of a new model. Excludes `path`."""


class SourceSection(_Section, frozen=True):
    """A data set and its split into training and held-out rows."""

    source: str = "arithmetic"
    """Data to read (`docs/own_data.md` has examples):
    "arithmetic" (`12+39=` → the sum, its digits reversed), "arithmetic:words" (`What is 12 + 39?` → the sum) or
    "arithmetic:products" (`(12+39)*7=` → its value);
    "reasoning_gym:TASK", a task of the reasoning-gym library;
    a .jsonl, .json or .parquet file, a folder of such files, or a pattern like `data/*.parquet`;
    a folder written by the datasets library (`folder:split` if it has splits), or "hf:NAME:CONFIG:SPLIT" of the hub;
    "stream:PATH", JSON lines from a named pipe or a growing file ("stream:-" is standard input);
    the `rollouts` folder of a `kintsugi rollout`: its samples are trained on without sampling again."""
    eval_source: str | None = None
    """Separate source of held-out rows, of which the first `num_eval` are used. Default: rows of `source`."""
    num_eval: int = 500
    """Number of rows that are held out from training: the last rows of a file, or a fixed selection of generated
    ones."""
    prompt_column: str = "prompt"
    """Column with the prompt: text, or a conversation (a list of `{role, content}`). If a conversation ends with an
    assistant turn, that turn is the completion and the turns before it are the prompt."""
    completion_column: str | None = None
    """Column with the target text of SFT. Not needed if prompts are conversations that end with an assistant turn."""
    max_digits: int = 2
    """Maximum number of digits per operand of generated arithmetic."""
    options: dict[str, Any] = {}
    """Options of a reasoning-gym task, including its `seed`."""


class MixedSource(SourceSection, frozen=True):
    """One of several sources that are mixed."""

    weight: float = 1.0
    """Relative share of the prompts: this weight divided by the sum of all weights."""


class DataSection(SourceSection, frozen=True):
    """Source of the prompts: one data set, or a mixture of several."""

    sources: tuple[MixedSource, ...] = ()
    """Mixture of sources, instead of `source`. Each has its own columns and held-out rows; each row gets a column
    `source`."""
    chat_template: bool = False
    """Format text prompts with the model's chat template, as a user turn. Conversations are always formatted with
    it."""
    system: str | None = None
    """System prompt for every conversation that has none."""
    shuffle: bool = True
    """Shuffle the rows. The order depends on seed, stage and epoch only. A stream is never shuffled."""
    max_bad_share: float = 0.01
    """Maximum share of malformed rows per source. Malformed rows are skipped and listed in `<run>/data.json`; a run
    with more of them does not start."""
    cache_dir: str = "~/.cache/kintsugi"
    """Cache of converted and tokenized data, keyed by content. May be deleted while no run uses it."""


class SamplingSection(_Section, frozen=True):
    """Decoding parameters of training samples."""

    temperature: float = 1.0
    max_new_tokens: int = 16
    top_p: float = 1.0
    """Must be 1 for training: otherwise the log-probabilities of the trainer would be of a different distribution than
    the one that was sampled."""
    top_k: int = 0
    """Must be 0 (off) for training, like `top_p` = 1."""
    min_p: float = 0.0
    """Must be 0 (off) for training, like `top_p` = 1."""
    repetition_penalty: float = 1.0
    """Must be 1 (off) for training, like `top_p` = 1."""


AlgorithmName = Literal[
    "sft", "reward_model", "dpo", "ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "rollout"
]
LEARN_PAIRS = frozenset({"reward_model", "dpo"})
"""Algorithms that train on pairs of a chosen and a rejected completion."""
LEARN_ROWS = LEARN_PAIRS | {"sft"}
"""Algorithms that train on rows of the data set and sample nothing."""
COMPARE_SAMPLES = frozenset({"grpo", "dr_grpo", "dapo", "rloo", "gspo"})
"""Algorithms with the other samples of the group as baseline; the group size is at least 2."""
LEARN_SAMPLES = COMPARE_SAMPLES | {"ppo", "reinforce_pp"}
"""Algorithms that train on samples of the model."""


class AlgorithmSection(_Section, frozen=True):
    """Algorithm, loss and reward. None selects the default of the algorithm (`ALGORITHM_DEFAULTS`)."""

    name: AlgorithmName = "grpo"
    steps: int = 100
    """Number of training steps, without those of `warmup`."""
    batch_size: int = 32
    """Prompts per step. For SFT: rows; for the reward model and DPO: pairs."""
    group_size: int | None = None
    """Samples per prompt. 1 for SFT, 2 for algorithms that train on pairs."""
    updates_per_step: int = 1
    """Optimizer updates on each batch."""
    clip_low: float | None = None
    """Lower clipping bound of the probability ratio is 1 − `clip_low`."""
    clip_high: float | None = None
    """Upper clipping bound of the probability ratio is 1 + `clip_high`."""
    ratio: Literal["token", "sequence", "sequence_mean"] | None = None
    """Unit of the probability ratio to the proximal policy: each token, the whole completion (product of the token
    ratios), or the geometric mean over the tokens of the completion."""
    proximal: Literal["sampler", "recompute", "approximate"] | None = None
    """Policy in the denominator of the clipped ratio. "sampler": the policy that sampled. "recompute": the policy at
    the start of the step; the trainer computes its log-probabilities. "approximate": an interpolation of sampler and
    current policy by the staleness of the token. Default: "sampler" in a synchronous run, otherwise "recompute"."""
    importance: Literal["cap", "mask", "truncate"] | None = None
    """Correction for off-policy samples, by the importance weight proximal/sampler of each token. "cap": the weight is
    at most `importance_cap`. "mask": tokens with a larger weight are excluded from the loss. "truncate" (with
    `proximal` "sampler"): policy/sampler, at most the cap, weights the gradient of each token; nothing is clipped."""
    importance_cap: float | None = None
    """Largest importance weight; see `importance`."""
    beta: float = 0.0
    """Coefficient of the KL divergence to the reference model; 0 loads no reference model. For DPO: its beta."""
    kl: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL divergence: k1 = log π/ref, k2 = ½ (log π/ref)², k3 = ref/π − 1 − log ref/π."""
    kl_in: Literal["loss", "reward"] | None = None
    """Whether `beta` × KL is added to the loss or subtracted from the reward."""
    entropy_weight: float = 0.0
    """Coefficient of the entropy bonus in the loss."""
    denominator: Literal["tokens", "sequences", "constant"] | None = None
    """Normalisation of the token losses. "tokens": mean over the loss tokens of the batch. "sequences": mean per
    sequence, then over the sequences. "constant": sum divided by number of sequences × `max_new_tokens`."""
    scale_by_std: bool | None = None
    """Divide advantages by the standard deviation of the group's rewards."""
    gamma: float = 1.0
    """Discount factor per token (PPO, REINFORCE++)."""
    gae_lambda: float = 0.95
    """Lambda of generalised advantage estimation (PPO)."""
    mask_truncated: bool = False
    """Exclude samples from the loss that were truncated by length. Otherwise they are trained on as truncated
    episodes."""
    resampling_rounds: int | None = None
    """DAPO: groups with equal rewards are replaced by new ones, at most this many batches per step."""
    overlong_buffer: int = 0
    """DAPO: completions that end in the last `overlong_buffer` tokens before `max_new_tokens` are penalised, linearly
    up to `overlong_penalty`."""
    overlong_penalty: float = 1.0
    """Largest penalty of an overlong completion; see `overlong_buffer`."""
    reward: tuple[str, ...] = ("kintsugi.rollout.rewards.exact_answer",)
    """Dotted paths of reward functions `f(completions, **columns) -> list[float]`; the reward is their weighted sum. A
    weight may follow the path: `my.module.length_bonus * 0.1`."""
    custom: str | None = None
    """Path of the `CustomAlgorithm` that the recipe named in `name`; `name` is then its base. Filled in on loading."""


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
"""Defaults of an algorithm where they differ from the common ones in `Algorithm`."""


class Algorithm(AlgorithmSection, frozen=True):
    """`AlgorithmSection` with all values resolved. The defaults here are common to all algorithms."""

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
    """Resolve every value: from the recipe, else the default of the algorithm, else the common default."""
    values = {name: getattr(section, name) for name in section.__struct_fields__}
    given = {name: value for name, value in values.items() if value is not None}
    return Algorithm(**{**ALGORITHM_DEFAULTS.get(section.name, {}), **given})


class ReferenceSection(_Section, frozen=True):
    """Reference model of the KL divergence; loaded only if it is used (`algorithm.beta`, DPO)."""

    path: str | None = None
    """Hugging Face folder. Default: the weights at the start of the stage."""
    copy_every: int = 0
    """Replace the reference by the actor's weights every this many steps; 0: never."""
    moving_average: float = 0.0
    """Decay of an exponential moving average: after every step, reference = decay × reference + (1 − decay) × actor.
    0: off."""


class CriticSection(_Section, frozen=True):
    """Value model of PPO, trained together with the actor by its own optimizer."""

    path: str | None = None
    """Hugging Face folder, with or without a value head. Default: the actor's weights and a value head of zeros."""
    learning_rate: float = 1e-3
    value_clip: float = 0.2
    """Clipping range of the value loss around the values at the start of the step; 0: no clipping."""
    warmup_steps: int = 0
    """Steps at the start of the stage in which only the critic is trained."""


class RewardModelSection(_Section, frozen=True):
    """Trained reward model, evaluated by the model workers. Its score is added to the other rewards."""

    path: str
    """Checkpoint folder of a run with `algorithm.name=reward_model`, or any Hugging Face folder with a score head."""
    weight: float = 1.0
    """Factor of the score in the total reward."""


CPU_BLOCK_TOKENS = 2048
"""Tokens per forward pass of a deterministic run on CPUs. A constant, because another value gives other bits."""


MINDSPORE_ENVIRONMENT = ".venv-mindspore"
"""Folder of the environment that `make setup-mindspore` makes, beside that of the run."""


class LayoutSection(_Section, frozen=True):
    """How the optimizer's state is spread over the model workers."""

    shards: int = 1
    """Parts into which master weights and optimizer moments are cut; each model worker holds and updates one of them.
    Gradients and the weights to compute with stay whole on every worker, unless `gather` is `layer`. Does not change
    the result."""
    stages: int = 1
    """Pipeline stages: parts into which the layers of every model are cut. A worker computes only the layers of its
    stage, and passes activations on. Does not change the result."""
    tensors: int = 1
    """Workers that compute each layer together."""
    gather: Literal["step", "layer"] = "step"
    """When workers gather the weights to compute with from the `shards`. `step`: all, after each update. `layer`: those
    of a layer before it is computed, and no worker keeps them, nor whole gradients; each layer is computed again in
    the backward pass, as with `recompute`. Does not change the result."""
    replicas: int | None = None
    """Model workers that hold the same part: `workers` / (`shards` × `stages` × `tensors`), which is the default. With
    2 or more the state of a lost worker comes from another one."""

    @property
    def boxes(self) -> int:
        """Parts into which the state is cut; every model worker holds one of them."""
        return self.shards * self.model_ranks

    @property
    def model_ranks(self) -> int:
        """Workers that compute the same samples together, each with a part of the model."""
        return self.stages * self.tensors

    @property
    def gathers_layers(self) -> bool:
        """Whether no worker has whole weights: they are gathered layer by layer."""
        return self.gather == "layer"


class ActorSection(_Section, frozen=True):
    """The trained model, its optimizer, and the model workers."""

    workers: int = 2
    """Number of model workers (ranks)."""
    layout: LayoutSection = LayoutSection()
    learning_rate: float = 5e-4
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Optimizer updates over which the learning rate rises linearly to its value. A step has
    `algorithm.updates_per_step` updates."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 16384
    """Maximum number of tokens in one forward and backward pass; a longer sequence has one of its own. On a GPU the
    bits of the result depend on it. A deterministic run on CPUs takes 2,048, whatever is given."""
    logical_shards: int | None = None
    """Fixed parts of the optimizer batch, a multiple of `workers` (of those workers that compute different samples, if
    `layout.stages` or `layout.tensors` is above 1). Default: one for each of them. Gradients are summed
    over them in a fixed order, so that with the same number of parts the result does not depend on the number of
    workers: set it to compare, or continue, with other workers. Each part beyond one per worker costs up to 4 bytes
    per parameter on its device."""
    logical_slices: int = 1
    """Fixed parts into which attention, MLP and vocabulary of every model are cut, a power of two that divides the key
    and value heads. Partial sums are added in a fixed order. The result depends on this number, because sums are
    rounded."""
    recompute: bool = False
    """Keep only the input of each layer in the forward pass, and compute the layer again in the backward pass: about
    25 times less memory per token for a third more computation. For long sequences and large models."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the forward and backward pass. Master weights are float32."""
    framework: Literal["torch", "mindspore"] = "torch"
    """Training framework of the model workers. MindSpore trains SFT and the algorithms that compare the samples of a
    prompt, in float32; its workers need an interpreter of their own (`python`)."""
    python: str | None = None
    """Interpreter of the model workers, where they need another environment than the rest of the run. Default: the
    interpreter of the run or, for MindSpore, that of `make setup-mindspore` (`.venv-mindspore` beside the environment
    of the run)."""

    @property
    def interpreter(self) -> str | None:
        """Interpreter of the model workers; None for that of the run."""
        if self.python is not None:
            return str(Path(self.python).expanduser().absolute())
        if self.framework == "mindspore":
            return str(Path(sys.prefix).parent / MINDSPORE_ENVIRONMENT / "bin" / "python")
        return None

    @property
    def num_shards(self) -> int:
        """Number of logical shards: as given, or one per data-parallel part."""
        return self.data_parallel if self.logical_shards is None else self.logical_shards

    @property
    def data_parallel(self) -> int:
        """Parts of a batch that are computed at the same time, each by one worker, or by those of one model."""
        return max(1, self.workers // self.layout.model_ranks)

    def block_tokens(self, *, deterministic: bool, is_cpu: bool) -> int:
        """Maximum number of tokens in one pass on a device of this kind."""
        return CPU_BLOCK_TOKENS if deterministic and is_cpu else self.micro_batch_tokens


class WarmupSection(_Section, frozen=True):
    """SFT stage before the main algorithm, in the same run."""

    seed: int = 0
    """Seed of the row order. Separate from the seed of the run, so that runs with different seeds have the same
    warm-up."""
    steps: int = 100
    batch_size: int = 64
    learning_rate: float = 3e-3
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0


Strategy = Literal["least_loaded", "round_robin", "prefix_affine"]
"""Routing policy of generation requests; see `generation/router.py`."""


class GenerationSection(_Section, frozen=True):
    """Generation servers."""

    servers: int = 2
    """Number of generation servers."""
    slots: int = 64
    """Maximum number of sequences that one server decodes concurrently."""
    max_length: int = 32
    """Maximum length of prompt + completion, in tokens."""
    kv_cache_gib: float | None = None
    """KV cache size of one server in GiB. Default: enough for all slots at `max_length`, limited by the free memory."""
    strategy: Strategy = "least_loaded"
    """Routing of requests: to the server with the fewest tokens in flight, in turn, or to the server that has the
    longest prefix of the prompt in its KV cache."""
    backend: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Inference engine: the one of this package, or vLLM or SGLang servers that are already running."""
    urls: tuple[str, ...] = ()
    """URLs of the vLLM or SGLang servers, one for each of `servers`: `["http://127.0.0.1:8000"]`."""


class AsynchronySection(_Section, frozen=True):
    """Asynchronous training: how far rollout may run ahead. With `max_staleness` 0 a run is synchronous."""

    max_staleness: int = 0
    """Maximum age of trained tokens, in steps between the weights that sampled a token and the step that trains it."""
    overtake: int = 0
    """Number of incomplete groups that a batch may skip; it takes later groups in the order of issue instead. Groups
    that would exceed `max_staleness` if skipped once more are waited for."""
    decay: float = 1.0
    """Base of the loss weight of a sample: its weight is `decay` to the power of its staleness."""
    running: Literal["keep", "recompute", "interrupt"] = "keep"
    """Completions in flight when new weights arrive. "keep": continue with the old KV cache. "recompute": recompute the
    KV cache with the new weights and continue. "interrupt": stop, and resume like after the loss of a server."""
    adaptive: bool = True
    """Let the master adapt, by measurement, how far rollout runs ahead and how many groups are in flight."""


Transport = Literal["auto", "in_place", "shared_memory", "collective", "stream", "disk"]
"""Transport of weights to the servers; see `weights/`."""


class WeightsSection(_Section, frozen=True):
    """Publication of new weights to the generation servers."""

    transport: Transport = "auto"
    """Transport of the weights. "auto": in place on the same device, shared memory on the same host, a stream between
    hosts."""
    deadline_s: float = 60.0
    """Deadline for a server to load and verify a version. A server that misses it is reported and skipped."""


class RolloutSection(_Section, frozen=True):
    """Rollout workers, environments and reward functions."""

    workers: int = 2
    """Number of rollout workers."""
    environment: str | None = None
    """Multi-turn environment: a name (`calculator`, `number_game`, `reasoning_gym`), or the dotted path of a class with
    `reset`, `step` and `close`, or of an agent function; see `docs/own_environment.md`. Default: single turn, scored by
    `algorithm.reward`."""
    options: dict[str, Any] = {}
    """Arguments of the environment."""
    max_turns: int = 8
    """Maximum number of turns of an episode; longer episodes are truncated."""
    turn_discount: float = 1.0
    """Discount factor per turn: the reward of an episode is the sum over turns t = 0, 1, … of `turn_discount`^t × the
    reward of turn t."""
    turn_timeout_s: float = 30.0
    """Timeout of one `reset` or `step` of the environment."""
    attempts: int = 3
    """Attempts per group; after the last one its samples are quarantined."""
    reward_timeout_s: float = 10.0
    """Timeout of the reward functions of one group. A function that exceeds it is killed and the attempt has failed."""
    allow_unsandboxed: bool = False
    """Run generated programs with the rights of the current user if this machine has no sandbox. Otherwise such a run
    is refused."""


class EvaluationSection(_Section, frozen=True):
    """Held-out evaluation. All answers of one evaluation are of the same weight version."""

    every: int = 0
    """Steps between evaluations. 0: only before and after the main stage."""
    num_samples: int = 4
    """Samples per problem in addition to the greedy answer, for mean@k and pass@k. 0: greedy only."""


class CheckpointSection(_Section, frozen=True):
    """Checkpoints on disk."""

    every: int = 25
    """Steps between checkpoints. The last step is always saved; 0: only the last step."""
    keep: int = 2
    """Number of checkpoints to keep; older ones are deleted, except the one with the highest held-out accuracy."""
    copy_to: str = ""
    """Folder, or URL of an object store (fsspec: `s3://bucket/runs`), to which finished checkpoints are copied beside
    training, into a folder of the run's name. Empty: no copies."""


ShareDevice = Literal["no", "keep", "offload"]
"""Sharing of one accelerator by training and generation; see `device_lease/`."""


class BandwidthSection(_Section, frozen=True):
    """Bandwidth limits between hosts, in bytes per second, for networks shared with other programs. null: no limit."""

    samples: float | None = None
    """Limit per host for fetching samples from other hosts."""
    copies: float | None = None
    """Limit per rank for sending snapshots of its state to another host. If steps are faster than that, some steps have
    no snapshot there."""


ENGINES = ("slurm", "ray", "k8s")
"""Values of `cluster.on` that name an engine; every other value is the path of a hosts file."""


class SlurmSection(_Section, frozen=True):
    """The job that is submitted where `cluster.on` is `slurm` and there is no allocation yet."""

    nodes: int = 1
    """Number of nodes that run processes."""
    spare_nodes: int = 0
    """Further nodes, on which no process is placed until another node is lost."""
    partition: str = ""
    """Partition. Empty: the default one of the site."""
    time_limit_min: int = 0
    """Time limit in minutes. 0: that of the partition."""
    stop_before_s: int = 180
    """Time before the limit at which the run stops after its step, with a checkpoint, and is queued again. Slurm's
    warning may come half a minute later than asked for."""
    options: tuple[str, ...] = ()
    """Further options of sbatch: `[--account=lab, --gpus-per-node=8]`."""
    scratch: str = ""
    """Folder for copied files on the nodes. Empty: the user's cache folder."""


class RaySection(_Section, frozen=True):
    """Nodes of an existing Ray cluster, for `cluster.on: ray`."""

    address: str = ""
    """Address of the cluster: "10.0.0.1:6379". Empty: that of RAY_ADDRESS, or of the Ray node on this machine."""
    nodes: int = 0
    """Number of nodes, one host each. 0: all nodes that have the resources below."""
    cpus: int = 1
    """CPUs that are reserved on each node, as Ray counts them; a node with fewer is not used."""
    gpus: int = 0
    """GPUs that are reserved on each node and used by the run; a node with fewer is not used."""


class KubernetesSection(_Section, frozen=True):
    """Pods of a Kubernetes cluster, for `cluster.on: k8s`."""

    pods: int = 2
    """Number of pods, one host each."""
    spare_pods: int = 0
    """Pods, the last ones, on which no process is placed until another host is lost."""
    namespace: str = ""
    """Namespace of the pods. Empty: that of the kubeconfig's context, or of the pod that this command runs in."""
    image: str = ""
    """Image of the pods: the same versions of Kintsugi, torch and Python as here."""
    workload: Literal["auto", "volcano", "job", "pods"] = "auto"
    """Controller of the pods: a Volcano job, an Indexed Job (Kubernetes 1.24 and later), or none. "auto": the first of
    them that the cluster has."""
    gpus: int = 0
    """Accelerators of each pod; a pod that has fewer is refused."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the resource that is asked for `gpus`."""
    cpus: float | None = None
    """CPUs that each pod requests. null: 1 for each rank and generation server of the pod that has most of them, and
    0.1 for each other process. 0: no request."""
    memory_gib: float | None = None
    """Memory that each pod requests. null: the estimate of `kintsugi check` for the processes of the pod that needs
    most. 0: no request."""
    template: str = ""
    """YAML file with a pod template (`metadata`, `spec`) that is merged into the pods: volumes, tolerations, limits,
    pull secrets. The container is named `agent`."""


class ClusterSection(_Section, frozen=True):
    """Hosts and processes."""

    hosts: int = 1
    """Number of hosts, each with its own agent. Without `on` they are agents of this machine; with `on` the number
    follows from it."""
    on: str = ""
    """Path of a hosts file: the machines of the other hosts, which are started over ssh; or an engine that places
    them: `slurm`, the nodes of an allocation; `ray`, nodes of a Ray cluster; `k8s`, pods of a Kubernetes cluster. The
    first host, with the master, is this machine. Empty: all hosts are agents of this machine. See `docs/cluster.md`."""
    slurm: SlurmSection = SlurmSection()
    ray: RaySection = RaySection()
    kubernetes: KubernetesSection = KubernetesSection()
    slots: tuple[int, ...] = ()
    """Processes that each host gets in one round of placement, by host. 0: no ranks, servers or rollout workers. Set
    from the hosts file; empty: 1 each."""
    spare_hosts: int = 0
    """Hosts, the last ones, on which no process is placed until another host is lost. Set from the hosts file."""
    address: str = ""
    """Address of this machine at which the other hosts reach it. Empty: that of its route to them."""
    away_s: float = 60.0
    """A host that has not heard of the launcher for this long ends its processes."""
    port: int = 0
    """Port of the master. 0: any free port."""
    bandwidth: BandwidthSection = BandwidthSection()
    bulk: Literal["encrypted", "authenticated"] = "encrypted"
    """Protection of weights and states between hosts. "encrypted": TLS 1.3. "authenticated": plain TCP with a message
    authentication code per chunk; faster, and others on the network can read the weights."""
    start_timeout_s: float = 120.0
    """Timeout for the start of a process, including imports."""
    share_device: ShareDevice = "no"
    """Time-share one accelerator (or the CPUs of a host without accelerators) between ranks and generation servers.
    "keep": all state stays in device memory. "offload": the idle side moves weights, optimizer state and KV cache to
    host memory; requires an accelerator."""
    spares: int = 0
    """Spare processes per host, started in advance and with an initialised device, that replace a lost rank or server.
    Each needs the memory of an idle process, and of a device context if there is an accelerator."""


class LoggingSection(_Section, frozen=True):
    """Metric trackers and recorded samples. `metrics.jsonl` and TensorBoard files are always written."""

    wandb: bool = False
    """Also log to Weights & Biases (needs the extra `wandb`)."""
    mlflow: bool = False
    """Also log to MLflow, at `MLFLOW_TRACKING_URI` (needs the extra `mlflow`)."""
    trackio: bool = False
    """Also log to Trackio, in its local folder (needs the extra `trackio`)."""
    samples_gib: float = 16.0
    """Disk space of the trained samples (`samples.jsonl` and the parts that it is kept in), in GiB. The oldest part is
    removed when it is exceeded."""


class MonitoringSection(_Section, frozen=True):
    """Export of metrics and alerts while a run is running (`docs/observation.md`). Recording does not depend on it."""

    port: int = 0
    """Port of the Prometheus endpoint /metrics. 0: no endpoint."""
    host: str = "127.0.0.1"
    """Address on which the Prometheus endpoint listens; 0.0.0.0 accepts connections from other hosts."""
    webhook: str | None = None
    """URL to which alerts and diagnoses are posted as JSON: `https://hooks.example.com/kintsugi`."""


class Config(_Section, frozen=True):
    """Configuration of a run. `kintsugi check RECIPE` prints it with the origin of every value."""

    name: str
    """Name of the run; part of the default run folder."""
    seed: int = 0
    """Seed of the row order and of sampling."""
    run_dir: str | None = None
    """Run folder; must not exist. Default: runs/<name>-<number>."""
    deterministic: bool = True
    """Bitwise reproducible results for any number of workers and servers. In an asynchronous run this holds for the
    computations only: timing decides which weights sample a completion."""
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
