"""What does not fit is refused before anything starts, with what would fit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kintsugi.cli import capacity
from kintsugi.config.schema import (
    ActorSection,
    CheckpointSection,
    ClusterSection,
    Config,
    GenerationSection,
    ModelSection,
    NewModel,
)
from kintsugi.config.stages import num_processes
from kintsugi.control.placement import plan_layout
from kintsugi.errors import UserError
from kintsugi.model.memory import DeviceReading
from kintsugi.run_folder.layout import RunFolder

GB = 10**9
LARGE = NewModel(
    hidden_size=2048, intermediate_size=8192, num_layers=24, num_heads=16, num_kv_heads=16, max_positions=4096
)
"""About 1.6 billion parameters."""


def config(**actor: object) -> Config:
    return Config(
        name="a",
        model=ModelSection(new=LARGE),
        actor=ActorSection(**{"workers": 1, "dtype": "bfloat16", **actor}),  # type: ignore[arg-type]
        generation=GenerationSection(servers=1, max_length=512),
        checkpoint=CheckpointSection(every=10, keep=2),
    )


def card(total: int, *, free: int | None = None) -> DeviceReading:
    return DeviceReading("uuid-0", "A Card", total * GB, (total if free is None else free) * GB)


Cards = Callable[..., None]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    """Set the cards of this machine, for each reading one list; the last stays."""

    monkeypatch.setattr(capacity, "usable_memory_bytes", lambda: 256 * GB)
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: 250 * GB)
    monkeypatch.setattr(capacity, "swap_bytes", lambda: 0)

    def install(*readings: list[DeviceReading]) -> None:
        left = list(readings)
        monkeypatch.setattr(
            capacity, "read_devices", lambda: tuple(left.pop(0) if len(left) > 1 else left[0])
        )

    monkeypatch.setattr(capacity, "FREED_S", 0.2)
    monkeypatch.setattr(capacity, "POLL_S", 0.01)
    return install


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def install(free: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=int(free * GB)))

    install(1000)
    return install


@pytest.mark.usefixtures("disk")
def test_a_card_that_is_too_small_is_refused_with_what_would_fit(cards: Cards) -> None:
    cards([card(60)])
    with pytest.raises(UserError) as error:
        capacity.check_devices(config())
    message = str(error.value)
    for part in (
        "device 0 (A Card)",
        "model-0",
        "server-0",
        "state 19.",
        "activations",
        "60.0 GB free of 60.0 GB",
    ):
        assert part in message
    assert "`actor.recompute=true`" in message and "`actor.micro_batch_tokens=" in message
    capacity.check_devices(config(recompute=True))


@pytest.mark.usefixtures("disk")
def test_where_no_setting_helps_the_message_says_so(cards: Cards) -> None:
    cards([card(16)])
    with pytest.raises(UserError, match=r"No setting makes it fit: 1\.\d\d billion trained parameters"):
        capacity.check_devices(config())


@pytest.mark.usefixtures("disk")
def test_a_card_that_is_nearly_full_is_refused_before_the_start(cards: Cards, tmp_path: Path) -> None:
    cards([card(140, free=20)])
    capacity.check_devices(config())
    with pytest.raises(UserError, match=r"expected .* GB for model-0 .*; got 20.0 GB free of 140.0 GB"):
        capacity.check_start(config(), run_dir=tmp_path, resume=False)
    assert not RunFolder(tmp_path).devices_file.exists()


@pytest.mark.usefixtures("disk")
def test_memory_of_a_run_that_was_just_killed_is_waited_for(
    cards: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "FREED_S", 60.0)  # It ends at the first reading with room.
    full, free = [card(140, free=20)], [card(140, free=138)]
    cards(full, full, full, full, free)
    assert capacity.check_start(config(), run_dir=tmp_path, resume=True) == []
    written = msgspec.json.decode(RunFolder(tmp_path).devices_file.read_bytes(), type=list[DeviceReading])
    assert [each.used_bytes for each in written] == [2 * GB]


@pytest.mark.usefixtures("disk")
@pytest.mark.parametrize("readings", [[], [card(200)]])
def test_a_model_that_the_memory_of_the_host_can_not_hold_is_refused_before_the_start(
    cards: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readings: list[DeviceReading]
) -> None:
    cards(readings)
    monkeypatch.setattr(capacity, "usable_memory_bytes", lambda: 24 * GB)
    with pytest.raises(UserError) as error:
        capacity.check_start(config(), run_dir=tmp_path, resume=False)
    message = str(error.value)
    for part in (
        "this host: expected",
        "model-0",
        "server-0",
        "snapshots 3",
        "got 24.0 GB. No setting makes",
    ):
        assert part in message
    monkeypatch.setattr(capacity, "swap_bytes", lambda: 200 * GB)
    assert capacity.check_start(config(), run_dir=tmp_path, resume=False) == []


@pytest.mark.usefixtures("disk")
def test_a_host_whose_memory_others_use_is_a_warning(
    cards: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards([])
    monkeypatch.setattr(capacity, "available_memory_bytes", lambda: 30 * GB)
    (warning,) = capacity.check_start(config(), run_dir=tmp_path, resume=False)
    assert "30.0 GB of memory available" in warning and "the system may kill" in warning


@pytest.mark.usefixtures("disk")
def test_settings_with_which_a_model_fits_the_host_are_named(
    cards: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards([])
    monkeypatch.setattr(capacity, "usable_memory_bytes", lambda: 230 * GB)
    with pytest.raises(UserError, match=r"It would fit with .*`actor\.layout\.shards=2"):
        capacity.check_start(config(workers=4), run_dir=tmp_path, resume=False)


def test_a_disk_without_room_for_one_checkpoint_is_refused(
    cards: Cards, disk: Callable[[float], None], tmp_path: Path
) -> None:
    cards([])
    disk(10)
    with pytest.raises(UserError, match=r"expected 2\d\.\d GB of free disk space for one checkpoint"):
        capacity.check_start(config(), run_dir=tmp_path, resume=False)


def test_a_disk_without_room_for_all_kept_checkpoints_is_a_warning(
    cards: Cards, disk: Callable[[float], None], tmp_path: Path
) -> None:
    cards([])
    disk(50)
    (warning,) = capacity.check_start(config(), run_dir=tmp_path, resume=False)
    assert "3 checkpoints take" in warning and "50.0 GB" in warning
    assert capacity.check_start(config(), run_dir=tmp_path, resume=True) == []


@pytest.mark.usefixtures("disk")
def test_the_table_names_host_and_device_of_each_role_and_every_card(cards: Cards) -> None:
    cards([card(140)])
    text = "\n".join(capacity.memory_lines(config()))
    assert "host each" in text and "device each" in text
    assert "device 0 (A Card): model-0, server-0 need at least" in text
    assert "KV cache" in text and "snapshots" not in text
    assert "a checkpoint" in text


@pytest.mark.usefixtures("disk")
def test_without_a_card_the_table_says_what_one_would_need(cards: Cards) -> None:
    cards([])
    text = "\n".join(capacity.memory_lines(config()))
    assert "no accelerator is present here; with one per process: model " in text
    assert "snapshots" in text, "all memory is the host's"


@pytest.mark.usefixtures("disk")
def test_more_servers_than_a_card_has_room_for_are_refused(cards: Cards) -> None:
    cards([card(140, free=6)])
    with pytest.raises(
        UserError, match=r"--servers: expected at most 1: one more takes about .* of a device"
    ):
        capacity.check_more_servers(config(), servers=3, now=1)


def test_more_processes_than_descriptors_or_connections_allow_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capacity.check_limits(config())
    monkeypatch.setattr("kintsugi.cli.capacity.descriptor_limit", lambda: 256)
    with pytest.raises(
        UserError, match="file descriptors each, this user can have 256; raise the hard limit"
    ):
        capacity.check_limits(config())
    monkeypatch.undo()
    monkeypatch.setattr("kintsugi.cli.capacity.most_peers", lambda: 3)
    with pytest.raises(UserError, match="ZeroMQ allows at most 3"):
        capacity.check_limits(config())


def test_the_number_of_processes_is_that_of_the_plan() -> None:
    one, three = config(), msgspec.structs.replace(config(workers=5), cluster=ClusterSection(hosts=3))
    for each in (one, three):
        assert num_processes(each) == len(plan_layout(each))
