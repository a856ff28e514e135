"""`kintsugi init`: write a commented recipe with every section and the most common settings.

Without a model it uses the small new model of the demo, without data generated arithmetic, which trains on any machine
in minutes. With a model or data, lengths and sizes are measured.
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

from kintsugi.config.recipe import load
from kintsugi.config.schema import (
    LEARN_ROWS,
    AlgorithmName,
    AlgorithmSection,
    Config,
    DataSection,
    ModelSection,
    NewModel,
)
from kintsugi.config.validation import validate
from kintsugi.data.columns import PROMPT_COLUMNS, RequiredColumns
from kintsugi.data.dataset import DataSet, open_data
from kintsugi.data.tokenized import RowTokenizer
from kintsugi.errors import DataError, StorageError, UserError
from kintsugi.model.plan import plan_model
from kintsugi.runtime.user_modules import scratch_folder
from kintsugi.types import Row

COMPLETION_COLUMNS = ("completion", "response", "output", "solution", "answer")
ROWS_MEASURED = 500
MOST_HELD_OUT = 500
NEW_TOKENS, NEW_TOKENS_OF_SMALL, SHORT = 256, 16, 5
"""Tokens to sample: by a given model, by a small new model, and for generated arithmetic."""
GENERATED = ("arithmetic", "arithmetic:words")
SMALL = NewModel(max_positions=32)
NEED_WARMUP = frozenset(typing.get_args(AlgorithmName)) - {"sft", "reward_model"}
EXACT_ANSWER = "kintsugi.rollout.rewards.exact_answer"


class RecipeTemplate(msgspec.Struct, frozen=True):
    """Files that `kintsugi init` writes."""

    recipe: str
    rewards: str | None
    """A reward function next to the recipe, if the data has no answer column."""


class _Found(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about model and data that the recipe depends on."""

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
    """Write the recipe, and a reward function if one is needed. Existing files are never overwritten."""
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
    """Name of the run from the file name, valid as a folder name: `my first.yaml` → `my-first`."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "recipe"


def starter_recipe(
    *, algorithm: str, model: Path | None, data: str | None, name: str, rewards_file: str
) -> RecipeTemplate:
    """Return the texts, validated; UserError names the problem of the model or the data, as `kintsugi check` does."""
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
    return RecipeTemplate(recipe, rewards)


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
    feeding = RowTokenizer(tokenizer, own, RequiredColumns())
    return _Found(
        algorithm=algorithm,
        model=base.model,
        data=own,
        columns=tuple(looked_at[0].columns),
        longest_prompt=max(len(feeding.tokenize(row).prompt) for row in looked_at),
        positions=architecture.max_positions,
    )


def _fitting(rows: Sequence[Row]) -> NewModel:
    """Small model with a character-level tokenizer that fits the rows and a short completion."""
    texts = [row.prompt + "".join(str(value) for value in row.columns.values()) for row in rows]
    positions = max(map(len, texts)) + NEW_TOKENS_OF_SMALL
    alphabet = sorted(set(string.printable[:95]).union(*texts))
    return msgspec.structs.replace(SMALL, max_positions=-(-positions // 16) * 16, alphabet="".join(alphabet))


def _open(base: Config, data: DataSection) -> tuple[DataSection, DataSet]:
    """Open the data with the first usual column names that fit; else raise the error of the first ones."""
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
    """Align the comments after values in one column."""
    value, mark, comment = line.partition("  # ")
    return f"{value.rstrip():30} # {comment}" if mark and value.strip() not in ("", "#") else line


def _model_text(model: ModelSection) -> str:
    if model.new is None:
        return OWN_MODEL.substitute(path=_scalar(model.path))
    return NEW_MODEL.substitute(
        positions=model.new.max_positions, alphabet=msgspec.json.encode(model.new.alphabet).decode()
    )


def _scalar(value: str | None) -> str:
    """Format a text as a YAML scalar, quoted if necessary."""
    return str(yaml.safe_dump(value, width=1000)).removesuffix("...\n").strip()


def _column_lines(found: _Found) -> str:
    data = found.data
    lines = [
        f"  prompt_column: {data.prompt_column}",
        f"  # columns for rewards: {' '.join(', '.join(found.columns).split())}",
    ]
    if data.completion_column is not None:
        lines.append(f"  completion_column: {data.completion_column}   # target of SFT")
    if data.source == "arithmetic":
        return "  # `12+39=` → `15`: the sum with its digits reversed, the last digit first\n"
    return "" if found.generates_data else "\n".join(lines) + "\n"


def _beta_line(algorithm: str) -> str:
    match algorithm:
        case "dpo":
            return "  beta: 0.1                    # smaller values allow more distance from the reference model\n"
        case "sft" | "reward_model":
            return ""
    return "  beta: 0.0                    # coefficient of the KL to the reference model; 0: none\n"


def _learning_rate(found: _Found) -> str:
    if found.has_own_model:
        return "1.0e-5" if found.algorithm in ("sft", "reward_model") else "1.0e-6"
    return "3.0e-3" if found.algorithm in ("sft", "reward_model") else "3.0e-4"


RECIPE = Template(
    """\
# Written by `kintsugi init`. `kintsugi check FILE` validates it and shows all values, `kintsugi train FILE` runs it,
# `kintsugi train FILE actor.learning_rate=1e-4` overrides a value. All fields: kintsugi/config/schema.py.

name: $name                    # default run folder: runs/<name>-<number>
seed: 0

$model
data:
  source: $source              # a .jsonl, .json or .parquet file, a folder, hf:NAME:CONFIG:SPLIT, reasoning_gym:TASK
$columns\
  num_eval: $num_eval          # rows held out for evaluation
  chat_template: $chat_template         # format each prompt with the model's chat template, as a user turn

algorithm:
  name: $algorithm             # sft, reward_model, dpo, ppo, grpo, dr_grpo, dapo, rloo, reinforce_pp, gspo
  steps: $steps
  batch_size: $batch_size      # prompts per step
$group_size\
$beta\
  reward: $reward
  # Functions f(completions, **columns) -> list[float], as dotted path or file.py:function. The first one also
  # decides whether an answer is right in evaluations. Weights are possible: "my.module.brevity * 0.1".
$warmup\

actor:                         # the trained model
  learning_rate: $learning_rate
  schedule: constant           # or linear, cosine
  warmup_steps: 0              # updates over which the learning rate rises to its value
  workers: 2                   # data-parallel ranks
  # logical_shards: 4          # default: one per worker; the result depends on this number, not on that of workers
  dtype: $dtype               # of forward and backward passes; master weights are float32
$critic\
# reference:                   # model of the KL; default: the weights at the start of training
#   path: folder
# reward_model:                # a trained reward model; its score is added to the rewards
#   path: folder

sampling:
  temperature: 1.0
  max_new_tokens: $new_tokens

generation:                    # generation servers
  servers: 2
  slots: $slots                # sequences that one server decodes concurrently
  max_length: $max_length      # prompt + completion, in tokens

rollout:                       # rollout workers: episodes and rewards
  workers: 2
  reward_timeout_s: 10.0

asynchrony:
  max_staleness: 0             # steps that rollout may run ahead of training; 0: synchronous

weights:
  transport: auto              # of new weights to the servers

eval:
  every: 25                    # steps; 0: only before and after training
  num_samples: 4               # k of mean@k and pass@k, in addition to the greedy answer

checkpoint:
  every: 25
  keep: 2

cluster:
  hosts: 1                     # local hosts, each with an agent

logging:
  wandb: false                 # metrics.jsonl and TensorBoard files are always written
  mlflow: false                # each of the three needs its extra: pip install 'kintsugi[mlflow]'
  trackio: false
  samples_gib: 16              # disk space of the trained samples; the oldest are removed

monitoring:
  port: 0                      # port of the Prometheus endpoint; 0: none
"""
)

NEW_MODEL = Template(
    """\
model:
  new:                         # small new model; `path: folder` trains a Hugging Face model instead
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
  path: $path                  # Hugging Face folder; `kintsugi import` converts a GGUF file
"""
)

WARMUP = """
warmup:                        # SFT before RL, so that some answers are rewarded
  steps: 155
  batch_size: 64
  learning_rate: 2.0e-3
"""

GROUP_SIZE = "  group_size: 8                # samples per prompt\n"

CRITIC = Template(
    """
critic:                        # value model of PPO; starts with the actor's weights
  learning_rate: $learning_rate
"""
)

REWARDS = Template(
    '''\
"""Reward functions of this recipe, imported by the rollout workers."""

from __future__ import annotations

from typing import Any


def my_reward(completions: list[str], **columns: Any) -> list[float]:
    """Return one number per completion; 1.0 or more counts as right in evaluations.

    Other arguments are `prompts` and every column of the data, each with one entry per completion:
    ${columns}for example `columns["$example"][0]`.
    """
    return [1.0 if completion.strip() else 0.0 for completion in completions]
'''
)
