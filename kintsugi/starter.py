"""`kintsugi init`: a first recipe with every section in it, valid as it stands, and what is usually changed first.

Without a model it builds the small one of the demo, without data it takes generated sums: then everything runs on any
machine in minutes. With a model or data of one's own, sizes are measured instead of guessed.
"""

from __future__ import annotations

import re
import string
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template

import msgspec
import yaml

from kintsugi.config import (
    LEARN_ROWS,
    AlgorithmName,
    AlgorithmSection,
    Config,
    DataSection,
    ModelSection,
    NewModel,
)
from kintsugi.data.columns import Needs
from kintsugi.data.source import DataSet, open_data
from kintsugi.data.tokens import Feeding
from kintsugi.errors import DataError, StorageError, UserError
from kintsugi.model.plan import plan_model
from kintsugi.recipe import load
from kintsugi.rollout.importing import scratch_folder
from kintsugi.types import Row
from kintsugi.validation import validate

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "messages", "input")
COMPLETION_COLUMNS = ("completion", "response", "output", "solution", "answer")
ROWS_MEASURED = 500
MOST_HELD_OUT = 500
NEW_TOKENS, NEW_TOKENS_OF_SMALL, SHORT = 256, 16, 5
"""To be sampled: by a model of one's own, by a small one, and for a sum."""
GENERATED = ("arithmetic", "arithmetic:words")
SMALL = NewModel(max_positions=32)
NEED_WARMUP = frozenset(typing.get_args(AlgorithmName)) - {"sft", "reward_model"}
EXACT_ANSWER = "kintsugi.rollout.rewards.exact_answer"


class Starter(msgspec.Struct, frozen=True):
    """What `kintsugi init` writes."""

    recipe: str
    rewards: str | None
    """A first reward function beside the recipe, where the data do not say what is right."""


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """What there is to know before the recipe can be written."""

    algorithm: str
    model: ModelSection
    data: DataSection
    columns: tuple[str, ...]
    longest_prompt: int
    positions: int

    @property
    def has_own_model(self) -> bool:
        return self.model.path is not None

    @property
    def generates_data(self) -> bool:
        return self.data.source in GENERATED

    @property
    def new_tokens(self) -> int:
        wanted = NEW_TOKENS if self.has_own_model else SHORT if self.generates_data else NEW_TOKENS_OF_SMALL
        return max(1, min(wanted, self.positions - self.longest_prompt))

    @property
    def max_length(self) -> int:
        whole = self.longest_prompt + self.new_tokens
        return min(self.positions, -(-whole // 16) * 16)


def write_starter(
    path: Path, *, algorithm: str = "grpo", model: Path | None = None, data: str | None = None
) -> list[Path]:
    """Write the recipe, and a reward function where one is needed; refuses to touch what is there."""
    algorithms = typing.get_args(AlgorithmName)
    if algorithm not in algorithms:
        raise UserError(f"--algorithm: expected one of {', '.join(algorithms)}, got {algorithm!r}")
    rewards = path.with_name(f"{path.stem}_rewards.py")
    for target in (path, rewards):
        if target.exists():
            raise UserError(f"{target}: expected a file that does not exist yet; nothing is overwritten")
    starter = starter_recipe(
        algorithm=algorithm, model=model, data=data, name=_name(path), rewards_file=str(rewards)
    )
    written = {path: starter.recipe} | ({} if starter.rewards is None else {rewards: starter.rewards})
    for target, text in written.items():
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"could not write {target}: {error.strerror or error}") from error
    return list(written)


def _name(path: Path) -> str:
    """The run's name after the file's, as far as it can be the name of a folder: `my first.yaml` → `my-first`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "recipe"


def starter_recipe(
    *, algorithm: str, model: Path | None, data: str | None, name: str, rewards_file: str
) -> Starter:
    """The texts; UserError names what is wrong with the model or the data, as `kintsugi check` would."""
    found = _find(algorithm=algorithm, model=model, data=data)
    needs_rewards = "answer" not in found.columns and algorithm != "reward_model"
    rewards = _rewards_text(found) if needs_rewards else None
    reward = f"{rewards_file}:my_reward" if needs_rewards else EXACT_ANSWER
    recipe = _recipe_text(found, name=name, reward=reward)
    with scratch_folder() as scratch:
        trial = scratch / "recipe.yaml"
        trial.write_text(recipe, encoding="utf-8")
        resolved = load(trial)
        config = resolved.config
        if rewards is not None:
            stand_in = scratch / Path(rewards_file).name
            stand_in.write_text(rewards, encoding="utf-8")
            algorithm_section = msgspec.structs.replace(config.algorithm, reward=(f"{stand_in}:my_reward",))
            config = msgspec.structs.replace(config, algorithm=algorithm_section)
        validate(config)
    return Starter(recipe, rewards)


def _find(*, algorithm: str, model: Path | None, data: str | None) -> _Found:
    section = ModelSection(new=SMALL) if model is None else ModelSection(path=str(model))
    base = Config(
        name="starter",
        model=section,
        algorithm=AlgorithmSection(name=typing.cast(AlgorithmName, algorithm)),
    )
    has_template = plan_model(base)[1].chat_template is not None
    source = data or (GENERATED[1] if has_template else GENERATED[0])
    own, rows = _open(base, DataSection(source=source, num_eval=1, chat_template=has_template))
    own = msgspec.structs.replace(own, num_eval=max(1, min(MOST_HELD_OUT, (rows.num_positions + 1) // 10)))
    looked_at = [
        rows.training_row(stage="", seed=0, epoch=0, position=position)
        for position in range(min(ROWS_MEASURED, rows.num_positions))
    ]
    if model is None and data is not None:
        base = msgspec.structs.replace(base, model=ModelSection(new=_fitting(looked_at)))
    architecture, tokenizer = plan_model(base)
    feeding = Feeding(tokenizer, own, Needs())
    return _Found(
        algorithm=algorithm,
        model=base.model,
        data=own,
        columns=tuple(looked_at[0].columns),
        longest_prompt=max(len(feeding.feed(row).prompt) for row in looked_at),
        positions=architecture.max_positions,
    )


def _fitting(rows: Sequence[Row]) -> NewModel:
    """A small model that can read the rows, character by character, and write a little more."""
    texts = [row.prompt + "".join(str(value) for value in row.columns.values()) for row in rows]
    positions = max(map(len, texts)) + NEW_TOKENS_OF_SMALL
    alphabet = sorted(set(string.printable[:95]).union(*texts))
    return msgspec.structs.replace(SMALL, max_positions=-(-positions // 16) * 16, alphabet="".join(alphabet))


def _open(base: Config, data: DataSection) -> tuple[DataSection, DataSet]:
    """The data under the first usual column names that fit; if none does, what is wrong with the first."""
    refused: DataError | None = None
    for section in _candidates(base, data):
        try:
            return section, open_data(msgspec.structs.replace(base, data=section))
        except DataError as error:
            refused = refused or error
    assert refused is not None
    raise refused


def _candidates(base: Config, data: DataSection) -> Iterator[DataSection]:
    learns_rows = base.algorithm.name == "sft"
    for prompt in PROMPT_COLUMNS:
        section = msgspec.structs.replace(data, prompt_column=prompt)
        if learns_rows and data.source not in GENERATED:
            for completion in COMPLETION_COLUMNS:
                yield msgspec.structs.replace(section, completion_column=completion)
        yield section


def _rewards_text(found: _Found) -> str:
    columns = "".join(f"{name}, " for name in found.columns if name.isidentifier() and name != "completion")
    example = next((name for name in found.columns if name.isidentifier()), "column")
    return REWARDS.substitute(columns=columns, example=example)


def _recipe_text(found: _Found, *, name: str, reward: str) -> str:
    own, samples = found.has_own_model, found.algorithm not in LEARN_ROWS
    text = RECIPE.substitute(
        name=_scalar(name),
        model=_model_text(found.model),
        source=_scalar(found.data.source),
        columns=_column_lines(found),
        num_eval=found.data.num_eval,
        chat_template=str(found.data.chat_template).lower(),
        new_tokens=found.new_tokens,
        algorithm=found.algorithm,
        steps=100 if own else 250,
        batch_size=32 if own else 64,
        group_size="" if not samples else GROUP_SIZE,
        beta=_beta_line(found.algorithm),
        reward=yaml.safe_dump([reward], default_flow_style=True, width=1000).strip(),
        warmup=WARMUP if not own and found.generates_data and found.algorithm in NEED_WARMUP else "",
        learning_rate=_learning_rate(found),
        critic=CRITIC.substitute(learning_rate="1.0e-5" if own else "1.0e-3")
        if found.algorithm == "ppo"
        else "",
        max_length=found.max_length,
        slots=64,
        dtype="bfloat16" if own else "float32",
    )
    return "\n".join(map(_aligned, text.splitlines())) + "\n"


def _aligned(line: str) -> str:
    """Comments behind values stand in one column, whatever was put in for the values."""
    value, mark, comment = line.partition("  # ")
    return f"{value.rstrip():30} # {comment}" if mark and value.strip() not in ("", "#") else line


def _model_text(model: ModelSection) -> str:
    if model.new is None:
        return OWN_MODEL.substitute(path=_scalar(model.path))
    return NEW_MODEL.substitute(
        positions=model.new.max_positions, alphabet=msgspec.json.encode(model.new.alphabet).decode()
    )


def _scalar(value: str | None) -> str:
    """A text as YAML writes it, quoted where it must be."""
    return str(yaml.safe_dump(value, width=1000)).removesuffix("...\n").strip()


def _column_lines(found: _Found) -> str:
    data = found.data
    lines = [
        f"  prompt_column: {data.prompt_column}",
        f"  # columns for rewards: {' '.join(', '.join(found.columns).split())}",
    ]
    if data.completion_column is not None:
        lines.append(f"  completion_column: {data.completion_column}   # what SFT learns to write")
    return "" if found.generates_data else "\n".join(lines) + "\n"


def _beta_line(algorithm: str) -> str:
    match algorithm:
        case "dpo":
            return "  beta: 0.1                    # inverse temperature: smaller moves further from the reference\n"
        case "sft" | "reward_model":
            return ""
    return "  beta: 0.0                    # weight of the KL to the reference model; 0 loads none\n"


def _learning_rate(found: _Found) -> str:
    if found.has_own_model:
        return "1.0e-5" if found.algorithm in ("sft", "reward_model") else "1.0e-6"
    return "3.0e-3" if found.algorithm in ("sft", "reward_model") else "3.0e-4"


RECIPE = Template(
    """\
# Written by `kintsugi init`. `kintsugi check FILE` shows what it comes to, `kintsugi train FILE` runs it, and
# `kintsugi train FILE actor.learning_rate=1e-4` changes one value for one run. All fields: kintsugi/config.py.

name: $name                    # of the run's folder: runs/<name>-<number>
seed: 0

$model
data:
  source: $source              # a .jsonl, .json or .parquet file, a folder, hf:NAME:CONFIG:SPLIT, reasoning_gym:TASK
$columns\
  num_eval: $num_eval          # held out from training, for evaluation
  chat_template: $chat_template         # put each prompt into the model's chat template, as a user's turn

algorithm:
  name: $algorithm             # sft, reward_model, dpo, ppo, grpo, dr_grpo, dapo, rloo, reinforce_pp, gspo
  steps: $steps
  batch_size: $batch_size      # prompts per step
$group_size\
$beta\
  reward: $reward
  # Functions f(completions, **columns) -> list[float], by dotted path or as file.py:function; the first one also
  # decides what counts as right in an evaluation. Several are added up, with weights: "my.module.brevity * 0.1".
$warmup\

actor:                         # the model that learns
  learning_rate: $learning_rate
  schedule: constant           # or linear, cosine
  warmup_steps: 0              # in which the learning rate rises to its value
  workers: 2                   # data parallel; the result does not depend on it
  logical_shards: 4            # a multiple of the workers; part of the result
  dtype: $dtype               # of the passes; master weights are float32
$critic\
# reference:                   # what the KL is measured against; by default the weights that training begins with
#   path: folder
# reward_model:                # a trained one, whose score is added to the rewards
#   path: folder

sampling:
  temperature: 1.0
  max_new_tokens: $new_tokens

generation:                    # the servers that sample
  servers: 2
  slots: $slots                # sequences that one decodes at once
  max_length: $max_length      # prompt and completion together, in tokens

rollout:                       # the workers that run episodes and rewards
  workers: 2
  reward_timeout_s: 10.0

asynchrony:
  max_staleness: 0             # steps that rollout may run ahead of training; 0 takes turns

weights:
  transport: auto              # how new weights reach the servers

eval:
  every: 25                    # steps; 0 evaluates only before and after
  num_samples: 4               # k of mean@k and pass@k, beside the greedy answer

checkpoint:
  every: 25
  keep: 2

cluster:
  hosts: 1                     # local node agents

logging:
  wandb: false                 # figures go to metrics.jsonl and TensorBoard in any case

monitoring:
  port: 0                      # where Prometheus finds the figures of a run that goes on; 0: nowhere
"""
)

NEW_MODEL = Template(
    """\
model:
  new:                         # a small one, built from scratch; `path: folder` trains a Hugging Face model instead
    hidden_size: 96
    intermediate_size: 256
    num_layers: 2
    num_heads: 4
    num_kv_heads: 4
    max_positions: $positions
    alphabet: $alphabet
"""
)

OWN_MODEL = Template(
    """\
model:
  path: $path                  # a Hugging Face folder; `kintsugi import` makes one of a GGUF file
"""
)

WARMUP = """
warmup:                        # SFT first, in the same run, so that there is something to reward
  steps: 155
  batch_size: 64
  learning_rate: 2.0e-3
"""

GROUP_SIZE = "  group_size: 8                # answers per prompt\n"

CRITIC = Template(
    """
critic:                        # PPO's value model; begins with the actor's weights
  learning_rate: $learning_rate
"""
)

REWARDS = Template(
    '''\
"""Rewards of this recipe: change them freely, they are imported by the rollout workers."""

from __future__ import annotations

from typing import Any


def my_reward(completions: list[str], **columns: Any) -> list[float]:
    """One number per completion; 1.0 or more counts as right in an evaluation.

    Besides `completions` there are `prompts` and every column of the data, each with one entry per completion:
    ${columns}for example `columns["$example"][0]`.
    """
    return [1.0 if completion.strip() else 0.0 for completion in completions]
'''
)
