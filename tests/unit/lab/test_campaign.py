"""A campaign on a cluster that is none: what it says and does is made up, what is counted is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kintsugi.config.recipe import load
from kintsugi.config.schema import Config
from kintsugi.diagnosis.verdict import Cause, Diagnosis, FaultKind, Hop
from kintsugi.errors import StorageError
from kintsugi.lab.campaign import campaign
from kintsugi.lab.campaign.blind import Look
from kintsugi.lab.campaign.campaign import Campaign, CampaignCluster, CampaignPace
from kintsugi.lab.campaign.cases import Benign, CampaignCase, CaseClass
from kintsugi.lab.campaign.records import CampaignFile, CountedAs, ExclusionReason
from kintsugi.lab.injector.injection import Ability, Injected, Injection
from kintsugi.lab.scenarios.experiments import TestbedSpec, experiments_folder
from kintsugi.runtime.clock import SYSTEM_CLOCK
from tests.unit.lab.test_outcome import injected

CONFIG = load(experiments_folder() / "workloads" / "campaign.yaml").config


def cause(process: str, kind: FaultKind) -> Cause:
    return Cause(
        process=process,
        host="",
        kind=kind,
        onset=SYSTEM_CLOCK.wall(),
        confidence=0.9,
        summary="",
        path=(Hop(process, "", 0.0), Hop("master-0", "", 0.0)),
        evidence=(),
    )


class Run:
    running = True
    config = CONFIG

    def host_of(self) -> dict[str, str]:
        return {"model-1": "host-1"}

    @property
    def run(self) -> Run:
        return self


class Watch:
    """Sees what it is given."""

    def __init__(self) -> None:
        self.step = 0
        self.begun: list[tuple[float, str]] = []

    def num_times(self, phase: str) -> int:
        return sum(name == phase for _, name in self.begun)


class Fake:
    """Stand-in for a cluster; time does not pass in it."""

    says: tuple[Cause, ...] = ()
    """To every look of a case."""
    alarm: tuple[Cause, ...] = ()
    """Between cases."""
    goes_on = True
    """A step between two looks."""
    fails_to_undo = False
    made: ClassVar[list[Fake]] = []

    def __init__(self, config: Config, *, places: TestbedSpec, folder: Path) -> None:
        self.run_dir = folder / "run"
        (self.run_dir / "logs").mkdir(parents=True)
        self.system, self.watch = Run(), Watch()
        self.crashes: list[str] = []
        self.waited_s: list[float] = []
        self.is_between = True
        self.ended: list[Injected] = []
        self.made.append(self)

    def injector(self, number: int) -> Fake:
        return self

    def begin(self, injection: Injection) -> Injected:
        self.is_between = False
        return injected(injection.ability, target=injection.target, start=SYSTEM_CLOCK.wall() - 0.5)

    def end(self, done: Injected) -> None:
        self.ended.append(done)
        if self.fails_to_undo:
            raise StorageError("the rule is still there")

    def looks(self) -> list[Look]:
        now = SYSTEM_CLOCK.wall()
        self.watch.step += self.goes_on
        causes = self.alarm if self.is_between else self.says
        return [Look(now, Diagnosis(run="run", at=now, since=0.0, causes=causes))]

    def until(self, condition: Callable[[], bool], *, timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        return any(condition() for _ in range(10))

    until_healthy = CampaignCluster.until_healthy
    pace = CampaignPace.of(0.3)

    def close(self) -> None:
        pass


CPU = CampaignCase(
    number=1, what=CaseClass.FAULT, injections=(Injection(ability=Ability.CPU, target="model-1"),)
)


@pytest.fixture
def carried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CampaignFile]:
    def carry_out(
        *cases: CampaignCase, of: type[Fake] = Fake, is_felt: bool = True, **behaviour: Any
    ) -> CampaignFile:
        monkeypatch.setattr(campaign, "CampaignCluster", type("Chosen", (of,), {"made": [], **behaviour}))
        monkeypatch.setattr(campaign, "effect_of", lambda *_, **__: {"real": is_felt})
        return Campaign(CONFIG, places=TestbedSpec(), folder=tmp_path, seed=1).run(cases)

    return carry_out


def test_a_wrong_answer_to_a_fault_that_changed_nothing_is_not_lost(
    carried_out: Callable[..., CampaignFile],
) -> None:
    result = carried_out(CPU, is_felt=False, says=(cause("server-0", FaultKind.DNS),))
    assert result.cases[0].counted is CountedAs.FAINT
    assert result.table["ours"].misdiagnosed == 1.0


def test_what_goes_wrong_after_the_answer_does_not_take_the_case_out_of_the_count(
    carried_out: Callable[..., CampaignFile],
) -> None:
    result = carried_out(CPU, says=(cause("server-0", FaultKind.DNS),), fails_to_undo=True)
    (case,) = result.cases
    assert case.counted is CountedAs.FAULT and "the rule is still there" in case.trouble
    assert result.table["ours"].misdiagnosed == 1.0
    assert [each.reason for each in result.unwell] == [ExclusionReason.NOT_UNDONE]


def test_a_case_counts_whose_run_can_not_be_read_any_more_once_it_is_answered(
    carried_out: Callable[..., CampaignFile],
) -> None:
    class Unreadable(Fake):
        def until(self, condition: Callable[[], bool], *, timeout_s: float) -> bool:
            if timeout_s < 6.0:
                raise StorageError("events can not be read")
            return super().until(condition, timeout_s=timeout_s)

    (case,) = carried_out(CPU, of=Unreadable, says=(cause("server-0", FaultKind.DNS),)).cases
    assert case.counted is CountedAs.FAULT and "can not be read" in case.trouble


def test_of_two_faults_the_second_is_undone_where_the_first_can_not_be(
    carried_out: Callable[..., CampaignFile],
) -> None:
    made: list[Fake] = []
    carried_out(
        CampaignCase(number=1, what=CaseClass.TWO, injections=CPU.injections * 2),
        fails_to_undo=True,
        made=made,
    )
    assert len(made[0].ended) == 2


def test_a_fault_that_is_named_at_once_lasts_long_enough_for_those_who_read_logs(
    carried_out: Callable[..., CampaignFile],
) -> None:
    made: list[Fake] = []
    carried_out(CPU, says=(cause("model-1", FaultKind.CPU),), made=made)
    assert made[0].waited_s[-1] == pytest.approx(6.0 - 0.5, abs=0.2)


def test_errors_that_stood_in_a_log_before_the_case_are_nobodys_answer(
    carried_out: Callable[..., CampaignFile],
) -> None:
    class Failed(Fake):
        def __init__(self, config: Config, *, places: TestbedSpec, folder: Path) -> None:
            super().__init__(config, places=places, folder=folder)
            self._log = self.run_dir / "logs" / "master-0.log"
            self._log.write_text("OSError: No space left on device\n")

        def begin(self, injection: Injection) -> Injected:
            begun = super().begin(injection)
            with self._log.open("a") as log:
                log.write("a line of its successor\n")
            return begun

    result = carried_out(CPU, of=Failed)
    assert result.cases[0].diagnoses["last_error"].causes == ()


@pytest.mark.parametrize("what", [Benign.EVALUATION, Benign.CHECKPOINT])
def test_a_benign_case_that_never_happened_does_not_count(
    what: Benign, carried_out: Callable[..., CampaignFile]
) -> None:
    result = carried_out(CampaignCase(number=1, what=CaseClass.BENIGN, benign=what))
    assert result.cases[0].counted is CountedAs.NOT
    assert "phase" in result.cases[0].why_not


def test_a_phase_that_is_over_between_two_looks_has_happened(
    carried_out: Callable[..., CampaignFile],
) -> None:
    def until(self: Fake, condition: Callable[[], bool], *, timeout_s: float) -> bool:
        self.watch.begun += [(1.0, "saving"), (1.1, "collecting")]
        return any(condition() for _ in range(10))

    result = carried_out(CampaignCase(number=1, what=CaseClass.BENIGN, benign=Benign.CHECKPOINT), until=until)
    assert result.cases[0].counted is CountedAs.QUIET


def test_a_diagnosis_that_names_something_while_steps_are_committed_is_a_false_alarm(
    carried_out: Callable[..., CampaignFile],
) -> None:
    result = carried_out(CPU, alarm=(cause("agent-1", FaultKind.DISK_SLOW),))
    assert [(each.reason, each.said) for each in result.unwell] == [
        (ExclusionReason.ALARM, ("disk_slow agent-1",))
    ]


def test_a_cluster_that_stands_still_is_no_false_alarm(carried_out: Callable[..., CampaignFile]) -> None:
    result = carried_out(CPU, alarm=(cause("agent-1", FaultKind.DISK_SLOW),), goes_on=False)
    assert [each.reason for each in result.unwell] == [ExclusionReason.NO_STEPS]
    assert result.false_alarms == []


def test_slow_steps_give_a_diagnosis_more_time_and_fast_ones_do_not_take_any_away() -> None:
    assert CampaignPace.of(0.3) == CampaignPace.of(0.0)
    slow = CampaignPace.of(6.0)
    assert slow.window_s == 24.0 and slow.healthy_timeout_s == 90.0 and slow.healthy_steps == 1
    assert CampaignPace.of(100.0).window_s == 60.0
