"""One run, read for the page: every answer about it, from its folder alone. Methods block on files and are called in
threads; a lock keeps two requests from reading the same part twice."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kintsugi.config.recipe import fields_of, load_config, shown
from kintsugi.config.schema import Config
from kintsugi.config.stages import next_stage, stages
from kintsugi.diagnosis.diagnose import diagnose
from kintsugi.diagnosis.verdict import Cause
from kintsugi.errors import KintsugiError, UserError
from kintsugi.learning_health import learning_lines, recorded_findings
from kintsugi.page import samples as sample_pages
from kintsugi.page import timeline as lanes_over_time
from kintsugi.page.health import health
from kintsugi.page.incidents import incident_detail, incident_list, incident_row, recorded_causes
from kintsugi.page.journal_tail import JournalTail
from kintsugi.page.logs import LogFilter, read_logs
from kintsugi.page.metrics import MetricsTable, places, thinned
from kintsugi.page.record_search import RecordSearch
from kintsugi.page.samples import SampleFilter, SampleIndex
from kintsugi.page.schema import (
    Filtered,
    Health,
    IncidentDetail,
    IncidentList,
    IncidentRow,
    LearningHealth,
    LogPage,
    Mark,
    Metrics,
    RunEnd,
    RunHeader,
    RunRow,
    SampleDetail,
    SamplePage,
    ServiceLevels,
    Setting,
    Timeline,
    Turn,
)
from kintsugi.page.service_levels import service_levels
from kintsugi.page.token_strips import token_strip
from kintsugi.run_folder import reader
from kintsugi.run_folder.creation import read_origins
from kintsugi.run_folder.incidents import headline
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import RunState
from kintsugi.run_folder.summary import Summary
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.telemetry.process_reports import read_processes
from kintsugi.types import role_of

UNREADABLE = "unreadable"
OTHER_VERSION = "this run may be of another version of kintsugi; its records are shown as far as possible"
MOST_POINTS = 20_000
MOST_MARKS = 500
CURVE_POINTS = 48
_PARTS = re.compile(r"⟨(?P<output>.*?)⟩|(?P<call><tool(?:_call)?>.*?</tool(?:_call)?>)", re.DOTALL)
"""Observations of an environment stand in ⟨…⟩ between the texts of the policy (`rollout/user_code`)."""
_CHAT = re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL)


class RunReader:
    """Reader of one run folder."""

    def __init__(self, folder: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.folder, self._clock = folder, clock
        self.lock = threading.RLock()
        self.metrics_table = MetricsTable(folder, clock=clock)
        self.journal = JournalTail(folder, clock=clock)
        self.sample_index = SampleIndex(folder)
        self.records = RecordSearch(folder)
        self._config: tuple[tuple[int, ...], Config | None, str] | None = None
        self._computed: dict[int, tuple[Cause, ...]] = {}
        """Diagnoses of incidents that were made for the page."""

    @property
    def id(self) -> str:
        return self.folder.name

    def close(self) -> None:
        self.records.close()

    def forget_samples(self) -> None:
        """Release the memory of the index of samples; it is built again when it is needed."""
        self.sample_index = SampleIndex(self.folder)

    # State.

    def config(self) -> tuple[Config | None, str]:
        """Return the configuration, or why it can not be read."""
        path = RunFolder(self.folder).config_file
        try:
            status = path.stat()
        except OSError as error:
            return None, f"{path.name}: {error.strerror or error}"
        seen = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._config is None or self._config[0] != seen:
            try:
                self._config = (seen, load_config(path), "")
            except KintsugiError as error:
                self._config = (seen, None, f"{error}; {OTHER_VERSION}")
            except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
                self._config = (seen, None, f"{path.name}: {error}")
        return self._config[1], self._config[2]

    def summary(self) -> tuple[Summary | None, str]:
        try:
            return reader.read_summary(self.folder), ""
        except (KintsugiError, OSError, UnicodeDecodeError) as error:
            return None, str(error)

    def read_journal(self) -> bool:
        """Read a further part of the journal; return whether there is more."""
        with self.lock:
            self.journal.refresh()
            return not self.journal.is_complete

    def is_running(self) -> bool:
        """Return whether the run runs, here or on a host that shares this disk."""
        try:
            return reader.is_running(self.folder)
        except (KintsugiError, OSError):
            return False

    def state(self, summary: Summary | None) -> tuple[str, str]:
        """Return the state of the run, and a problem."""
        try:
            if reader.is_running(self.folder):
                return RunState.RUNNING.value, ""
        except UserError as error:
            return RunState.INTERRUPTED.value, str(error)
        except OSError as error:
            return RunState.INTERRUPTED.value, f"{error.strerror or error}"
        if summary is not None and summary.outcome in {state.value for state in RunState}:
            return summary.outcome, ""
        return RunState.INTERRUPTED.value, ""

    def started(self) -> float:
        """Return when the run folder was made."""
        try:
            return RunFolder(self.folder).config_file.stat().st_mtime
        except OSError:
            return 0.0

    # Overview and header.

    def row(self) -> RunRow:
        """Return the run for the overview; the journal is read only as far as it is needed."""
        with self.lock:
            return self._row(with_journal=False)

    def _row(self, *, with_journal: bool) -> RunRow:
        config, config_problem = self.config()
        summary, summary_problem = self.summary()
        state, state_problem = self.state(summary)
        self.metrics_table.refresh()
        last = self.metrics_table.last
        evaluation = self.metrics_table.evaluations[-1] if self.metrics_table.evaluations else None
        started = self.started()
        found = [config_problem, summary_problem, state_problem, *self.metrics_table.all_problems()]
        if with_journal or state == RunState.RUNNING:
            self.journal.refresh()
            found += self.journal.all_problems()
        has_records = bool(self.metrics_table.steps) or summary is not None
        is_readable = config is not None or has_records
        return RunRow(
            id=self.id,
            name=config.name if config else summary.name if summary else self.id,
            state=state if is_readable else UNREADABLE,
            step=self.metrics_table.steps[-1] if self.metrics_table.steps else 0,
            steps=stages(config)[-1].last_step if config else summary.steps if summary else 0,
            reward=last.get("reward/mean"),
            accuracy=evaluation.accuracy if evaluation else None,
            accuracy_low=evaluation.low if evaluation else None,
            accuracy_high=evaluation.high if evaluation else None,
            tokens_per_s=last.get("tokens_per_s"),
            age_s=max(0.0, self._clock.wall() - started) if started else 0.0,
            started=started,
            algorithm=config.algorithm.name if config else summary.algorithm if summary else "",
            model=model_name(config) if config else "",
            last_incident=self._last_incident(summary, is_running=state == RunState.RUNNING),
            curve=self._curve(),
            learning=tuple(learning_lines(self.folder)),
            problems=tuple(filter(None, found)),
        )

    def _curve(self) -> tuple[float | None, ...]:
        """Return the mean reward from the first step that has one, thinned to the width of a cell."""
        values = self.metrics_table.column("reward/mean")
        known = np.flatnonzero(np.isfinite(values))
        if not len(known):
            return ()
        values = values[known[0] :]
        means = thinned(values, every=max(1, -(-len(values) // CURVE_POINTS)))
        return tuple(None if value is None else float(f"{value:.4g}") for value in means)

    def _last_incident(self, summary: Summary | None, *, is_running: bool) -> IncidentRow | None:
        """Return the last incident: by the journal where it was read, else by the summary."""
        known = self.journal.report().incidents
        if known:
            return incident_row(known[-1], is_running=is_running)
        if summary is None or not summary.incidents:
            return None
        last = summary.incidents[-1]
        return IncidentRow(
            id=last.incident,
            title=headline(last.cause),
            since=None,
            until=None,
            cost_s=last.seconds,
            state="unresolved" if last.seconds is None else "recovered",
            step=last.step,
            strategy=last.strategy,
            processes=last.processes,
        )

    def header(self) -> RunHeader:
        with self.lock:
            row = self._row(with_journal=True)
            fields: dict[str, Any] = {name: getattr(row, name) for name in row.__struct_fields__}
            config, _ = self.config()
            summary, _ = self.summary()
            is_running = row.state == RunState.RUNNING
            reports = read_processes(self.folder) if is_running else None
            hosts = self.journal.hosts
            processes = self.journal.pids if is_running and self.journal.pids else hosts
            return RunHeader(
                **fields,
                folder=str(self.folder),
                configuration=tuple(self._settings(config)),
                ended=None if is_running else self._ended(),
                end=None if is_running else self._end(row.state, summary),
                stage=next_stage(config, step=self._step()).name if config else "",
                hosts=tuple(sorted(set(hosts.values()))),
                roles=_by_role(processes),
                weights_sha256=summary.weights_sha256 if summary else None,
                servers=_servers(config, self.journal),
                checkpoints=tuple(dict.fromkeys(self.journal.saved_steps)),
                phase=reports.phase if reports else "",
                recovery=reports.recovery if reports else "",
            )

    def _step(self) -> int:
        return self.metrics_table.steps[-1] if self.metrics_table.steps else 0

    def _settings(self, config: Config | None) -> list[Setting]:
        if config is None:
            return []
        origins = read_origins(self.folder)
        return [
            Setting(key=key, value=shown(value), origin=origins.get(key, ""))
            for key, value in fields_of(config).items()
        ]

    def _ended(self) -> float | None:
        """Return the time of the last record."""
        _, last = lanes_over_time.extent(self.folder, self.metrics_table)
        return last or None

    def _end(self, state: str, summary: Summary | None) -> RunEnd | None:
        if state in (RunState.RUNNING, UNREADABLE):
            return None
        faults: tuple[str, ...] = ()
        if state == RunState.FAILED:
            try:
                lines = summary.faults if summary is not None else reader.read_faults(self.folder, since=0.0)
            except (KintsugiError, OSError):
                lines = ()
            faults = tuple(f"{line.process}: {headline(line.message)} ({line.kind})" for line in lines)
        cause = faults[0] if faults else ""
        if state == RunState.INTERRUPTED:
            cause = "the launcher is gone and recorded no end: it was killed, or the machine went down"
        can_resume = state in (RunState.STOPPED, RunState.FAILED, RunState.INTERRUPTED)
        return RunEnd(
            outcome=state,
            cause=cause,
            faults=faults,
            resume=f"kintsugi resume {self.folder}" if can_resume else "",
        )

    # Curves.

    def metrics(self, *, keys: list[str] | None, points: int) -> Metrics:
        with self.lock:
            table = self.metrics_table
            table.refresh()
            self.journal.refresh()
            every = max(1, -(-len(table.steps) // max(2, min(points, MOST_POINTS))))
            names = table.keys if keys is None else [key for key in keys if key in set(table.keys)]
            return Metrics(
                steps=tuple(int(step) for step in places(table.steps, every=every)),
                times=tuple(places(table.times, every=every)),
                series={name: tuple(thinned(table.column(name), every=every)) for name in names},
                keys=tuple(table.keys),
                evaluations=tuple(table.evaluations),
                marks=tuple(self.marks()),
                thinned=every,
                problems=(*table.all_problems(), *self.journal.all_problems()),
            )

    def marks(self) -> list[Mark]:
        """Return incidents, evaluations and checkpoints as marks of steps."""
        is_running = self.is_running()
        found = []
        for incident in self.journal.report().incidents[-MOST_MARKS:]:
            row = incident_row(incident, is_running=is_running)
            found.append(
                Mark(step=row.step, time=row.since, kind="incident", text=row.title, incident=row.id)
            )
        for point in self.metrics_table.evaluations[-MOST_MARKS:]:
            text = f"accuracy {point.accuracy:.1%}"
            found.append(Mark(step=point.step, time=point.time or None, kind="evaluation", text=text))
        saved = dict.fromkeys(self.journal.saved_steps[-MOST_MARKS:])
        return found + [
            Mark(step=step, time=None, kind="checkpoint", text=f"checkpoint of step {step}") for step in saved
        ]

    def learning(self) -> LearningHealth:
        """Return the findings about learning that the watcher of the run recorded last."""
        report = recorded_findings(self.folder)
        return LearningHealth(findings=() if report is None else report.findings)

    # Samples.

    def samples(self, wanted: SampleFilter) -> SamplePage:
        index = self.sample_index
        found = sample_pages.find(index, wanted)
        with self.lock:
            self.journal.refresh(budget_s=0.05)
            dropped = self.journal.dropped.most_common(50)
        is_whole = wanted.step is not None
        return SamplePage(
            items=tuple(found.items),
            next=found.next,
            total=found.total,
            histogram=found.histogram,
            filtered=tuple(Filtered(reason=reason, count=count) for reason, count in dropped),
            groups=tuple(found.groups),
            outcomes=found.outcomes,
            steps=sample_pages.step_range(self.folder),
            indexed=1.0 if is_whole else index.share,
            searched=found.searched,
            problems=index.problems(),
        )

    def sample(self, number: int) -> SampleDetail | None:
        found = sample_pages.sample_at(self.folder, number)
        if found is None:
            return None
        record = found.record
        row = sample_pages.row_of(record, number)
        group = sample_pages.find(
            self.sample_index, SampleFilter(step=record.step, group=record.ticket, limit=500)
        )
        rewards = [each.reward for each in group.items]
        fields = {name: getattr(row, name) for name in row.__struct_fields__}
        return SampleDetail(
            **{**fields, "prompt": record.prompt, "completion": record.completion, "cut": False},
            turns=tuple(turns_of(record.prompt, record.completion)),
            tokens=token_strip(self.folder, self.config()[0], record),
            expected=None,
            previous=found.previous,
            next=found.next,
            group_mean=sum(rewards) / len(rewards) if rewards else None,
        )

    # Time and health.

    def timeline(self, *, since: float | None, until: float | None, points: int) -> Timeline:
        with self.lock:
            self.metrics_table.refresh()
            self.journal.refresh()
            hosts = self.journal.all_hosts()
            first, last = lanes_over_time.extent(self.folder, self.metrics_table)
            end = last if until is None else until
            begin = max(first, end - lanes_over_time.DEFAULT_S) if since is None else since
            if not begin < end:
                end = begin + 1.0
            bars = lanes_over_time.steps(self.metrics_table, since=begin, until=end)
            marks = tuple(
                mark for mark in self.marks() if mark.time is not None and begin <= mark.time <= end
            )
            problems = (*self.metrics_table.all_problems(), *self.journal.all_problems())
        points = max(10, min(points, MOST_POINTS))
        offsets = lanes_over_time.clock_offsets(self.folder)
        lanes, more = lanes_over_time.lanes(
            self.folder, since=begin, until=end, points=points, hosts=hosts, offsets=offsets
        )
        many = len(lanes) > lanes_over_time.MOST_PROCESSES
        return Timeline(
            since=begin,
            until=end,
            begin=first,
            end=last,
            lanes=tuple(lanes),
            readings=lanes_over_time.readings(
                self.folder, since=begin, until=end, points=min(points, 600), offsets=offsets
            ),
            steps=tuple(bars),
            heat=lanes_over_time.heat(lanes, since=begin, until=end) if many else None,
            marks=marks,
            problems=(*problems, *more),
        )

    def health(self) -> Health:
        with self.lock:
            self.journal.refresh()
            version = self.journal.current_version
            return health(self.folder, self.journal, is_running=self.is_running(), version=version)

    # Incidents.

    def incidents(self) -> IncidentList:
        with self.lock:
            self.journal.refresh()
            return incident_list(self.journal, is_running=self.is_running())

    def incident(self, number: int) -> IncidentDetail | None:
        with self.lock:
            self.journal.refresh()
            computed = self._computed.get(number)
            return incident_detail(
                self.folder, self.journal, number, is_running=self.is_running(), computed=computed
            )

    def needs_diagnosis(self, number: int) -> bool:
        """Return whether the watcher has recorded no cause of an incident and none was computed."""
        with self.lock:
            known = {each.incident: each for each in self.journal.report().incidents}
            incident = known.get(number)
            if incident is None or number in self._computed or not incident.time or incident.is_open:
                return False
        return not recorded_causes(self.folder, incident)

    def compute_diagnosis(self, number: int) -> None:
        """Diagnose an incident from the records of its time; takes seconds."""
        with self.lock:
            known = {each.incident: each for each in self.journal.report().incidents}
        incident = known[number]
        at = incident.time + min(incident.seconds or 2.0, 30.0) + 1.0
        try:
            causes = diagnose(self.folder, at=at).causes
        except (KintsugiError, OSError):
            causes = ()
        with self.lock:
            self._computed[number] = causes

    # Logs and levels.

    def logs(self, wanted: LogFilter) -> LogPage:
        with self.lock:
            self.journal.refresh(budget_s=0.1)
            hosts = self.journal.all_hosts()
        return read_logs(self.folder, wanted, hosts=hosts, offsets=lanes_over_time.clock_offsets(self.folder))

    def service_levels(self) -> ServiceLevels:
        with self.lock:
            self.metrics_table.refresh()
            self.journal.refresh()
            summary, problem = self.summary()
            is_running = self.is_running()
            levels = service_levels(
                self.folder,
                metrics=self.metrics_table,
                journal=self.journal,
                summary=None if is_running else summary,
                wall_s=lanes_over_time.sessions_s(
                    self.folder, self.metrics_table, until=self._clock.wall() if is_running else None
                ),
            )
            return msgspec.structs.replace(levels, problems=(*levels.problems, *filter(None, [problem])))


def model_name(config: Config) -> str:
    """Return the model in a few words: the name of its folder, or the architecture of a new one."""
    if config.model.path:
        return Path(config.model.path).name or config.model.path
    new = config.model.new
    return f"new {new.family}, {new.num_layers} layers × {new.hidden_size}" if new is not None else "new"


def _by_role(processes: dict[str, int] | dict[str, str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for process in processes:
        try:
            role = role_of(process).value
        except ValueError:
            continue
        counts[role] = counts.get(role, 0) + 1
    return counts


def _servers(config: Config | None, journal: JournalTail) -> int:
    if journal.scaled_to is not None:
        return journal.scaled_to
    return config.generation.servers if config is not None else 0


def turns_of(prompt: str, completion: str) -> list[Turn]:
    """Split an episode: a prompt in chat format into its messages, a completion at tool calls and observations.

    >>> [turn.kind for turn in turns_of("1+1=", "<tool>1+1</tool>⟨2⟩2")]
    ['text', 'tool_call', 'tool_output', 'text']
    """
    messages = [
        Turn(role=found["role"], kind="text", text=found["text"])
        for found in _CHAT.finditer(prompt)
        if found["text"]
    ]
    turns = messages or [Turn(role="prompt", kind="text", text=prompt)]
    place = 0
    for found in _PARTS.finditer(completion):
        if text := completion[place : found.start()]:
            turns.append(Turn(role="assistant", kind="text", text=text))
        if found["call"] is not None:
            turns.append(Turn(role="assistant", kind="tool_call", text=found["call"]))
        else:
            turns.append(Turn(role="tool", kind="tool_output", text=found["output"]))
        place = found.end()
    if (rest := completion[place:]) or place == 0:
        turns.append(Turn(role="assistant" if place else "completion", kind="text", text=rest))
    return turns
