"""A run that nothing happens to, the same run with everything happening to it, and how they compare.

undisturbed run  ─► what every step must leave
disturbed run(s) ─► faults one after another, the next only when the last is mended; some while another is mended
full restarts    ─► what the same loss costs without recovery: everything killed, resumed from the last checkpoint
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from kintsugi.config import Config
from kintsugi.control.journal import read_facts
from kintsugi.errors import DeadlineExceeded
from kintsugi.lab import soak_report as reports
from kintsugi.lab.accounts import Account, account_of, first_difference
from kintsugi.lab.disturbing import MEND_TIMEOUT_S, Disturbance, Incident
from kintsugi.lab.faults import Deck, Kind, Moment, Target
from kintsugi.lab.growth import Growth
from kintsugi.lab.running import MarkedRun
from kintsugi.lab.soak_report import MIN_HITS, FaultReport, Report, Totals
from kintsugi.lab.watching import Commit, Watch, detected_at
from kintsugi.runs import JOURNAL_FILE, read_faults
from kintsugi.runtime import SYSTEM_CLOCK, random_stream
from kintsugi.stages import stages

STEPS_PER_FAULT = 3
"""Mended by the next step or two, and then up to `checkpoint.every` more until the phase that is aimed at."""
STEPS_PER_COLD_FAULT = 7
"""While a server imports its libraries, the others go on."""
EXTRA_STEPS = 12
EXTRA_STEPS_AHEAD = 40
MOST_RUNS = 6
START_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 5.0
"""For one step, whatever happens to it; only bounds a run that is stuck."""
RESTARTS = (7, 13, 16)
"""Steps after which everything is killed: two, three and one after a save, as many as a fault at random loses."""

Say = Callable[[str], None]


class Soak:
    """One campaign in one folder. `run` gives the report; nothing is left running whatever happens."""

    def __init__(
        self,
        config: Config,
        *,
        folder: Path,
        num_faults: int,
        seed: int,
        cold: bool = False,
        targets: Collection[Target] = tuple(Target),
        moments: Collection[Moment] = tuple(Moment),
        kinds: Sequence[Kind] = tuple(Kind),
        num_restarts: int = len(RESTARTS),
        say: Say = lambda line: None,
    ) -> None:
        # An asynchronous run goes on while somebody is replaced.
        goes_on = cold or config.asynchrony.max_staleness > 0
        steps_per_fault = STEPS_PER_COLD_FAULT if goes_on else STEPS_PER_FAULT
        extra = EXTRA_STEPS_AHEAD if config.asynchrony.max_staleness > 0 else EXTRA_STEPS
        self._config = with_steps(config, steps=steps_per_fault * num_faults + extra)
        self._folder = folder
        self._num_faults = num_faults
        self._seed = seed
        self._cold = cold
        self._num_restarts = num_restarts
        self._say = say
        self._deck = Deck(random_stream(seed, "faults"), targets=targets, moments=moments, kinds=kinds)
        self._needs_coverage = num_faults >= MIN_HITS * len(targets) * len(moments)
        self._growth = Growth()
        self._faults: list[FaultReport] = []
        self._runs = 0
        self._incidents = 0
        self._missed = 0
        self._failures: list[str] = []
        self._broken: list[Account] = []
        """Of runs that failed: what they did before still has to be right."""
        self._processes_left = 0

    def run(self) -> Report:
        began = SYSTEM_CLOCK.monotonic()
        last_step = stages(self._config)[-1].last_step
        self._say(f"undisturbed: {last_step} steps")
        reference, commits = self._undisturbed()
        accounts: list[Account] = []
        wall_s = 0.0
        while not self._enough() and self._runs < MOST_RUNS:
            self._say(f"disturbed: {len(self._faults)} of {self._num_faults} faults so far")
            account, seconds = self._disturbed()
            if account is not None:
                accounts.append(account)
                wall_s += seconds
        self._say("full restarts")
        restarts = self._restarts() if self._num_restarts else []
        return Report(
            tuple(self._faults),
            self._totals(
                reference,
                accounts,
                commits=commits,
                disturbed_s=wall_s,
                restarts=restarts,
                wall_s=SYSTEM_CLOCK.monotonic() - began,
            ),
        )

    def _enough(self) -> bool:
        covered = not (self._needs_coverage and self._deck.uncovered(at_least=MIN_HITS))
        return len(self._faults) >= self._num_faults and covered

    # The runs.

    def _undisturbed(self) -> tuple[Account, list[Commit]]:
        run, watch = self._prepare("undisturbed")
        try:
            run.start()
            if (why := self._to_the_end(run, watch)) is not None:
                raise RuntimeError(f"the undisturbed run failed: {why}")
            return account_of(read_facts(run.run_dir / JOURNAL_FILE)), watch.commits
        finally:
            watch.close()
            run.close()

    def _disturbed(self) -> tuple[Account | None, float]:
        """One run with faults until there are enough, or its steps are used up; no account of one that failed."""
        self._runs += 1
        run, watch = self._prepare(f"disturbed-{self._runs}")
        disturbance = Disturbance(run, watch, deck=self._deck, growth=self._growth)
        incidents: list[Incident] = []
        why: str | None = None
        try:
            run.start()
            disturbance.until(lambda: watch.step > 0, what="the first step", timeout_s=START_TIMEOUT_S)
            while not self._full(incidents) and disturbance.has_room:
                incident = disturbance.strike(self._deck.draw())
                if incident is None:
                    self._missed += 1
                    continue
                incidents.append(incident)
                self._say(incident.line())
                if incident.recovered is None and run.running:
                    raise DeadlineExceeded(whom="the run", what="to be mended", waited_s=MEND_TIMEOUT_S)
            why = self._to_the_end(run, watch)
        except DeadlineExceeded as error:
            why = str(error)
        finally:
            watch.close()
            run.close()
        return self._settle(run, watch, incidents, why)

    def _full(self, incidents: list[Incident]) -> bool:
        struck = len(self._faults) + sum(len(incident.hits) for incident in incidents)
        return struck >= self._num_faults and not (
            self._needs_coverage and self._deck.uncovered(at_least=MIN_HITS)
        )

    def _settle(
        self, run: MarkedRun, watch: Watch, incidents: list[Incident], why: str | None
    ) -> tuple[Account | None, float]:
        account = account_of(read_facts(run.run_dir / JOURNAL_FILE))
        self._faults += [
            fault for incident in incidents for fault in self._fault_reports(incident, account, watch)
        ]
        unmended = [incident.line() for incident in incidents if incident.recovered is None]
        if why is None and unmended:
            self._failures += [f"{run.run_dir.name}: {line}" for line in unmended]
        if why is not None:
            after = f" after {incidents[-1].line()}" if incidents else ""
            self._failures.append(f"{run.run_dir.name}: {why}{after}")
            self._say(self._failures[-1])
            self._broken.append(account)
            return None, 0.0
        return account, watch.commits[-1].at - watch.commits[0].at

    def _restarts(self) -> list[float]:
        """Seconds from killing everything until the step after the last committed one is committed."""
        steps = RESTARTS[: self._num_restarts]
        run, watch = self._prepare("restarts", steps=steps[-1] + 8)
        seconds = []
        try:
            run.start()
            for step in steps:
                timeout_s = START_TIMEOUT_S + STEP_TIMEOUT_S * step
                watch.until(lambda step=step: watch.step >= step, what=f"step {step}", timeout_s=timeout_s)  # type: ignore[misc]
                reached, at = watch.step, SYSTEM_CLOCK.monotonic()
                run.kill_everything()
                run.start(resume=True)
                watch.until(
                    lambda reached=reached, at=at: _beyond(watch, reached, at) is not None,  # type: ignore[misc]
                    what=f"step {reached + 1} after a full restart",
                    timeout_s=timeout_s,
                )
                beyond = _beyond(watch, reached, at)
                assert beyond is not None
                seconds.append(beyond.at - at)
                self._say(f"full restart after step {reached}: {seconds[-1]:.1f} s")
        except DeadlineExceeded as error:
            self._failures.append(f"full restart: {error}: {run.last_words()}")
        finally:
            watch.close()
            run.close()
        return seconds

    def _prepare(self, name: str, *, steps: int | None = None) -> tuple[MarkedRun, Watch]:
        config = self._config if steps is None else with_steps(self._config, steps=steps)
        run = MarkedRun(config, run_dir=self._folder / name, cold=self._cold)
        return run, Watch(run.run_dir)

    def _to_the_end(self, run: MarkedRun, watch: Watch) -> str | None:
        """Follow a run to its end; None when it ended well, else why not."""
        since = SYSTEM_CLOCK.wall()
        remaining = stages(self._config)[-1].last_step - watch.step
        watch.until(
            lambda: not run.running,
            what="the end of the run",
            timeout_s=START_TIMEOUT_S + STEP_TIMEOUT_S * remaining,
            pause_s=0.05,
        )
        self._processes_left += len(run.pids())
        watch.look(at_once=True)
        code = run.exit_code()
        if code == 0:
            return None
        faults = "; ".join(f"{f.process}: {f.message}" for f in read_faults(run.run_dir, since=since - 60))
        return f"it ended with code {code}: {faults or run.last_words()[-300:]}"

    # The figures.

    def _fault_reports(self, incident: Incident, account: Account, watch: Watch) -> list[FaultReport]:
        self._incidents += 1
        first, last = incident.hits[0], incident.hits[-1]
        next_step = watch.committed_after(last.at)
        upper = incident.recovered.step if incident.recovered else first.step
        struck = {process for hit in incident.hits for process in hit.processes}
        timing = next(
            (
                known.timing
                for known in reversed(account.incidents)
                if first.step <= known.step < max(upper, first.step + 1) and known.processes & struck
            ),
            {},
        )
        lost = sum(
            max(0, rollback.step - rollback.to)
            for rollback in account.rollbacks
            if first.step <= rollback.step <= upper
        )
        made = []
        for hit in incident.hits:
            told = [detected_at(watch.records, process=p, after=hit.at) for p in hit.processes]
            detected = min((at for at in told if at is not None), default=None)
            detected_ms = None if detected is None else (detected - hit.at) * 1000
            split = {part: seconds * 1000 for part, seconds in timing.items()}
            made.append(
                FaultReport(
                    incident=self._incidents,
                    role=hit.aim.target.value,
                    kind=hit.aim.kind.value,
                    phase=hit.phase,
                    processes=tuple(hit.processes),
                    step=hit.step,
                    detected_ms=detected_ms,
                    recovered_ms=(incident.recovered.at - last.at) * 1000 if incident.recovered else None,
                    next_step_ms=(next_step.at - last.at) * 1000 if next_step else None,
                    steps_lost=lost,
                    healthy_pids_unchanged=incident.healthy_unchanged,
                    split=split if detected_ms is None else {"detect": detected_ms, **split},
                )
            )
        return made

    def _totals(
        self,
        reference: Account,
        accounts: list[Account],
        *,
        commits: list[Commit],
        disturbed_s: float,
        restarts: list[float],
        wall_s: float,
    ) -> Totals:
        undisturbed_s = commits[-1].at - commits[0].at
        whole = [first_difference(reference, account) for account in accounts]
        parts = [first_difference(reference, part, as_far_as_both_came=True) for part in self._broken]
        different = [step for step in (*whole, *parts) if step is not None]
        states = [record.state for record in reference.steps.values()]
        return Totals(
            weights_sha256=", ".join(sorted({account.weights_sha256 for account in accounts})),
            weights_sha256_undisturbed=reference.weights_sha256,
            steps=len(reference.steps),
            runs=self._runs,
            step_hashes_equal=not different,
            first_different_step=min(different, default=None),
            states_distinct=len(set(states)) == len(states),
            max_staleness=self._config.asynchrony.max_staleness,
            staleness_max=max((account.staleness_max for account in accounts), default=0),
            reward=min((account.last_reward for account in accounts), default=None),
            reward_undisturbed=reference.last_reward,
            samples_trained=reference.samples_issued * len(accounts),
            samples_lost=sum(account.samples_lost for account in accounts),
            samples_duplicated=sum(account.samples_duplicated for account in accounts),
            processes_left=self._processes_left,
            fd_growth=self._growth.fd_growth,
            rss_growth_mb=self._growth.rss_growth_mb,
            num_processes=self._growth.num_processes,
            growth=self._growth.by_process,
            ettr=undisturbed_s * len(accounts) / disturbed_s if disturbed_s else 0.0,
            step_s=statistics.median(after.at - before.at for before, after in pairwise(commits)),
            wall_s=wall_s,
            detected=reports.detection(self._faults),
            recovered=reports.recovery(self._faults),
            coverage=self._deck.coverage,
            uncovered=tuple(self._deck.uncovered(at_least=MIN_HITS)),
            missed=self._missed,
            full_restart=reports.full_restart(restarts, self._faults),
            failures=tuple(self._failures),
            cold=self._cold,
            seed=self._seed,
        )


def with_steps(config: Config, *, steps: int) -> Config:
    """The same run, so many steps long."""
    replace = msgspec.structs.replace
    return replace(config, algorithm=replace(config.algorithm, steps=steps))


def _beyond(watch: Watch, step: int, moment: float) -> Commit | None:
    return next((commit for commit in watch.commits if commit.at > moment and commit.step > step), None)
