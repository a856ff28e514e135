from __future__ import annotations

import os

import pytest

from kintsugi.errors import UserError
from kintsugi.lab import probing
from kintsugi.lab.faults.catalogue import MECHANISMS
from kintsugi.lab.injector.injection import Ability, Injection


def test_every_ability_has_a_mechanism_and_every_name_is_its_own() -> None:
    assert set(MECHANISMS) == set(Ability)
    for mechanisms in MECHANISMS.values():
        assert len({mechanism.name for mechanism in mechanisms}) == len(mechanisms) > 0


def test_without_what_it_needs_an_ability_is_refused_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(probing, "_found", {})
    with pytest.raises(UserError, match=r"network_delay can not be done on this machine: .*expected root"):
        probing.choose(Injection(ability=Ability.NETWORK_DELAY, target="model-0"))
    # What a process may do to another of the same user needs no root.
    assert probing.choose(Injection(ability=Ability.CPU, target="model-0")).name.startswith("busy loops")
    assert probing.choose(Injection(ability=Ability.KILL, target="model-0")).name == "SIGKILL"
    missing = {each.mechanism: each.missing for each in probing.abilities()}
    assert missing["SIGSTOP"] is None
    assert "expected root" in str(missing["growing neighbour in a memory control group"])


def test_a_mechanism_that_does_all_that_is_asked_is_preferred() -> None:
    plain = probing.choose(Injection(ability=Ability.DISK_LOAD, target="model-0"))
    limited = Injection(ability=Ability.DISK_LOAD, target="model-0", amount={"limit": 1e6})
    with_room = Injection(ability=Ability.MEMORY, target="model-0", amount={"room": 1e6})
    assert plain.name == "competing writes, synced"
    assert MECHANISMS[Ability.DISK_LOAD][1].ignored(limited) == ()
    assert probing.choose(with_room).name == "limit of its data"


def test_what_no_mechanism_would_do_is_refused_by_its_word() -> None:
    both = {"limit": 1e8, "room": 1e6}
    with pytest.raises(UserError, match=r"limit of its data: does not know amount\.limit; expected .* room"):
        probing.choose(Injection(ability=Ability.MEMORY, target="model-0", amount=both))
    with pytest.raises(UserError, match=r"SIGKILL: does not know ramp_s"):
        probing.choose(Injection(ability=Ability.KILL, target="model-0", ramp_s=1.0))


def test_a_mechanism_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UserError, match="none named 'magic'; expected 'SIGKILL'"):
        probing.choose(Injection(ability=Ability.KILL, target="model-0", mechanism="magic"))
