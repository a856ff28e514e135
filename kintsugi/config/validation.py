"""Validation of a configuration, before any process is started."""

from __future__ import annotations

import errno
import importlib.util
import inspect
import math
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kintsugi.config.algorithm_rules import algorithm_problems
from kintsugi.config.data_rules import Lengths, data_problems
from kintsugi.config.framework_rules import framework_problems, inspect_interpreter, interpreter_problems
from kintsugi.config.recipe import DEFAULT, fields_of, named_origin, shown
from kintsugi.config.schema import LEARN_PAIRS, Config, LoggingSection
from kintsugi.config.stages import Stage, has_servers, stages
from kintsugi.control.placement import most_servers, num_spread_processes
from kintsugi.data.dataset import open_data
from kintsugi.errors import ConfigError, ModelError
from kintsugi.graph.algorithms import build_graph
from kintsugi.model.partition import check_stages
from kintsugi.model.plan import plan_architecture, plan_companions, plan_model
from kintsugi.rollout.environments.registry import try_environment
from kintsugi.rollout.rewards.builtin import program_output
from kintsugi.rollout.rewards.spec import load_rewards
from kintsugi.rollout.sandbox import sandbox
from kintsugi.telemetry.export.webhooks import webhook_problem
from kintsugi.types import MIN_TEMPERATURE


class _Candidate(msgspec.Struct, frozen=True):
    """A configuration that is being validated, with the origins of its values."""

    config: Config
    origins: Mapping[str, str]
    values: dict[str, Any]
    stages: tuple[Stage, ...]
    resumed: Path | None

    def error(self, field: str, expected: str) -> ConfigError:
        origin = self.origins.get(field, "")
        place = f" ({named_origin(origin)})" if origin else ""
        return ConfigError(f"`{field}`{place}: expected {expected}, got {shown(self._value(field))}")

    def _value(self, field: str) -> Any:
        """Value of a field, which may also be an entry of a list or a section."""
        value: Any = self.config
        for name in re.findall(r"[^.\[\]]+", field):
            value = value[int(name)] if name.isdigit() else getattr(value, name, None)
        return value


def validate(
    config: Config, *, origins: Mapping[str, str] | None = None, resumed: Path | None = None
) -> None:
    """Raise a `UserError` that names the field or file, what was found and what is expected, if there is a problem.

    `resumed` is the folder of a run that is to be resumed with this configuration.
    """
    candidate = _Candidate(config, origins or {}, fields_of(config), stages(config), resumed)
    for check in _CHECKS:
        check(candidate)


Rule = tuple[str, Callable[[float], bool]]
_POSITIVE: Rule = ("a positive number", lambda value: value > 0)
_NOT_NEGATIVE: Rule = ("zero or more", lambda value: value >= 0)
_FRACTION: Rule = ("at least 0 and less than 1", lambda value: 0 <= value < 1)
_SHARE: Rule = ("a number from 0 to 1", lambda value: 0 <= value <= 1)
_PORT: Rule = ("a port from 0 to 65535", lambda value: 0 <= value <= 65535)

_RULES: dict[str, Rule] = {
    "seed": ("a whole number from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63),
    "model.new.hidden_size": _POSITIVE,
    "model.new.intermediate_size": _POSITIVE,
    "model.new.num_layers": _POSITIVE,
    "model.new.num_heads": _POSITIVE,
    "model.new.num_kv_heads": _POSITIVE,
    "model.new.max_positions": _POSITIVE,
    "data.max_bad_share": _FRACTION,
    "sampling.max_new_tokens": _POSITIVE,
    "algorithm.steps": _POSITIVE,
    "algorithm.batch_size": _POSITIVE,
    "algorithm.group_size": _POSITIVE,
    "algorithm.clip_low": _FRACTION,
    "algorithm.clip_high": _NOT_NEGATIVE,
    "algorithm.importance_cap": ("more than 1, the weight of what is not stale", lambda value: value > 1),
    "algorithm.beta": _NOT_NEGATIVE,
    "algorithm.updates_per_step": _POSITIVE,
    "algorithm.entropy_weight": _NOT_NEGATIVE,
    "algorithm.gamma": _SHARE,
    "algorithm.gae_lambda": _SHARE,
    "algorithm.resampling_rounds": _NOT_NEGATIVE,
    "algorithm.overlong_buffer": _NOT_NEGATIVE,
    "algorithm.overlong_penalty": _NOT_NEGATIVE,
    "critic.learning_rate": _POSITIVE,
    "critic.value_clip": _NOT_NEGATIVE,
    "critic.warmup_steps": _NOT_NEGATIVE,
    "reference.copy_every": _NOT_NEGATIVE,
    "reference.moving_average": _FRACTION,
    "reward_model.weight": ("any number but 0 (`reward_model=null` for none)", lambda value: value != 0),
    "warmup.steps": ("a positive number (`warmup=null` for none)", lambda value: value > 0),
    "warmup.batch_size": _POSITIVE,
    "warmup.learning_rate": _POSITIVE,
    "warmup.warmup_steps": _NOT_NEGATIVE,
    "actor.workers": _POSITIVE,
    "actor.layout.shards": _POSITIVE,
    "actor.layout.stages": _POSITIVE,
    "actor.layout.tensors": _POSITIVE,
    "actor.layout.replicas": _POSITIVE,
    "actor.learning_rate": _POSITIVE,
    "actor.warmup_steps": _NOT_NEGATIVE,
    "actor.weight_decay": _NOT_NEGATIVE,
    "actor.beta1": _FRACTION,
    "actor.beta2": _FRACTION,
    "actor.epsilon": _POSITIVE,
    "actor.max_grad_norm": _POSITIVE,
    "actor.micro_batch_tokens": _POSITIVE,
    "actor.logical_shards": _POSITIVE,
    "actor.logical_slices": (
        "a power of two",
        lambda value: value >= 1 and math.log2(value).is_integer(),
    ),
    "generation.servers": _NOT_NEGATIVE,
    "generation.slots": (
        "at least 4: with fewer rows results would depend on the batch",
        lambda value: value >= 4,
    ),
    "generation.max_length": _POSITIVE,
    "generation.kv_cache_gib": _POSITIVE,
    "rollout.workers": _POSITIVE,
    "rollout.attempts": _POSITIVE,
    "rollout.max_turns": _POSITIVE,
    "rollout.turn_discount": ("more than 0 and at most 1", lambda value: 0 < value <= 1),
    "rollout.turn_timeout_s": _POSITIVE,
    "asynchrony.max_staleness": _NOT_NEGATIVE,
    "asynchrony.overtake": _NOT_NEGATIVE,
    "asynchrony.decay": ("more than 0 and at most 1", lambda value: 0 < value <= 1),
    "weights.deadline_s": _POSITIVE,
    "rollout.reward_timeout_s": _POSITIVE,
    "eval.every": _NOT_NEGATIVE,
    "eval.num_samples": _NOT_NEGATIVE,
    "checkpoint.every": _NOT_NEGATIVE,
    "checkpoint.keep": _POSITIVE,
    "cluster.hosts": _POSITIVE,
    "cluster.port": _PORT,
    "cluster.start_timeout_s": _POSITIVE,
    "logging.samples_gib": _POSITIVE,
    "monitoring.port": _PORT,
    "cluster.spares": _NOT_NEGATIVE,
    "cluster.spare_hosts": _NOT_NEGATIVE,
    "cluster.away_s": _POSITIVE,
    "cluster.slurm.nodes": _POSITIVE,
    "cluster.slurm.spare_nodes": _NOT_NEGATIVE,
    "cluster.slurm.stop_before_s": _POSITIVE,
    "cluster.slurm.time_limit_min": _NOT_NEGATIVE,
    "cluster.ray.nodes": _NOT_NEGATIVE,
    "cluster.ray.cpus": _NOT_NEGATIVE,
    "cluster.ray.gpus": _NOT_NEGATIVE,
    "cluster.kubernetes.pods": _POSITIVE,
    "cluster.kubernetes.spare_pods": _NOT_NEGATIVE,
    "cluster.kubernetes.gpus": _NOT_NEGATIVE,
    "cluster.kubernetes.cpus": _NOT_NEGATIVE,
    "cluster.kubernetes.memory_gib": _NOT_NEGATIVE,
    "cluster.bandwidth.samples": _POSITIVE,
    "cluster.bandwidth.copies": _POSITIVE,
}

_NEUTRAL_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def _check_numbers(run: _Candidate) -> None:
    for field, value in run.values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise run.error(field, "a finite number")
    for field, (expected, holds) in _RULES.items():
        if run.values.get(field) is not None and not holds(run.values[field]):
            raise run.error(field, expected)


def _check_name(run: _Candidate) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run.config.name):
        raise run.error("name", "letters, digits, '.', '_' and '-' (it becomes a folder's name)")


def _check_algorithm(run: _Candidate) -> None:
    for field, expected in algorithm_problems(run.config, run.stages[-1]):
        raise run.error(field, expected)
    build_graph(run.stages[-1])
    if not run.config.algorithm.reward and has_servers(run.config):
        raise run.error("algorithm.reward", "at least one function; evaluation needs it too")
    for stage in run.stages:
        field = "warmup.warmup_steps" if stage.name == "warmup" else "actor.warmup_steps"
        if stage.actor.warmup_steps > stage.num_updates:
            raise run.error(field, f"at most the stage's {stage.num_updates} optimizer updates")


def _check_framework(run: _Candidate) -> None:
    for field, expected in framework_problems(run.config, run.stages):
        raise run.error(field, expected)
    path = run.config.actor.interpreter
    if path is not None:
        found = inspect_interpreter(path, framework=run.config.actor.framework)
        for field, expected in interpreter_problems(run.config, found):
            raise run.error(field, expected)


def _check_sampling(run: _Candidate) -> None:
    if run.config.sampling.temperature < MIN_TEMPERATURE:
        raise run.error(
            "sampling.temperature",
            f"at least {MIN_TEMPERATURE} (greedy samples of a group would all be equal)",
        )
    for name, neutral in _NEUTRAL_SAMPLING.items():
        if getattr(run.config.sampling, name) != neutral:
            raise run.error(
                f"sampling.{name}",
                f"{neutral}: the trainer's log-probabilities would be of another distribution than was sampled",
            )


def _check_division(run: _Candidate) -> None:
    """Check that each model worker gets the same number of whole logical shards."""
    actor = run.config.actor
    for stage in run.stages:
        batch = "warmup.batch_size" if stage.name == "warmup" else "algorithm.batch_size"
        samples = stage.algorithm.batch_size * stage.algorithm.group_size
        counted = f"`{batch}` × group size = {samples} samples"
        if stage.algorithm.name in LEARN_PAIRS:  # Pairs are not split.
            samples, counted = stage.algorithm.batch_size, f"`{batch}`={stage.algorithm.batch_size} pairs"
        if actor.data_parallel > samples:
            raise run.error("actor.workers", f"at most as many workers as {counted}")
        if actor.num_shards > samples:
            raise run.error("actor.logical_shards", f"at most {counted}")
        if run.config.rollout.workers > stage.algorithm.batch_size:
            raise run.error(
                "rollout.workers",
                f"at most `{batch}`={stage.algorithm.batch_size} (a prompt's samples stay together)",
            )
    _check_layout(run)
    if actor.num_shards % actor.data_parallel:
        computed = f"`actor.workers`={actor.workers}"
        if actor.layout.model_ranks > 1:
            computed = f"{actor.data_parallel}, the workers that compute different samples"
        even = [str(count) for count in range(1, actor.num_shards + 1) if actor.num_shards % count == 0]
        shared = f"{actor.num_shards} parts are shared evenly by {', '.join(even[:-1])} or {even[-1]}"
        expected = f"a multiple of {computed}, or null for one part per worker ({shared})"
        raise run.error("actor.logical_shards", expected)
    servers, most = run.config.generation.servers, most_servers(run.config)
    if has_servers(run.config) and servers < 1:
        raise run.error("generation.servers", "at least 1: completions are sampled, if only to evaluate")
    if most is not None and servers > most:
        raise run.error("generation.servers", f"at most as many servers as the {most} samples of a step")
    _check_backend(run)


def _check_layout(run: _Candidate) -> None:
    """Check that every part of the optimizer's state has the same number of workers, and what shards are not for."""
    actor = run.config.actor
    layout = actor.layout
    sizes = {name: getattr(layout, name) for name in ("shards", "stages", "tensors")}
    cut = {f"actor.layout.{name}": size for name, size in sizes.items() if size > 1}
    if actor.workers % layout.boxes:
        *others, field = cut
        product = "".join(f"`{name}`={cut[name]} × " for name in others)
        what = "a divisor of" if not others else f"{product}`{field}` to be a divisor of"
        raise run.error(field, f"{what} `actor.workers`={actor.workers}")
    if layout.replicas is not None and layout.replicas * layout.boxes != actor.workers:
        of = " × ".join(f"`{name}`={size}" for name, size in cut.items()) or "`actor.layout.shards`=1"
        of = f"({of})" if len(cut) > 1 else of
        raise run.error(
            "actor.layout.replicas",
            f"{actor.workers // layout.boxes} (`actor.workers`={actor.workers} / {of}), or null",
        )
    if actor.logical_slices % layout.tensors:
        raise run.error(
            "actor.layout.tensors",
            f"a divisor of `actor.logical_slices`={actor.logical_slices}, which the workers of a layer share",
        )
    if cut:
        _check_cut(run, next(iter(cut)))
    if layout.gathers_layers:
        _check_layer_gathering(run)


def _why_critic_is_inexact(run: _Candidate) -> str | None:
    """Why a critic could not begin with exactly the actor's weights, of which a rank has some in the compute type
    only."""
    begins_as_actor = any(stage.has_critic and stage.critic.path is None for stage in run.stages)
    dtype = run.config.actor.dtype
    if not begins_as_actor or dtype == "float32":
        return None
    return f"a critic that begins as the actor needs `actor.dtype=float32`, got {dtype}"


def _check_cut(run: _Candidate, field: str) -> None:
    """Check what a state is not cut for. `field` is the first by which it is cut."""
    actor, layout = run.config.actor, run.config.actor.layout
    if any(stage.moves_reference for stage in run.stages):
        raise run.error(field, "1, because a reference that moves is not cut")
    if run.config.cluster.share_device == "offload":
        raise run.error(field, "1, because `cluster.share_device=offload` moves whole states")
    if layout.shards > 1 and (why := _why_critic_is_inexact(run)) is not None:
        raise run.error("actor.layout.shards", f"1, or a `critic.path`: {why}")
    if layout.model_ranks == 1:
        return
    axis = "stages" if layout.stages > 1 else "tensors"
    field, size = f"actor.layout.{axis}", getattr(layout, axis)
    if actor.framework != "torch":
        raise run.error(field, "1, because the MindSpore adapter computes whole models")
    if run.config.weights.transport not in ("auto", "stream"):
        raise run.error(
            "weights.transport",
            f"auto or stream, because each of `{field}`={size} has a part of the weights",
        )


def _check_layer_gathering(run: _Candidate) -> None:
    """Check what needs whole weights on a rank."""
    actor, field = run.config.actor, "actor.layout.gather"
    if actor.layout.shards == 1:
        raise run.error(field, "step, as with `actor.layout.shards`=1 every worker has all weights")
    if actor.framework != "torch":
        raise run.error(field, "step, because the MindSpore adapter computes with whole weights")
    for name in ("layout.stages", "layout.tensors", "logical_slices"):
        size = getattr(actor.layout, name.partition(".")[2]) if "." in name else actor.logical_slices
        if size > 1:
            raise run.error(field, f"step, because it is not combined with `actor.{name}`={size} yet")
    for stage in run.stages[1:]:
        if stage.begins_as_actor:
            companion = "critic" if stage.has_critic and stage.critic.path is None else "reference"
            raise run.error(
                field,
                f"step, or a `{companion}.path`, or no warm-up: the {companion} of {stage.name} begins as the "
                "trained actor, of which no worker has whole weights",
            )


def _check_backend(run: _Candidate) -> None:
    """Check an external backend: each generation server uses one running server of it."""
    generation = run.config.generation
    embedded = generation.backend == "embedded"
    if not embedded and run.config.deterministic:
        raise run.error(
            "deterministic", f"false: `generation.backend`={generation.backend} promises no equal bits"
        )
    num_urls = 0 if embedded else generation.servers
    if len(generation.urls) != num_urls:
        why = f"`generation.backend`={generation.backend} with `generation.servers`={generation.servers}"
        raise run.error("generation.urls", f"{num_urls} addresses, as of {why}")
    for index, url in enumerate(generation.urls):
        if not url.startswith(("http://", "https://")):
            raise run.error(f"generation.urls[{index}]", "an address like http://127.0.0.1:8000")


ACCELERATORS = ("nvidia[0-9]*", "dxg")
"""Device files of accelerators in /dev."""


def _check_sharing(run: _Candidate) -> None:
    policy = run.config.cluster.share_device
    if policy != "no" and run.config.generation.backend != "embedded":
        raise run.error("cluster.share_device", "`no`, as servers of another backend keep their device")
    if policy == "offload" and not any(any(Path("/dev").glob(name)) for name in ACCELERATORS):
        here = "where nothing can be taken off the device: that is the host itself"
        raise run.error("cluster.share_device", f"`keep` or `no` on a host without an accelerator, {here}")


def _check_cluster(run: _Candidate) -> None:
    cluster, num_processes = run.config.cluster, num_spread_processes(run.config)
    if cluster.on:
        if run.config.data.source.startswith("stream:"):
            raise run.error(
                "data.source", "data that can be copied to other hosts, not a stream, with `cluster.on`"
            )
    elif cluster.hosts > num_processes:
        raise run.error("cluster.hosts", f"at most {num_processes}, so that every host has a process to run")
    if (why := _why_not_free("127.0.0.1", cluster.port)) is not None:
        raise run.error("cluster.port", f"a free port (0 takes any), but this one is {why}")


def _why_not_free(host: str, port: int) -> str | None:
    """Reason why a process can not listen on a port; None if it is free or 0."""
    if not port:
        return None
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return "in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error))
    return None


def _check_monitoring(run: _Candidate) -> None:
    section = run.config.monitoring
    if section.port and section.port == run.config.cluster.port:
        raise run.error("monitoring.port", "another port than `cluster.port`")
    if (why := _why_not_free(section.host, section.port)) is not None:
        raise run.error("monitoring.port", f"a free port of {section.host} (0 offers none), but it is: {why}")
    if section.webhook is not None and (problem := webhook_problem(section.webhook)) is not None:
        raise run.error("monitoring.webhook", f"an http or https URL, but {problem}")


def _check_asynchrony(run: _Candidate) -> None:
    """Refuse settings that would have no effect."""
    section = run.config.asynchrony
    if section.max_staleness and not run.stages[-1].samples_completions:
        name = run.config.algorithm.name
        raise run.error(
            "asynchrony.max_staleness", f"0 with {name}, which learns from rows and samples nothing"
        )
    if section.max_staleness == 0:
        why = "while `asynchrony.max_staleness` is 0: nothing is sampled during a step"
        if section.overtake:
            raise run.error("asynchrony.overtake", f"0 {why}")
        if section.running != "keep":
            raise run.error("asynchrony.running", f"keep {why}")


def _check_run_folder(run: _Candidate) -> None:
    if run.config.run_dir is None:
        return
    folder = Path(run.config.run_dir)
    if folder.exists() or folder.is_symlink():
        raise run.error(
            "run_dir",
            "a folder that does not exist yet (`kintsugi resume` continues a run, `run_dir=…` names another)",
        )
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    if not existing.is_dir():
        raise run.error("run_dir", f"a path inside folders, but {existing} is a file")


def _check_logging(run: _Candidate) -> None:
    for name in LoggingSection.__struct_fields__:
        if getattr(run.config.logging, name) is True and importlib.util.find_spec(name) is None:
            raise run.error(
                f"logging.{name}", f"false, or the extra installed: `pip install 'kintsugi[{name}]'`"
            )


def _check_model(run: _Candidate) -> None:
    model = run.config.model
    if model.path is not None and model.new is not None:
        raise ConfigError(
            f"`model.path` and `model.new`: expected one of them, got both ({model.path!r} and a section); "
            "`model.new=null` takes the section away"
        )
    if model.path is None and model.new is None:
        raise ConfigError("`model.path` and `model.new`: expected one of them, got neither")
    if model.new is not None and model.new.hidden_size % model.new.num_heads:
        raise run.error("model.new.hidden_size", f"a multiple of `model.new.num_heads`={model.new.num_heads}")
    try:
        plan_model(run.config)
    except ModelError as error:
        field = "model.path" if model.path is not None else "model.new"
        raise ModelError(f"`{field}`: {error}") from error
    companions, stages = plan_companions(run.config), run.config.actor.layout.stages
    actor = plan_architecture(run.config)
    for each in (actor, companions.reference, companions.critic, companions.reward_model):
        if each is not None:
            check_stages(each, stages)
    if stages > 1 and actor.tie_embeddings and (why := _why_critic_is_inexact(run)) is not None:
        raise run.error("actor.layout.stages", f"1 with tied embeddings, or a `critic.path`: {why}")


def _check_data(run: _Candidate) -> None:
    for field, expected in data_problems(run.config):
        raise run.error(field, expected)
    data_set = open_data(run.config, resumed=run.resumed)
    first = data_set.held_out_row(0)
    if run.config.data.system is not None and not (run.config.data.chat_template or first.messages):
        raise run.error("data.system", "nothing: plain text has no system prompt (`data.chat_template=true`)")
    if run.config.rollout.environment is not None:
        _check_environment(run)
    elif run.config.rollout.options:
        raise run.error("rollout.options", "nothing without a `rollout.environment`")
    elif has_servers(run.config):
        _check_rewards(run, columns=sorted(first.columns))
    for field, expected in Lengths(run.config, *plan_model(run.config)).problems(data_set):
        raise run.error(field, expected)


def _check_rewards(run: _Candidate, *, columns: Sequence[str]) -> None:
    """Check the reward functions, also without RL: the first one decides whether an answer is right in evaluations."""
    given = ["completions", "prompts", *(name for name in columns if name != "completion")]
    rewards = load_rewards(run.config.algorithm.reward)
    if any(reward.function is program_output for reward in rewards):
        _check_programs(run, columns=columns)
    for path, reward in zip(run.config.algorithm.reward, rewards, strict=True):
        try:
            signature = inspect.signature(reward.function)
        except ValueError:
            continue
        try:
            signature.bind(**dict.fromkeys(given))
        except TypeError as error:
            raise run.error(
                "algorithm.reward",
                f"functions `f(completions, **columns)` that can be called with {', '.join(given)}; {path}: {error}",
            ) from error


def _check_environment(run: _Candidate) -> None:
    """Check the environment, which gives the rewards: reward functions would never be called."""
    if run.origins.get("algorithm.reward", DEFAULT) != DEFAULT:
        raise run.error(
            "algorithm.reward", "nothing together with `rollout.environment`, which gives the rewards"
        )
    if run.config.algorithm.overlong_buffer:
        raise run.error(
            "algorithm.overlong_buffer", "0: `sampling.max_new_tokens` is no limit of a whole episode"
        )
    try_environment(run.config.rollout)


def _check_programs(run: _Candidate, *, columns: Sequence[str]) -> None:
    """Check the reward of programs: a group needs time for each of its programs."""
    if not {"tests", "expected_output"} & set(columns):
        raise run.error(
            "algorithm.reward",
            f"rows with a column `tests` or `expected_output` for program_output, which have {', '.join(columns)}",
        )
    group_size, idle_s = run.stages[-1].algorithm.group_size, sandbox.LIMITS.idle_s
    if run.config.rollout.reward_timeout_s < group_size * idle_s:
        raise run.error(
            "rollout.reward_timeout_s",
            f"at least {group_size * idle_s:g}: each of a group's {group_size} programs may take {idle_s:g} s",
        )
    if not run.config.rollout.allow_unsandboxed:
        sandbox.require()


_CHECKS: tuple[Callable[[_Candidate], None], ...] = (
    _check_numbers,
    _check_name,
    _check_run_folder,
    _check_algorithm,
    _check_framework,
    _check_sampling,
    _check_division,
    _check_asynchrony,
    _check_cluster,
    _check_sharing,
    _check_logging,
    _check_monitoring,
    _check_model,
    _check_data,
)
"""Checks in order: cheap ones first, and the model before the data, as the data is tokenized for its lengths."""
