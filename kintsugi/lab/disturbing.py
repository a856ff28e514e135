"""One fault after another on a living run: waits for a phase, strikes, follows the run until it is whole again."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import msgspec

from kintsugi.errors import DeadlineExceeded
from kintsugi.lab.faults import Aim, Deck, Kind, Moment, Target
from kintsugi.lab.growth import Growth
from kintsugi.lab.running import MarkedRun
from kintsugi.lab.striking import Hit, Striker
from kintsugi.lab.watching import Commit, Watch
from kintsugi.stages import stages

AIM_STEPS = 7
"""How many steps an aim may wait for its phase, which may come only every few steps, or pass too quickly."""
AIM_TIMEOUT_S = 60.0
MEND_TIMEOUT_S = 30.0
RESERVE_STEPS = 8
"""Left at the end of a run, so that the last fault is mended before it."""
RESERVE_STEPS_AHEAD = 40
"""An asynchronous run goes on while somebody is replaced, and its steps are short."""
FIRST_BLOWS = (Moment.COLLECTING, Moment.TRAINING)
"""When to kill the rank whose recovery the next fault disturbs."""


class Incident(msgspec.Struct, frozen=True):
    """Faults that overlap, and what became of them."""

    hits: tuple[Hit, ...]
    recovered: Commit | None
    """The first step that was committed with every process back; None if that never came."""
    healthy_unchanged: bool

    def line(self) -> str:
        """`kill server-1 while publishing: whole again after 0.43 s`."""
        struck = ", then ".join(
            f"{hit.aim.kind.value} {'host of ' if hit.aim.target is Target.HOST else ''}{next(iter(hit.processes))} "
            f"while {hit.phase} (step {hit.step + 1})"
            for hit in self.hits
        )
        if self.recovered is None:
            return f"{struck}: not mended"
        changed = "" if self.healthy_unchanged else "; a healthy process changed"
        return f"{struck}: mended after {self.recovered.at - self.hits[-1].at:.2f} s{changed}"


class Disturbance:
    """Everything that is done to one run."""

    def __init__(self, run: MarkedRun, watch: Watch, *, deck: Deck, growth: Growth) -> None:
        self._run = run
        self._watch = watch
        self._deck = deck
        self._growth = growth
        self._striker = Striker(run, watch, deck)
        self._last_step = stages(run.config)[-1].last_step

    @property
    def has_room(self) -> bool:
        """Whether there are steps left for another fault."""
        is_ahead = self._run.config.asynchrony.max_staleness > 0
        reserve = RESERVE_STEPS_AHEAD if is_ahead else RESERVE_STEPS
        return self._run.running and self._watch.step < self._last_step - reserve

    def until(self, condition: Callable[[], bool], *, what: str, timeout_s: float) -> None:
        """Follow the run until the condition holds or the run has ended; DeadlineExceeded if neither comes in time."""
        launcher = self._run.launcher
        assert launcher is not None

        def holds() -> bool:
            staff = {process: presence.pid for process, presence in self._watch.staff.items()}
            self._growth.sample({"launcher": launcher.pid, **staff})
            return condition() or not self._run.running

        self._watch.until(holds, what=what, timeout_s=timeout_s)

    def strike(self, aim: Aim) -> Incident | None:
        """Carry out one aim and wait until it is mended; None when it hit nothing."""
        before = {process: presence.pid for process, presence in self._watch.staff.items()}
        hits: list[Hit] = []
        if aim.moment is Moment.RECOVERING:
            first = Aim(Target.MODEL, Kind.KILL, FIRST_BLOWS[self._deck.fraction() < 0.5])
            if (hit := self._hit(first)) is None:
                return None
            hits.append(hit)
        if (hit := self._hit(aim)) is not None:
            hits.append(hit)
        else:
            self._deck.missed(aim)
        return self._mended(hits, before=before) if hits else None

    def _hit(self, aim: Aim) -> Hit | None:
        """Wait for the phase, and for a moment inside it, then strike; again and again until the aim is given up."""
        watch = self._watch
        # A recovery is over with the next step; there will be another one only after another fault.
        last = watch.step if aim.moment is Moment.RECOVERING else watch.step + AIM_STEPS
        while watch.step <= last and self._run.running:
            try:
                self.until(
                    lambda: watch.phase == aim.moment.value or watch.step > last,
                    what=f"the phase {aim.moment.value}",
                    timeout_s=AIM_TIMEOUT_S,
                )
                self._into_the_phase(aim.moment)
            except DeadlineExceeded:
                return None
            hit = self._striker.strike(aim, self._striker.choose(aim)) if watch.phase == aim.moment else None
            if hit is not None:
                self._deck.hit(hit.aim.target, hit.phase)
                return hit
            if aim.moment is Moment.RECOVERING:
                return None
            self._leave(aim.moment)
        return None

    def _into_the_phase(self, moment: Moment) -> None:
        """Let a part of the phase pass, as long as it is usually there for."""
        watch = self._watch
        lengths = watch.lengths_s(moment.value)[-20:]
        if not lengths or (length_s := statistics.median(lengths)) < 0.02:
            return
        until_s = self._deck.fraction() * 0.8 * length_s
        try:
            self.until(lambda: watch.phase != moment.value, what="a moment in the phase", timeout_s=until_s)
        except DeadlineExceeded:
            return

    def _leave(self, moment: Moment) -> None:
        """Do not strike twice in the same phase of the same step."""
        if self._watch.phase == moment.value:
            self.until(
                lambda: self._watch.phase != moment.value,
                what=f"the end of {moment.value}",
                timeout_s=MEND_TIMEOUT_S,
            )

    def _mended(self, hits: list[Hit], *, before: dict[str, int]) -> Incident:
        """Until everybody who was hit has a successor and a step is committed since."""
        watch, struck = self._watch, {process: pid for hit in hits for process, pid in hit.processes.items()}

        def whole() -> Commit | None:
            now = {process: watch.staff[process] for process in struck if process in watch.staff}
            if any(presence.pid == struck[process] for process, presence in now.items()):
                return None
            return watch.committed_after(max([hits[-1].at, *(presence.at for presence in now.values())]))

        try:
            self.until(
                lambda: whole() is not None,
                what=f"{', '.join(struck)} to be mended",
                timeout_s=MEND_TIMEOUT_S,
            )
        except DeadlineExceeded:
            pass
        recovered = whole()
        healthy = {process: pid for process, pid in before.items() if process not in struck}
        unchanged = all(
            watch.staff[process].pid == pid and self._run.is_ours(pid) for process, pid in healthy.items()
        )
        return Incident(tuple(hits), recovered, unchanged)
