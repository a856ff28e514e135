"""Layout of a run folder: the path of every file that a run writes, defined once.

    config.yaml             the configuration, as it runs
    config.until-step-N.yaml  the configuration before a resume with overrides
    origins.json            source of each configuration value: recipe, override, default
    webhook                 address of the webhook, which may be a credential; readable by its owner only
    started.json            the configuration at the start, to find what was changed before a resume
    rewards.py              reward functions that were passed from Python
    data.json               data sources with their digests, pinned when the run starts
    journal                 facts that the master committed; a resume and a takeover replay them
    journal.N               earlier facts, which the journal has folded into its first record; 256 MiB at most
    inputs                  events that the master handled, for replay in the simulator
    summary.json            outcome of the run, written at its end
    tags.json               tags of the run (`kintsugi tag`)
    joined_hosts.json       hosts on other machines, while the run runs
    host_files/             files that all hosts of a session get, with an index; while the run runs on other machines
    slurm_job.json          job of the run, where it was submitted to Slurm
    slurm_job.sh            script of that job
    launcher.json           process that runs this folder, while it runs
    processes.json          status, counters and waits of each process, refreshed by the master
    metrics.jsonl           metrics of each step and evaluation
    samples.jsonl           trained samples: prompt, completion, rewards
    samples.index           place and worst samples of each step in samples.jsonl
    samples.N.jsonl, .index  earlier samples, from byte N on; the oldest are removed (`logging.samples_gib`)
    verdicts.jsonl          held-out problems of each evaluation, answered right or wrong
    diagnoses.jsonl         diagnoses of the watcher process
    incidents.jsonl         incidents that the master's state does not keep: all but the newest 200
    learning.jsonl          findings about learning, a line whenever they change (`learning_health/`)
    store.db                search index over events, logs and journal (built by `kintsugi logs`)
    audit.jsonl             actions on this run: time, caller, origin, answer; each line has the hash of the last
    devices.json            memory of the accelerators before the run started
    steps                   whether the generation servers of a deterministic CPU run use the compiled decode step
    agents/AGENT.json       child processes of each agent
    copies.json             identity of this run in the target of `checkpoint.copy_to`
    checkpoints/step-N/     Hugging Face model folder and trainer state
    evaluations/NAME/       run folders of `kintsugi eval`
    events/PROCESS.jsonl    typed events of each process
    events/PROCESS.spans.jsonl  timed spans of each process
    figures/PROCESS.jsonl   periodic readings of each process: heartbeats, CPU, memory, links
    handed_over/SERVER/     weights for an external generation backend (vLLM, SGLang)
    logs/PROCESS.log        standard error of each process
    requests/NAME.json      requests of `kintsugi scale`, until the master has answered them
    rollouts/               samples of `kintsugi rollout`, with tokens and log-probabilities
    streams/                rows that were read from pipes and standard input
    tensorboard/            the metrics for TensorBoard
    weights/PROCESS/        published weights, where the disk transport is used

Names are stable: scripts and dashboards read these files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

REDACTED = "/redacted"
"""Path of a webhook in a run's configuration; `webhook` has the address itself."""


@dataclass(frozen=True, slots=True, init=False)
class RunFolder:
    """Paths inside one run folder: `RunFolder("runs/a").log_file("model-0") == Path("runs/a/logs/model-0.log")`."""

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    def earlier_config_file(self, step: int) -> Path:
        return self.path / f"config.until-step-{step}.yaml"

    @property
    def origins_file(self) -> Path:
        return self.path / "origins.json"

    @property
    def started_file(self) -> Path:
        return self.path / "started.json"

    @property
    def webhook_file(self) -> Path:
        return self.path / "webhook"

    @property
    def rewards_file(self) -> Path:
        return self.path / "rewards.py"

    @property
    def data_file(self) -> Path:
        return self.path / "data.json"

    @property
    def journal_file(self) -> Path:
        return self.path / "journal"

    @property
    def inputs_file(self) -> Path:
        return self.path / "inputs"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def launcher_file(self) -> Path:
        return self.path / "launcher.json"

    @property
    def hosts_file(self) -> Path:
        return self.path / "joined_hosts.json"

    @property
    def host_files_folder(self) -> Path:
        return self.path / "host_files"

    @property
    def host_files_index_file(self) -> Path:
        return self.host_files_folder / "index.json"

    @property
    def copies_file(self) -> Path:
        return self.path / "copies.json"

    @property
    def slurm_job_file(self) -> Path:
        return self.path / "slurm_job.json"

    @property
    def slurm_script_file(self) -> Path:
        return self.path / "slurm_job.sh"

    @property
    def processes_file(self) -> Path:
        return self.path / "processes.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples_file(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def samples_index_file(self) -> Path:
        return self.path / "samples.index"

    @property
    def eval_answers_file(self) -> Path:
        return self.path / "verdicts.jsonl"

    @property
    def diagnoses_file(self) -> Path:
        return self.path / "diagnoses.jsonl"

    @property
    def incidents_file(self) -> Path:
        return self.path / "incidents.jsonl"

    @property
    def learning_file(self) -> Path:
        return self.path / "learning.jsonl"

    @property
    def audit_file(self) -> Path:
        return self.path / "audit.jsonl"

    @property
    def index_file(self) -> Path:
        return self.path / "store.db"

    @property
    def decode_step_file(self) -> Path:
        return self.path / "steps"

    @property
    def devices_file(self) -> Path:
        return self.path / "devices.json"

    @property
    def tags_file(self) -> Path:
        return self.path / "tags.json"

    @property
    def checkpoints_folder(self) -> Path:
        return self.path / "checkpoints"

    @property
    def evaluations_folder(self) -> Path:
        return self.path / "evaluations"

    @property
    def events_folder(self) -> Path:
        return self.path / "events"

    @property
    def readings_folder(self) -> Path:
        return self.path / "figures"

    @property
    def logs_folder(self) -> Path:
        return self.path / "logs"

    @property
    def requests_folder(self) -> Path:
        return self.path / "requests"

    @property
    def rollouts_folder(self) -> Path:
        return self.path / "rollouts"

    @property
    def streams_folder(self) -> Path:
        return self.path / "streams"

    @property
    def tensorboard_folder(self) -> Path:
        return self.path / "tensorboard"

    def agent_file(self, agent: str) -> Path:
        return self.path / "agents" / f"{agent}.json"

    def events_file(self, process: str) -> Path:
        return self.events_folder / f"{process}.jsonl"

    def spans_file(self, process: str) -> Path:
        return self.events_folder / f"{process}.spans.jsonl"

    def readings_file(self, process: str) -> Path:
        return self.readings_folder / f"{process}.jsonl"

    def log_file(self, process: str) -> Path:
        return self.logs_folder / f"{process}.log"

    def request_file(self, name: str) -> Path:
        return self.requests_folder / f"{name}.json"

    def external_weights_folder(self, server: str) -> Path:
        return self.path / "handed_over" / server

    def published_weights_folder(self, process: str) -> Path:
        return self.path / "weights" / process


RELATIVE = RunFolder("")
"""Paths relative to a run folder, for texts: `str(RELATIVE.events_file("model-0")) == "events/model-0.jsonl"`."""
