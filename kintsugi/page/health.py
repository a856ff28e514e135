"""Hosts and processes of a run, now or at its end: state, load, memory, restarts, declared waits, last words."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kintsugi.diagnosis.evidence import awaited_processes
from kintsugi.page.journal_tail import JournalTail
from kintsugi.page.line_files import last_lines
from kintsugi.page.schema import Health, HostHealth, ProcessHealth, WaitArrow
from kintsugi.page.timeline import processes_of
from kintsugi.run_folder.layout import RELATIVE, RunFolder
from kintsugi.telemetry.events import Span, Transition, records_in
from kintsugi.telemetry.format import format_event
from kintsugi.telemetry.process_reports import ProcessReport, ProcessReports, read_processes
from kintsugi.telemetry.readings import HeartbeatReading, HostReading, ProcessReading, samples_in
from kintsugi.types import Role, role_of

LAST_SIZE = 64 << 10
LONGEST_WORDS = 400
UNKNOWN_HOST = "unknown host"


class _Measured:
    """Last readings of the agents: memory of processes, load of hosts."""

    def __init__(self, run_dir: Path) -> None:
        self.memory: dict[str, float] = {}
        self.hosts: dict[str, tuple[float | None, float | None, float | None]] = {}
        for path in RunFolder(run_dir).readings_folder.glob(f"{Role.AGENT.value}-*.jsonl"):
            if "." not in path.stem:
                self._read(path)

    def _read(self, path: Path) -> None:
        busy: dict[str, tuple[float, float]] = {}
        for record in samples_in(last_lines(path, size=4 * LAST_SIZE)):
            match record.sample:
                case ProcessReading(of=process, values=values):
                    if "rss_bytes" in values:
                        self.memory[process] = values["rss_bytes"]
                case HostReading(host=host, values=values):
                    now, total = record.stamp.time, values.get("cpu_busy_s", 0.0)
                    before = busy.get(host)
                    share = self.hosts.get(host, (None, None, None))[0]
                    if before is not None and now > before[0]:
                        count = max(1.0, values.get("cpu_count", 1.0))
                        share = min(1.0, max(0.0, (total - before[1]) / (now - before[0]) / count))
                    busy[host] = (now, total)
                    whole, free = values.get("memory_total_bytes"), values.get("memory_available_bytes")
                    used = None if whole is None or free is None else whole - free
                    self.hosts[host] = (share, used, whole)
                case _:
                    pass


def health(run_dir: Path, journal: JournalTail, *, is_running: bool, version: int | None) -> Health:
    """Return the last known health of a run."""
    reports = read_processes(run_dir)
    measured = _Measured(run_dir)
    known = {report.process: report for report in reports.processes} if reports is not None else {}
    names = [
        *known,
        *(name for name in processes_of(run_dir) if name not in known and _counts(name, journal)),
    ]
    hosts: dict[str, list[ProcessHealth]] = {}
    for name in names:
        report = known.get(name)
        host = (report.host if report else "") or journal.hosts.get(name, "") or UNKNOWN_HOST
        hosts.setdefault(host, []).append(
            _process(
                run_dir,
                name,
                report,
                journal=journal,
                measured=measured,
                is_running=is_running,
                version=version,
            )
        )
    return Health(
        time=reports.time if reports is not None else None,
        running=is_running,
        phase=reports.phase if reports is not None else "",
        recovery=reports.recovery if reports is not None else "",
        hosts=tuple(_host(name, hosts[name], measured) for name in sorted(hosts)),
        waits=tuple(waits(run_dir, reports)) if is_running and reports is not None else (),
    )


def _counts(name: str, journal: JournalTail) -> bool:
    """Return whether a process that the master does not report is one of the run: it registered once."""
    return name in journal.hosts or name.startswith((Role.MASTER.value, Role.LAUNCHER.value))


def _host(name: str, processes: list[ProcessHealth], measured: _Measured) -> HostHealth:
    cpu, used, total = measured.hosts.get(name, (None, None, None))
    return HostHealth(name=name, cpu=cpu, memory_used=used, memory_total=total, processes=tuple(processes))


def _process(
    run_dir: Path,
    name: str,
    report: ProcessReport | None,
    *,
    journal: JournalTail,
    measured: _Measured,
    is_running: bool,
    version: int | None,
) -> ProcessHealth:
    words, line = last_words(run_dir, name)
    state = (report.status if report is not None else "lost") if is_running else "ended"
    counters: dict[str, float] = {}
    if report is not None:
        counters = {**report.gauges, **report.counters}
    peak = counters.get("peak_rss_bytes")
    return ProcessHealth(
        process=name,
        role=_role(name),
        pid=report.pid if report is not None else 0,
        state=state,
        load=report.load if report is not None else 0.0,
        memory=measured.memory.get(name, peak),
        version=version if name.startswith((Role.SERVER.value, Role.MODEL.value)) else None,
        restarts=journal.restarts.get(name, 0),
        silent_s=report.silent_s if report is not None else None,
        last_words=words,
        last_words_line=line,
        waits_for=_waits_for(report) if is_running else (),
        counters=counters,
    )


def _role(process: str) -> str:
    try:
        return role_of(process).value
    except ValueError:
        return ""


def _waits_for(report: ProcessReport | None) -> tuple[str, ...]:
    """Return the declared waits for other processes: `rollout-0: RunEpisodes`."""
    declared = report.waits if report is not None else ()
    return tuple(
        f"{', '.join(awaited)}: {wait.what}" for wait in declared if (awaited := awaited_processes(wait))
    )


def last_words(run_dir: Path, process: str) -> tuple[str, str]:
    """Return the last line that a process printed, or its last event, and the place of either."""
    run = RunFolder(run_dir)
    for path, relative in (
        (run.log_file(process), RELATIVE.log_file(process)),
        (run.events_file(process), RELATIVE.events_file(process)),
    ):
        lines = [line for line in last_lines(path, size=LAST_SIZE) if line.strip()]
        if path.suffix == ".log" and lines:
            return lines[-1].decode(errors="replace")[:LONGEST_WORDS], str(relative)
        events = [record.event for record in records_in(lines)]
        spoken = [event for event in events if not isinstance(event, Span | Transition)] or events
        if spoken:
            return format_event(spoken[-1])[:LONGEST_WORDS], str(relative)
    return "", ""


def waits(run_dir: Path, reports: ProcessReports) -> list[WaitArrow]:
    """Return the declared waits between processes, the longest of each pair."""
    clocks = _monotonic_clocks(run_dir, [report.process for report in reports.processes])
    longest: dict[tuple[str, str], WaitArrow] = {}
    for report in reports.processes:
        now = clocks.get(report.process)
        for wait in report.waits:
            seconds = max(0.0, now - wait.since) if now is not None else 0.0
            for awaited in awaited_processes(wait):
                key = (report.process, awaited)
                if awaited != report.process and (key not in longest or seconds > longest[key].since_s):
                    longest[key] = WaitArrow(
                        waiter=report.process, waited_for=awaited, what=wait.what, since_s=round(seconds, 3)
                    )
    return list(longest.values())


def _monotonic_clocks(run_dir: Path, processes: list[str]) -> Mapping[str, float]:
    """Return the monotonic clock of each process at its last heartbeat."""
    found: dict[str, float] = {}
    for process in processes:
        lines = reversed(last_lines(RunFolder(run_dir).readings_file(process), size=16 << 10))
        beat = next((each for each in samples_in(lines) if isinstance(each.sample, HeartbeatReading)), None)
        if beat is not None:
            found[process] = beat.stamp.monotonic
    return found
