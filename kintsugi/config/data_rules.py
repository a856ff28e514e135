"""Rules for the data of a configuration: its fields, then the lengths of its rows in tokens.

`config/validation.py` raises the problems as errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from kintsugi.config.schema import Config, MixedSource, SourceSection
from kintsugi.config.stages import has_servers, stages
from kintsugi.data.columns import held_out_needs_of, needs_of
from kintsugi.data.dataset import GENERATED, PRODUCTS, DataSet, SourcePart, named_sources
from kintsugi.data.order import SMALLEST_SHARE
from kintsugi.data.prefetch import measured_tokens
from kintsugi.data.reasoning_gym import TASK
from kintsugi.data.saved_rollouts import SavedRollouts
from kintsugi.data.streams import RowStream, is_stream
from kintsugi.data.tokenized import RowTokenizer, TokenizedRow
from kintsugi.errors import DataError, ModelError
from kintsugi.model.architecture import ModelConfig
from kintsugi.model.tokenizer import Tokenizer
from kintsugi.rollout.rewards.spec import rewards_of

Problem = tuple[str, str]
"""A field and the expected value."""


def data_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of the fields, before any data is read."""
    data = config.data
    alone = SourceSection()
    for name in SourceSection.__struct_fields__:
        if data.sources and getattr(data, name) != getattr(alone, name):
            yield f"data.{name}", "nothing together with `data.sources`: each entry has its own"
    for prefix, section in named_sources(data):
        if section.num_eval < 1:
            yield f"{prefix}num_eval", "a positive number: the run is judged on held-out rows"
        if section.source in GENERATED and not 1 <= section.max_digits <= 3:
            yield f"{prefix}max_digits", "1 to 3 (all problems are listed beforehand)"
        if not 0 < section.weight < math.inf:
            yield f"{prefix}weight", "a positive number"
        if section.options and not section.source.startswith(TASK):
            yield f"{prefix}options", "nothing: they are options of a reasoning-gym task"
        if needs_of(config).pair and (section.source.startswith(TASK) or section.source == PRODUCTS):
            yield f"{prefix}source", "data with pairs: here are no rejected answers"
    yield from _problems_together(named_sources(data))


def _problems_together(sources: Sequence[tuple[str, MixedSource]]) -> Iterator[Problem]:
    """Yield the problems of combined sources."""
    total = sum(section.weight for _, section in sources)
    streams: set[str] = set()
    for prefix, section in sources:
        if section.weight < SMALLEST_SHARE * total:
            yield f"{prefix}weight", f"at least a thousandth of all weights together, which are {total:g}"
        if is_stream(section.source) and section.source in streams:
            yield f"{prefix}source", "a stream that no other source reads: each row comes out of it once"
        streams.add(section.source)


class Lengths:
    """Compares the lengths of rows with the limits of the model and the servers."""

    def __init__(self, config: Config, model: ModelConfig, tokenizer: Tokenizer) -> None:
        self._config, self._model, self._tokenizer = config, model, tokenizer
        self._feeding = RowTokenizer(tokenizer, config.data, needs_of(config))
        self._held_out = RowTokenizer(tokenizer, config.data, held_out_needs_of(config))
        self._samples = any(stage.samples_completions for stage in stages(config))

    def problems(self, data_set: DataSet) -> Iterator[Problem]:
        """Yield the problems of rows. All held-out rows must fit; of training rows, all but `data.max_bad_share`."""
        if self._config.generation.max_length > self._model.max_positions:
            yield "generation.max_length", f"at most the model's {self._model.max_positions} positions"
        fields = [f"{prefix}source" for prefix, _ in named_sources(self._config.data)]
        if self._config.data.chat_template and self._tokenizer.chat_template is None:
            yield "data.chat_template", "false: the model's tokenizer has no chat template"
        for field, part in zip(fields, data_set.parts, strict=True):
            yield from self._written(field, part, self._of_held_out)
        for field, part in zip(fields, data_set.parts, strict=True):
            if isinstance(part.train, SavedRollouts):
                yield from self._of_saved(part.train, field=field)
            elif not isinstance(part.train, RowStream):
                yield from self._written(field, part, self._of_training)

    def _written(
        self, field: str, part: SourcePart, problems: Callable[[SourcePart], Iterator[Problem]]
    ) -> Iterator[Problem]:
        """Yield the problems of rows; a row that can not be tokenized is one of them."""
        try:
            yield from problems(part)
        except (DataError, ModelError) as error:
            yield field, f"rows of '{part.name}' that can be put into the model's tokens: {error}"

    def _of_held_out(self, part: SourcePart) -> Iterator[Problem]:
        sampled, count = has_servers(self._config), len(part.held_out)
        tokens = measured_tokens(part.held_out, part.held_out_digest, self._held_out, most=count)
        for index in range(count):
            for field, expected in self._misfit(tokens[index], sampled=sampled):
                start = _cut(part.held_out.row(index).prompt)
                yield field, f"{expected}; it is held out of '{part.name}' and starts {start}"

    def _of_saved(self, saved: SavedRollouts, *, field: str) -> Iterator[Problem]:
        """Saved rollouts are trained as they are, so they must fit the model and the algorithm."""
        algorithm = stages(self._config)[-1].algorithm
        learns_rows = [stage.name for stage in stages(self._config) if not stage.samples_completions]
        if learns_rows:
            yield (
                field,
                f"data to learn from: saved rollouts have no answers for {learns_rows[0]} to imitate",
            )
        if algorithm.group_size > saved.largest_group:
            yield (
                "algorithm.group_size",
                f"at most the {saved.largest_group} samples per prompt that were saved",
            )
        if not saved.was_written_with(self._tokenizer):
            yield field, "rollouts in the tokens of this model; they were sampled with another tokenizer"
        if saved.longest > self._model.max_positions:
            positions = self._model.max_positions
            yield (
                field,
                f"rollouts within the model's {positions} positions, got {saved.longest} tokens in one",
            )
        missing = {reward.name for reward in rewards_of(self._config)} - saved.components
        if missing:
            have = ", ".join(sorted(saved.components)) or "none"
            yield "algorithm.reward", f"functions with saved rewards ({have}), not {min(missing)}"

    def _of_training(self, part: SourcePart) -> Iterator[Problem]:
        """Check the first rows. Longer rows beyond them are quarantined by name during the run."""
        tokens = measured_tokens(part.train, part.train_digest, self._feeding)
        misfits = [
            (index, problem)
            for index in range(len(tokens))
            for problem in self._misfit(tokens[index], sampled=self._samples)
        ]
        if len(misfits) > self._config.data.max_bad_share * len(tokens):
            index, (field, expected) = misfits[0]
            count = f"{len(misfits)} of the first {len(tokens)} rows of '{part.name}' do not fit"
            yield field, f"{expected}; it starts {_cut(part.train.row(index).prompt)} ({count})"

    def _misfit(self, fed: TokenizedRow, *, sampled: bool) -> Iterator[Problem]:
        """Yield at most one problem: the limit that this row exceeds."""
        new, prompt = self._config.sampling.max_new_tokens, len(fed.prompt)
        if sampled and prompt + new > self._config.generation.max_length:
            on_top = f"`sampling.max_new_tokens`={new} come on top"
            yield (
                "generation.max_length",
                f"at least {prompt + new}: a prompt has {prompt} tokens and {on_top}",
            )
        elif fed.longest > self._model.max_positions:
            positions = self._model.max_positions
            yield (
                "data.source",
                f"rows within the model's {positions} positions, got {fed.longest} tokens in one",
            )


def _cut(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:39]}…")
