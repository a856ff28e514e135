"""Answers of the page's HTTP interface, one struct per answer, each with an example.

Times are seconds since the epoch on the master's clock; durations end in `_s`. A value that was not recorded is null.
Every answer that reads files has `problems`: sentences about what could not be read; the rest of the answer holds.

    GET  /api/session                            Session
    GET  /api/runs                               RunList
    GET  /api/runs/ID                            RunHeader
    GET  /api/runs/ID/metrics                    Metrics          ?keys=a,b&points=2000
    GET  /api/runs/ID/learning                   LearningHealth
    GET  /api/runs/ID/samples                    SamplePage       ?step=&group=&sort=order|worst|longest|surprising
                                                                   &text=&min=&max=&outcome=&cursor=&limit=
    GET  /api/runs/ID/samples/N                  SampleDetail
    GET  /api/runs/ID/timeline                   Timeline         ?from=&to=&points=
    GET  /api/runs/ID/trace                      Trace Event Format, as a download
    GET  /api/runs/ID/health                     Health
    GET  /api/runs/ID/incidents                  IncidentList
    GET  /api/runs/ID/incidents/N                IncidentDetail
    GET  /api/runs/ID/logs                       LogPage          ?text=&process=&from=&to=&request=&cursor=&limit=
    GET  /api/runs/ID/service_levels             ServiceLevels
    GET  /api/runs/ID/events                     server-sent events: `change` (Change), `incident` (IncidentRow)
    GET  /api/compare                            CompareAnswer    ?runs=a,b
    POST /api/runs/ID/{stop,scale,resume}        Done             body: Order

An error is `{"error": "sentence"}` with status 400, 401, 403, 404, 409 or 500.
"""

from __future__ import annotations

import msgspec

from kintsugi.learning_health import LearningFinding


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    pass


class _Period(_Answer, frozen=True, kw_only=True, rename={"since": "from", "until": "to"}):
    """A part of time; its ends are called `from` and `to` in JSON."""


class Failure(_Answer, frozen=True, kw_only=True):
    """`{"error": "no run 'x' in runs/"}`."""

    error: str


class Session(_Answer, frozen=True, kw_only=True):
    """Rights of this viewer.

    {"role": "viewer", "may": [], "version": "0.1.0", "csrf": "", "demo": false}
    {"role": "operator", "may": ["stop", "scale", "resume"], "version": "0.1.0", "csrf": "9f…", "demo": false}
    """

    role: str
    """`viewer`, `operator`, `editor` or `admin`."""
    may: tuple[str, ...]
    """Actions of `POST /api/runs/ID/…` that are allowed: `stop`, `scale`, `resume`."""
    version: str
    csrf: str
    """Value that every `Order` has to carry; empty where no action is allowed."""
    demo: bool = False
    """The page shows the recorded runs of the package."""


class RunRow(_Answer, frozen=True, kw_only=True):
    """One run of the overview. Of an unreadable run only `id`, `name`, `state` and `problems` are set.

    {"id": "sums-1", "name": "sums", "state": "running", "step": 12, "steps": 100, "reward": 0.41,
     "accuracy": 0.55, "accuracy_low": 0.42, "accuracy_high": 0.67, "tokens_per_s": 3484.5, "age_s": 93.0,
     "started": 1794984263.4, "algorithm": "grpo", "model": "new llama, 2 layers", "last_incident": {…} or null,
     "curve": [0.1, 0.25, 0.41], "learning": ["equal_rewards since step 3: …"], "problems": []}
    """

    id: str
    """Name in URLs: that of the folder."""
    name: str
    """Name in the configuration."""
    state: str
    """`running`, `finished`, `stopped`, `failed`, `interrupted` or `unreadable`."""
    step: int = 0
    steps: int = 0
    reward: float | None = None
    accuracy: float | None = None
    accuracy_low: float | None = None
    accuracy_high: float | None = None
    tokens_per_s: float | None = None
    age_s: float = 0.0
    """Seconds since the run folder was created."""
    started: float = 0.0
    algorithm: str = ""
    model: str = ""
    last_incident: IncidentRow | None = None
    curve: tuple[float | None, ...] = ()
    """Mean reward over the steps that have one, thinned to few points."""
    learning: tuple[str, ...] = ()
    """Current findings about learning, a line each; empty where nothing is unusual."""
    problems: tuple[str, ...] = ()


class RunList(_Answer, frozen=True, kw_only=True):
    """{"runs": [RunRow, …newest first], "folder": "runs", "problems": []}"""

    runs: tuple[RunRow, ...]
    folder: str
    problems: tuple[str, ...] = ()


class Setting(_Answer, frozen=True, kw_only=True):
    """One value of the configuration: {"key": "actor.learning_rate", "value": "0.0003", "origin": "sums.yaml"}."""

    key: str
    value: str
    origin: str
    """Name of the recipe, `command line` or `default`; empty if it was not recorded."""


class RunEnd(_Answer, frozen=True, kw_only=True):
    """End of a run, and how to go on.

    {"outcome": "failed", "cause": "model-0: exited with code 1: KeyError: 'x' (ProcessLost)",
     "faults": ["…"], "resume": "kintsugi resume runs/sums-1"}
    """

    outcome: str
    cause: str
    """Empty for a run that finished."""
    faults: tuple[str, ...]
    """The first cause first."""
    resume: str
    """Command that continues the run; empty where there is nothing to resume."""


class RunHeader(RunRow, frozen=True, kw_only=True):
    """A run with its configuration; the fields of `RunRow`, and:

    {…, "folder": "runs/sums-1", "configuration": [Setting, …], "ended": 1794984270.4, "end": RunEnd or null,
     "stage": "grpo", "hosts": ["host-0"], "roles": {"master": 1, "model": 2}, "weights_sha256": "ab…",
     "servers": 2, "checkpoints": [3, 6], "phase": "generating", "recovery": ""}
    """

    folder: str = ""
    configuration: tuple[Setting, ...] = ()
    ended: float | None = None
    end: RunEnd | None = None
    stage: str = ""
    hosts: tuple[str, ...] = ()
    roles: dict[str, int] = {}
    """Processes by role."""
    weights_sha256: str | None = None
    servers: int = 0
    """Target number of generation servers."""
    checkpoints: tuple[int, ...] = ()
    phase: str = ""
    """Phase of the master of a running job."""
    recovery: str = ""
    """State of the recovery protocol; empty unless the run recovers."""


class EvaluationPoint(_Answer, frozen=True, kw_only=True):
    """{"step": 3, "time": 1794984268.1, "accuracy": 0.5, "low": 0.3, "high": 0.7, "problems": 20}"""

    step: int
    time: float
    accuracy: float
    low: float | None
    high: float | None
    problems: int = 0


class Mark(_Answer, frozen=True, kw_only=True):
    """A mark on every curve.

    {"step": 4, "time": 1794984269.0, "kind": "incident", "text": "model-1 was killed by SIGKILL", "incident": 1}
    `kind`: `incident`, `evaluation` or `checkpoint`; `incident` is null for the others.
    """

    step: int
    time: float | None
    kind: str
    text: str
    incident: int | None = None


class Metrics(_Answer, frozen=True, kw_only=True):
    """Curves, thinned to at most `points` places; a place is the mean of the steps that it stands for.

    {"steps": [1, 2], "times": [1794984266.1, 1794984266.6], "series": {"reward/mean": [0.0, 0.1]},
     "keys": ["loss", "reward/mean"], "evaluations": [EvaluationPoint, …], "marks": [Mark, …],
     "thinned": 1, "problems": ["metrics.jsonl, line 7: expected a JSON object, got 'x'"]}

    Without `keys=` all series are in the answer. A resumed run has no step twice.
    """

    steps: tuple[int, ...]
    times: tuple[float, ...]
    series: dict[str, tuple[float | None, ...]]
    keys: tuple[str, ...]
    """All names of the run, also those that were not requested."""
    evaluations: tuple[EvaluationPoint, ...]
    marks: tuple[Mark, ...]
    thinned: int = 1
    """Steps that a place stands for."""
    problems: tuple[str, ...] = ()


class LearningHealth(_Answer, frozen=True, kw_only=True):
    """Findings about learning, the cause of others first; none where nothing is unusual.

    {"findings": [{"kind": "equal_rewards", "since_step": 3, "step": 8, "confidence": 0.95, "summary": "no group has …",
     "evidence": [{"source": "metrics.jsonl", "step": 8, "quote": "frac_reward_zero_std 1, …"}], "advice": "look at …",
     "leads_to": []}]}
    """

    findings: tuple[LearningFinding, ...]


class SampleRow(_Answer, frozen=True, kw_only=True):
    """One sample of a list; long texts are cut.

    {"n": 17, "step": 6, "group": "grpo:0:191:0", "sample": 7, "version": 5, "reward": 0.0,
     "rewards": {"exact_answer": 0.0}, "advantage": -0.4, "outcome": "eos", "length": 12, "prompt": "39+63=",
     "completion": "1", "cut": false}
    """

    n: int
    """Number for `GET …/samples/17`: the byte offset of its line. Numbers may change when a run resumes."""
    step: int
    group: str
    """Ticket; the samples of one prompt share it."""
    sample: int
    version: int
    reward: float
    rewards: dict[str, float]
    advantage: float | None
    outcome: str
    """How it ended: `eos`, `length`, …"""
    length: int
    """Characters of the completion."""
    prompt: str
    completion: str
    cut: bool
    """A text is longer than shown."""


class Histogram(_Answer, frozen=True, kw_only=True):
    """Rewards of all samples that fit the filters other than `min` and `max`.

    {"edges": [0.0, 0.5, 1.0], "counts": [12, 3]}: counts[i] lies in [edges[i], edges[i+1]), the last one inclusive.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


class Filtered(_Answer, frozen=True, kw_only=True):
    """Samples that were not trained: {"reason": "filtered: all rewards equal", "count": 64}."""

    reason: str
    count: int


class SamplePage(_Answer, frozen=True, kw_only=True):
    """A page of samples.

    {"items": [SampleRow, …], "next": "50" or null, "total": 1216, "histogram": Histogram, "filtered": [Filtered, …],
     "groups": [GroupRow, …], "outcomes": {"eos": 1100, "length": 116}, "indexed": 1.0, "searched": 1.0, "problems": []}

    While `indexed` is below 1, the index is being built: what is shown is of that share of the file, and a `change` of
    `samples` follows. A text search reads up to a bound; `searched` says how much, `next` continues.
    """

    items: tuple[SampleRow, ...]
    next: str | None
    total: int
    """Samples that fit all filters, as far as indexed (without `text`, which is searched page by page)."""
    histogram: Histogram
    filtered: tuple[Filtered, ...]
    groups: tuple[GroupRow, ...] = ()
    """With `step=`: the groups of that step."""
    outcomes: dict[str, int] = {}
    steps: tuple[int, ...] = ()
    """First and last step that has samples; empty if there are none."""
    indexed: float = 1.0
    searched: float = 1.0
    problems: tuple[str, ...] = ()


class GroupRow(_Answer, frozen=True, kw_only=True):
    """A group of a step: {"group": "grpo:0:191:0", "samples": 8, "mean": 0.25, "low": 0.0, "high": 1.0, "first": 1208,
    "prompt": "39+63="}."""

    group: str
    samples: int
    mean: float
    low: float
    high: float
    first: int
    """`n` of its first sample."""
    prompt: str


class Turn(_Answer, frozen=True, kw_only=True):
    """A part of an episode: {"role": "assistant", "kind": "text", "text": "…"}.

    `role`: `system`, `user`, `assistant`, `tool` or `prompt`/`completion` where the text has no turns.
    `kind`: `text`, `tool_call` or `tool_output`.
    """

    role: str
    kind: str
    text: str


class TokenCell(_Answer, frozen=True, kw_only=True):
    """One token of a strip: {"text": "4", "logprob": -0.2, "trainer_minus_sampler": null, "entropy": null, "mask": 1,
    "version": 5}."""

    text: str
    logprob: float | None
    trainer_minus_sampler: float | None
    entropy: float | None
    mask: int
    version: int | None = None


class SampleDetail(SampleRow, frozen=True, kw_only=True):
    """One sample, whole; the fields of `SampleRow` (texts are not cut), and:

    {…, "turns": [Turn, …], "tokens": [TokenCell, …] or null, "expected": {"answer": "102"} or null,
     "previous": 16 or null, "next": 18 or null, "group_mean": 0.25}
    """

    turns: tuple[Turn, ...]
    tokens: tuple[TokenCell, ...] | None
    """Null where the run did not record tokens."""
    expected: dict[str, str] | None
    """Columns of the row, such as the expected answer; null where they are not recorded."""
    previous: int | None
    next: int | None
    group_mean: float | None


class TimelineSpan(_Period, frozen=True, kw_only=True):
    """{"from": 1794984266.1, "to": 1794984266.4, "kind": "train", "name": "actor_train", "step": 3, "version": null,
    "count": 1}

    `kind`: `generate`, `reward`, `train`, `weights`, `save`, `evaluate`, `wait`, `recover`, `start` or `other`.
    Spans that are shorter than one of `points` places are merged; `count` says how many.
    """

    since: float
    until: float
    kind: str
    name: str
    step: int | None
    version: int | None
    count: int = 1


class Lane(_Answer, frozen=True, kw_only=True):
    """One process over time: {"process": "model-0", "host": "host-0", "role": "model", "spans": [TimelineSpan, …]}."""

    process: str
    host: str
    role: str
    spans: tuple[TimelineSpan, ...]


class Readings(_Answer, frozen=True, kw_only=True):
    """Measured values of a process, or of a host (`host-0`), over time; a series has one value per time.

    {"times": [1794984266.1], "cpu": [0.9], "memory": [1.2e9], "gpu": [0.7], "gpu_memory": [8e9]}
    `cpu` is in processors, of a host as share of all; `memory` in bytes; `gpu` the busy share.
    """

    times: tuple[float, ...]
    cpu: tuple[float | None, ...]
    memory: tuple[float | None, ...]
    gpu: tuple[float | None, ...]
    gpu_memory: tuple[float | None, ...] = ()


class StepBar(_Period, frozen=True, kw_only=True):
    """Stages of one step: {"step": 3, "from": 1794984266.1, "to": 1794984266.6, "stages": {"generate": 0.19, "train":
    0.26}}."""

    step: int
    since: float
    until: float
    stages: dict[str, float]


class HeatMap(_Answer, frozen=True, kw_only=True):
    """Busy share of many processes: {"times": [t0, t1], "processes": ["model-0"], "busy": [[0.9, 0.2]], "kinds":
    [["train", "wait"]]}; a row per process, a column per time."""

    times: tuple[float, ...]
    processes: tuple[str, ...]
    busy: tuple[tuple[float, ...], ...]
    kinds: tuple[tuple[str, ...], ...]


class Timeline(_Period, frozen=True, kw_only=True):
    """{"from": …, "to": …, "begin": first of the run, "end": last of the run, "lanes": [Lane, …],
    "readings": {"model-0": Readings, "host-0": Readings}, "steps": [StepBar, …], "heat": HeatMap or null,
    "marks": [Mark, …], "problems": []}

    Without `from` and `to` the last minute of records is shown. Above 32 processes `heat` is set as well.
    """

    since: float
    until: float
    begin: float
    end: float
    lanes: tuple[Lane, ...]
    readings: dict[str, Readings]
    steps: tuple[StepBar, ...]
    heat: HeatMap | None
    marks: tuple[Mark, ...] = ()
    problems: tuple[str, ...] = ()


class ProcessHealth(_Answer, frozen=True, kw_only=True):
    """{"process": "model-0", "role": "model", "pid": 4711, "state": "live", "load": 0.9, "memory": 1.2e9,
    "version": 5, "restarts": 1, "silent_s": 0.3, "last_words": "…", "last_words_line": "logs/model-0.log:120",
    "waits_for": ["rollout-0: RunEpisodes"], "counters": {"steps": 5}}

    `state`: `requested`, `live`, `leaving`, `lost`; `ended` where the run is over.
    """

    process: str
    role: str
    pid: int
    state: str
    load: float
    memory: float | None
    version: int | None
    restarts: int
    silent_s: float | None
    last_words: str
    last_words_line: str
    waits_for: tuple[str, ...]
    counters: dict[str, float] = {}


class HostHealth(_Answer, frozen=True, kw_only=True):
    """{"name": "host-0", "cpu": 0.4, "memory_used": 3.1e9, "memory_total": 25e9, "processes": [ProcessHealth, …]}"""

    name: str
    cpu: float | None
    memory_used: float | None
    memory_total: float | None
    processes: tuple[ProcessHealth, ...]


class WaitArrow(_Answer, frozen=True, kw_only=True, rename={"waiter": "from", "waited_for": "to"}):
    """{"from": "master-0", "to": "rollout-0", "what": "RunEpisodes", "since_s": 1.4}: `from` waits for `to`."""

    waiter: str
    waited_for: str
    what: str
    since_s: float


class Health(_Answer, frozen=True, kw_only=True):
    """{"time": 1794984270.1, "running": true, "phase": "generating", "recovery": "", "hosts": [HostHealth, …],
    "waits": [WaitArrow, …], "problems": []}"""

    time: float | None
    """Time of the figures; of an ended run that of its end."""
    running: bool
    phase: str
    recovery: str
    hosts: tuple[HostHealth, ...]
    waits: tuple[WaitArrow, ...]
    problems: tuple[str, ...] = ()


class IncidentRow(_Period, frozen=True, kw_only=True):
    """{"id": 1, "title": "model-1 was killed by SIGKILL", "from": 1794984269.0, "to": 1794984269.9, "cost_s": 0.9,
    "state": "recovered", "step": 4, "strategy": "replace", "processes": ["model-1"]}

    `state`: `recovering`, `recovered` or `unresolved`. `to` and `cost_s` are null while it lasts.
    """

    id: int
    title: str
    since: float | None
    until: float | None
    cost_s: float | None
    state: str
    step: int
    strategy: str = ""
    processes: tuple[str, ...] = ()


class OtherLoss(_Answer, frozen=True, kw_only=True):
    """A process that was replaced without affecting training: {"process": "agent-0", "text": "…"}."""

    process: str
    text: str


class IncidentList(_Answer, frozen=True, kw_only=True):
    """{"incidents": [IncidentRow, …oldest first], "others": [OtherLoss, …], "problems": []}"""

    incidents: tuple[IncidentRow, ...]
    others: tuple[OtherLoss, ...] = ()
    problems: tuple[str, ...] = ()


class LogLink(_Answer, frozen=True, kw_only=True):
    """A place in the logs: {"process": "model-1", "line": "events/model-1.jsonl:12"}; `line` is the `line` of a
    `LogLine`, or only the file where the place is not known."""

    process: str
    line: str


class StoryLine(_Answer, frozen=True, kw_only=True):
    """One sentence of the story.

    {"time": 1794984269.0, "text": "model-1 was killed by SIGKILL", "process": "model-1", "kind": "broke",
     "link": LogLink or null}
    `kind`: `broke`, `noticed`, `decided`, `rejected`, `replaced`, `diagnosed`, `resumed`, `cost` or `log`. `time` is
    null where it was not recorded.
    """

    time: float | None
    text: str
    process: str
    kind: str
    link: LogLink | None = None


class PathPoint(_Answer, frozen=True, kw_only=True):
    """One point of the causal path: {"time": 1794984269.0, "component": "model-1", "text": "killed by SIGKILL"}."""

    time: float
    component: str
    text: str


class EvidenceQuote(_Answer, frozen=True, kw_only=True):
    """{"text": "exit status -9", "process": "agent-0", "line": "events/agent-0.jsonl", "time": 1794984269.1}"""

    text: str
    process: str
    line: str
    time: float


class Alternative(_Answer, frozen=True, kw_only=True):
    """A less likely cause: {"cause": "…", "process": "server-0", "kind": "slow", "certainty": 0.2, "also": false}.

    `also`: not instead of the cause, but besides it: its process broke in the same incident.
    """

    cause: str
    process: str
    kind: str
    certainty: float
    also: bool = False


class CausePage(_Answer, frozen=True, kw_only=True):
    """Diagnosis of an incident.

    {"cause": "model-1 was killed by SIGKILL", "process": "model-1", "host": "host-0", "kind": "killed", "onset":
     1794984269.0, "certainty": 0.97, "path": [PathPoint, …], "evidence": [EvidenceQuote, …], "alternatives":
     [Alternative, …], "ruled_out": ["out of memory: the kernel killed nothing"], "advice": "…"}
    """

    cause: str
    process: str
    host: str
    kind: str
    onset: float
    certainty: float
    path: tuple[PathPoint, ...]
    evidence: tuple[EvidenceQuote, ...]
    alternatives: tuple[Alternative, ...]
    ruled_out: tuple[str, ...]
    advice: str


class IncidentDetail(IncidentRow, frozen=True, kw_only=True):
    """One incident; the fields of `IncidentRow`, and:

    {…, "summary": "model-1 was killed by SIGKILL at 06:44:29; …", "story": [StoryLine, …in order of time],
     "diagnosis": CausePage or null, "timing": {"start": 0.2, "total": 0.9}, "steps_undone": 0, "groups_again": 3,
     "no_diagnosis": "why there is none; empty otherwise", "problems": []}
    """

    summary: str
    story: tuple[StoryLine, ...]
    diagnosis: CausePage | None
    no_diagnosis: str
    timing: dict[str, float]
    steps_undone: int
    groups_again: int
    problems: tuple[str, ...] = ()


class LogLine(_Answer, frozen=True, kw_only=True):
    """One record of a process.

    {"time": 1794984266.1, "process": "model-0", "text": "began as model…", "kind": "ProcessBegan",
     "line": "events/model-0.jsonl:0", "exact": true}
    `kind` is the class of an event or journal entry, or `log` for a line of standard error. `line` is FILE:BYTE OFFSET.
    """

    time: float
    process: str
    text: str
    kind: str
    line: str
    exact: bool = True
    """False: the time is that of a neighbouring record."""


class LogPage(_Answer, frozen=True, kw_only=True):
    """{"lines": [LogLine, …in order of time], "next": "1794984266.1:42" or null, "processes": ["model-0", …],
    "indexed": true, "problems": []}

    Without `cursor` the newest `limit` lines are returned; `cursor=next` returns the lines before those. With
    `follow=CURSOR` (the `last` of an earlier answer) only newer lines are returned.
    """

    lines: tuple[LogLine, ...]
    next: str | None
    last: str | None
    """Cursor for `follow=`."""
    processes: tuple[str, ...]
    indexed: bool = True
    """False: the search index is being built in the background; a `change` of `logs` follows."""
    problems: tuple[str, ...] = ()


class Target(_Answer, frozen=True, kw_only=True):
    """{"name": "effective_ratio", "label": "Effective training time", "target": 0.9, "actual": 0.97, "met": true,
    "unit": "share", "at_least": true}"""

    name: str
    label: str
    target: float
    actual: float | None
    met: bool | None
    """Null where the actual value is not known yet."""
    unit: str
    at_least: bool = True


class IncidentLoss(_Answer, frozen=True, kw_only=True):
    """{"incident": 1, "title": "model-1 was killed by SIGKILL", "seconds": 0.9}"""

    incident: int
    title: str
    seconds: float


class ServiceLevels(_Answer, frozen=True, kw_only=True):
    """{"throughput": 3484.5, "samples_per_s": 240.1, "success_rate": 1.0, "gpu_hours": null, "processor_hours": 0.02,
    "wall_s": 93.0, "training_s": 88.0, "lost_s": 4.1, "effective_ratio": 0.95, "incidents": 2, "recovered": 2,
    "mean_recovery_s": 2.05, "steps_undone": 0, "losses": [IncidentLoss, …], "targets": [Target, …], "problems": []}
    """

    throughput: float | None
    """Trained tokens per second of wall time."""
    samples_per_s: float | None
    success_rate: float | None
    """Share of the issued samples that were trained or filtered on purpose: neither lost nor quarantined."""
    gpu_hours: float | None
    """Null on a run without accelerators."""
    processor_hours: float | None
    wall_s: float | None
    training_s: float | None
    lost_s: float | None
    """Time from faults to the next committed step; null while the journal is being read."""
    effective_ratio: float | None
    """1 − lost time / wall time."""
    incidents: int | None
    recovered: int
    mean_recovery_s: float | None
    steps_undone: int
    losses: tuple[IncidentLoss, ...]
    """The incidents that took the most time, the longest first."""
    targets: tuple[Target, ...]
    problems: tuple[str, ...] = ()


class ComparedRow(_Answer, frozen=True, kw_only=True):
    """{"id": "sums-1", "label": "A", "state": "finished", "step": 6, "steps": 6, "seed": 0, "accuracy": 0.5}"""

    id: str
    label: str
    state: str
    step: int
    steps: int
    seed: int
    accuracy: float | None


class ConfigDifference(_Answer, frozen=True, kw_only=True):
    """{"key": "actor.learning_rate", "values": ["0.0003", "0.001"], "origins": ["sums.yaml", "command line"]}"""

    key: str
    values: tuple[str, ...]
    origins: tuple[str, ...]


class PairedAnswer(_Answer, frozen=True, kw_only=True):
    """Last evaluations of two runs: `difference` is second − first.

    {"first": "A", "second": "B", "steps": [6, 6], "difference": 0.1, "low": -0.02, "high": 0.22, "paired": true,
     "problems": [20, 20], "only_first": 1, "only_second": 3, "p_value": 0.62}
    """

    first: str
    second: str
    steps: tuple[int, int]
    difference: float
    low: float
    high: float
    paired: bool
    problems: tuple[int, int]
    only_first: int
    only_second: int
    p_value: float | None


class CompareAnswer(_Answer, frozen=True, kw_only=True):
    """{"runs": [ComparedRow, …], "differences": [ConfigDifference, …], "paired": [PairedAnswer, …], "remarks": ["…"],
    "problems": []}; the curves are those of `/metrics` of each run."""

    runs: tuple[ComparedRow, ...]
    differences: tuple[ConfigDifference, ...]
    paired: tuple[PairedAnswer, ...]
    remarks: tuple[str, ...]
    problems: tuple[str, ...] = ()


class Change(_Answer, frozen=True, kw_only=True):
    """Data of `event: change`: {"what": ["metrics", "samples", "incidents", "health", "learning", "logs", "state",
    "timeline"]}.

    `/api/events` (all runs, for the overview) sends {"what": ["runs"], "runs": ["sums-1"]}.
    """

    what: tuple[str, ...]
    runs: tuple[str, ...] = ()


class Order(_Answer, frozen=True, kw_only=True):
    """Body of an action: {"csrf": "9f…"}, and for `scale` {"csrf": "9f…", "servers": 4}."""

    csrf: str
    servers: int | None = None


class Done(_Answer, frozen=True, kw_only=True):
    """{"text": "runs/sums-1: sent the stop request to process 4711; it ends after its step"}"""

    text: str
