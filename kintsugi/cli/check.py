"""Output of `kintsugi check`: configuration with origins, data, graph, processes and memory."""

from __future__ import annotations

from collections.abc import Iterator

from kintsugi.cli.capacity import limit_lines, memory_lines
from kintsugi.config.recipe import Resolved, fields_of, shown
from kintsugi.config.resolution import with_resolved_algorithm
from kintsugi.config.schema import Config
from kintsugi.config.stages import Stage, stages
from kintsugi.control.placement import ProcessPlan, plan_layout
from kintsugi.data.dataset import describe_data
from kintsugi.data.streams import UNKNOWN_LENGTH
from kintsugi.graph.algorithms import build_graph
from kintsugi.graph.mfc import estimate
from kintsugi.model.architecture import ModelConfig, num_parameters
from kintsugi.model.plan import plan_model

VALUE_WIDTH = 24
"""Longer values shift their own origin only: the others fit a terminal of 80 columns."""


def overview(resolved: Resolved) -> str:
    """Describe the run of a recipe: values with origins, data, model, graph and cost of each stage, processes,
    memory."""
    config = resolved.config
    model, _ = plan_model(config)
    parts = [
        ["configuration", *_values(resolved)],
        ["data", *_data(config)],
        [f"model: {model.family}, {num_parameters(model):,} parameters, vocabulary {model.vocab_size}"],
        *(
            [
                f"graph of {stage.name}, steps {stage.first_step}–{stage.last_step}",
                *_indented(build_graph(stage).describe()),
                *_estimates(config, stage, model),
            ]
            for stage in stages(config)
        ),
        ["processes", *_layout(plan_layout(config))],
        ["limits", *limit_lines(config)],
        ["memory, estimated", *memory_lines(config)],
    ]
    return "\n\n".join("\n".join(part) for part in parts)


def _values(resolved: Resolved) -> Iterator[str]:
    resolved = with_resolved_algorithm(resolved)
    rows = [
        (field, "null" if value is None else "{}" if value == {} else shown(value), resolved.origins[field])
        for field, value in fields_of(resolved.config).items()
    ]
    name_width = max(len(field) for field, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows if len(value) <= VALUE_WIDTH)
    for field, value, origin in rows:
        yield f"  {field:{name_width}}  {value:{value_width}}  {origin}"


def _data(config: Config) -> Iterator[str]:
    record = describe_data(config)
    length = (
        "of unknown length" if record.num_positions == UNKNOWN_LENGTH else f"{record.num_positions:,} prompts"
    )
    yield f"  epoch: {length}; held out: {record.num_held_out:,}"
    for each in record.found:
        yield f"  {each.field}: {each.num_rows:,} rows in {each.source}"
    yield from (f"  {sentence}" for sentence in record.left_out)


def _estimates(config: Config, stage: Stage, model: ModelConfig) -> Iterator[str]:
    """Upper bound of the cost of each model call: all sequences have `generation.max_length` tokens."""
    num_samples = stage.algorithm.batch_size * stage.algorithm.group_size
    for call in build_graph(stage).calls.values():
        cost = estimate(
            call,
            num_samples=num_samples,
            tokens_per_sample=config.generation.max_length,
            num_parameters=num_parameters(model),
        )
        work = f"{cost.flops / 1e9:,.1f} GFLOP, " if cost.flops else ""
        yield f"  at most per step: {call.name}: {work}{cost.bytes_moved / 1e3:,.0f} kB of samples"


def _indented(text: str) -> Iterator[str]:
    return (f"  {line}" for line in text.splitlines())


def _layout(plan: tuple[ProcessPlan, ...]) -> Iterator[str]:
    for host in dict.fromkeys(process.host for process in plan):
        yield f"  {host}: {', '.join(process.process for process in plan if process.host == host)}"
