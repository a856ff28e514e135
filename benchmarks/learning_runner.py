"""One tiny run in one process, from the parts of the system: data, engine, rewards, graph, ranks' model calls, records.

A campaign of learning faults needs many runs and no faults of processes, so this leaves out processes, messages and
recovery. What it computes and records of a step is computed and recorded by the functions that the master, the rollout
workers and the ranks call: the run folder has the same `metrics.jsonl` and `samples.jsonl`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from kintsugi.config.recipe import dump, load
from kintsugi.config.schema import Config
from kintsugi.config.stages import Stage, stages
from kintsugi.control.evaluation import Evaluation
from kintsugi.control.step_metrics import staleness_metrics, with_final_rewards
from kintsugi.data.dataset import open_data, pin_data
from kintsugi.data.prefetch import PrefetchingReader
from kintsugi.graph.executor import GraphExecution
from kintsugi.lab.fragile.batch import DistributedBatchMemory, call_of, execution_of, rows
from kintsugi.lab.fragile.messages import Prompt
from kintsugi.lab.fragile.sampler import Sampler
from kintsugi.lab.fragile.trainer import Trainer
from kintsugi.model.plan import plan_model
from kintsugi.protocol.rollout import EpisodesDone
from kintsugi.rollout.group import sample_text
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.step_metrics import MetricsWriter, SamplesWriter, source_metrics, step_metrics
from kintsugi.types import FinishReason, SampleText, Ticket, ticket_id

RANK = "model-0"


class TinyRun:
    """A run of one rank and one engine; `lag`: steps by which the sampling weights are older than the trained ones."""

    def __init__(self, config: Config, run_dir: Path, *, lag: int = 0) -> None:
        torch.manual_seed(0)
        self._config, self._run_dir, self._lag = config, run_dir, lag
        pin_data(config, run_dir=run_dir)
        self._data = open_data(config, run_dir=run_dir)
        _, self._tokenizer = plan_model(config)
        self._feed = PrefetchingReader(config, self._tokenizer, run_dir=run_dir)
        self._trainer = Trainer(config, process=RANK, host="127.0.0.1")
        self._trainer.join([RANK], store=self._trainer.store, timeout_s=10.0)
        self._sampler = Sampler(config, process="rollout-0")
        self._kept: list[tuple[int, dict[str, Tensor]]] = []
        self._metrics, self._samples = MetricsWriter(run_dir), SamplesWriter(run_dir)
        self._issued = 0

    def train(self) -> None:
        """Run all stages, with evaluations before, between and after the steps of the main stage."""
        for stage in stages(self._config):
            self._issued = 0
            self._trainer.start_stage(stage.name, step=stage.first_step - 1)
            self._publish(stage.first_step - 1)
            if stage.name != "warmup":
                self._evaluate(stage.first_step - 1)
            for step in range(stage.first_step, stage.last_step + 1):
                self._step(stage, step)
                self._publish(step)
                every = self._config.eval.every
                if stage.name != "warmup" and (step == stage.last_step or (every and step % every == 0)):
                    self._evaluate(step)
        self._metrics.close()
        self._samples.close()

    def save(self, folder: Path) -> None:
        """Write a model folder."""
        folder.mkdir(parents=True)
        for name, content in self._trainer.files():
            if name != "optimizer.safetensors":
                (folder / name).write_bytes(content)

    def _publish(self, version: int) -> None:
        weights = {name: tensor.clone() for name, tensor in self._trainer.weights().items()}
        self._kept = [*self._kept, (version, weights)][-self._lag - 1 :]
        self._sampler.load(*self._kept[0])

    def _step(self, stage: Stage, step: int) -> None:
        tickets = [self._ticket(stage) for _ in range(stage.algorithm.batch_size)]
        texts: dict[str, SampleText] = {}
        if stage.samples_completions:
            prompts = [self._prompt(stage, ticket) for ticket in tickets]
            batch = DistributedBatchMemory([self._sampler.roll_out(prompts)])
            texts = self._texts(prompts, batch)
        else:
            batch = rows(self._feed, stage, tickets, holder="rollout-0")
        walk = execution_of(stage, batch, config=self._config, ranks=[RANK], step=step)
        while not walk.finished:
            for dispatch in walk.ready(now=0.0):
                call = call_of(dispatch, stage, batch, config=self._config, step=step)
                done = self._trainer.run(call, batch.trajectories)
                problem = walk.answered(call.call, RANK, done, now=0.0)
                assert problem is None, problem
        self._trainer.commit(step)
        self._record(stage, step, batch, walk, texts)

    def _record(
        self,
        stage: Stage,
        step: int,
        batch: DistributedBatchMemory,
        walk: GraphExecution,
        texts: Mapping[str, SampleText],
    ) -> None:
        metas = with_final_rewards(stage, batch.metas, walk.values)
        advantages = {
            key: values[name]
            for key, values in walk.values.items()
            for name in ("advantage", "mean_advantage")
            if name in values
        }
        metrics = {**walk.metrics, **staleness_metrics(batch.metas, version=step - 1)}
        values = step_metrics(metas, advantages=advantages, call_metrics=metrics, timing={"step": 1.0})
        values |= source_metrics(metas, texts=texts)
        self._metrics.write(step, values)
        self._samples.write(step, metas, texts=texts, advantages=advantages)

    def _ticket(self, stage: Stage) -> Ticket:
        epoch, position = divmod(self._issued, self._data.num_positions)
        self._issued += 1
        name = ticket_id(stage.name, epoch=epoch, position=position)
        return Ticket(name, stage.name, epoch, position, 0, stage.algorithm.group_size)

    def _prompt(self, stage: Stage, ticket: Ticket) -> Prompt:
        row, fed = self._feed.training(
            stage=stage.name, seed=stage.seed, epoch=ticket.epoch, position=ticket.position
        )
        return Prompt(ticket, row, tuple(fed.prompt))

    def _texts(self, prompts: Sequence[Prompt], batch: DistributedBatchMemory) -> dict[str, SampleText]:
        by_ticket = {prompt.ticket.id: prompt.row for prompt in prompts}
        texts = {}
        for meta in batch.metas:
            trajectory = batch.trajectories[meta.key]
            ids = memoryview(trajectory.tokens).cast("i").tolist()[-meta.num_loss_tokens :]
            text = self._tokenizer.text_of_completion(ids, ended=trajectory.finish is FinishReason.EOS)
            texts[meta.key] = sample_text(by_ticket[meta.ticket], text)
        return texts

    def _evaluate(self, step: int) -> None:
        """Answer the held-out problems greedily with the weights that the sampler has."""
        version = self._kept[0][0]
        evaluation = Evaluation(
            self._config, step=step, version=version, num_problems=self._data.num_held_out
        )
        prompts = []
        for ticket, _ in evaluation.tasks.values():
            row, fed = self._feed.held_out(ticket.position)
            prompts.append(Prompt(ticket, row, tuple(fed.prompt)))
        answered = self._sampler.roll_out(prompts, temperature=0.0)
        by_ticket = {meta.ticket: meta for meta in answered.metas}
        for name in evaluation.tasks:
            evaluation.take(EpisodesDone(name, (by_ticket[name],)))
        self._metrics.write(step, evaluation.metrics())


def run(
    recipe: str, run_dir: Path, *, lag: int = 0, save: Path | None = None, overrides: Sequence[str] = ()
) -> None:
    """Train a recipe in this process, into a new run folder."""
    config = load(recipe, list(overrides)).config
    run_dir.mkdir(parents=True)
    dump(config, RunFolder(run_dir).config_file)
    tiny = TinyRun(msgspec.structs.replace(config, run_dir=str(run_dir)), run_dir, lag=lag)
    tiny.train()
    if save is not None:
        tiny.save(save)
