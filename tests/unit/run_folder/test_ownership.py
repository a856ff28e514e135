"""Files of a run are for its owner only, and those that are acted upon must be the owner's own."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kintsugi.cli.run_actions import check_resumable, find_launcher
from kintsugi.cli.scale import scale_run
from kintsugi.cluster.child import read_table
from kintsugi.config.recipe import load, load_config
from kintsugi.control.user_requests import UserRequests
from kintsugi.data.manifest import DataManifest, write_record
from kintsugi.diagnosis.watcher import webhook_of
from kintsugi.errors import UntrustedFile
from kintsugi.run_folder.creation import make_run_folder, replace_config
from kintsugi.run_folder.layout import RunFolder
from kintsugi.run_folder.reader import living_launcher, write_launcher
from kintsugi.run_folder.started import record_start

STRANGER = 65534
WEBHOOK = "https://user:word@hooks.example.com/services/T0/B0/secret?token=also"
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files of another user")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    before = os.umask(0o022)
    try:
        overrides = [f"run_dir={tmp_path / 'run'}", f"monitoring.webhook={WEBHOOK}"]
        return make_run_folder(load(Path("grpo_arithmetic"), overrides))[1]
    finally:
        os.umask(before)


def test_a_run_folder_and_its_files_are_for_their_owner_only(run_dir: Path) -> None:
    before = os.umask(0o022)
    try:
        config = load_config(RunFolder(run_dir).config_file)
        record_start(run_dir, config)
        write_record(DataManifest(1, 0, ()), run_dir)
        replace_config(run_dir, msgspec.structs.replace(config, seed=7), step=1)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in run_dir.iterdir()}
    assert len(modes) >= 6
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700


def test_the_address_of_a_webhook_is_in_a_file_of_its_own(run_dir: Path) -> None:
    run = RunFolder(run_dir)
    for path in run_dir.iterdir():
        assert path == run.webhook_file or "secret" not in path.read_text()
    configured = load_config(run.config_file).monitoring.webhook
    assert configured == "https://hooks.example.com/redacted"
    assert stat.S_IMODE(run.webhook_file.stat().st_mode) == 0o600
    assert webhook_of(run_dir, configured) == WEBHOOK
    run.webhook_file.unlink()
    assert webhook_of(run_dir, configured) is None
    assert webhook_of(run_dir, "https://of.an/older/run") == "https://of.an/older/run"


@as_root
@pytest.mark.parametrize(
    "act",
    [find_launcher, check_resumable, lambda folder: scale_run(folder, servers=2, timeout_s=1.0)],
    ids=["stop", "resume", "scale"],
)
def test_a_run_of_another_user_is_refused_with_its_owner(
    run_dir: Path, act: Callable[[Path], object]
) -> None:
    os.chown(run_dir, STRANGER, -1)
    with pytest.raises(UntrustedFile, match=r"belongs to user .*: expected a run of this user"):
        act(run_dir)


def plant(path: Path, content: str, *, owner: int, mode: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    path.chmod(mode)
    os.chown(path, owner, -1)


FOREIGN = pytest.mark.parametrize(("owner", "mode"), [(STRANGER, 0o600), (0, 0o666), (0, 0o620)])


@as_root
@FOREIGN
def test_a_process_that_a_foreign_file_names_is_not_signalled(run_dir: Path, owner: int, mode: int) -> None:
    write_launcher(run_dir, pid=os.getpid())
    assert living_launcher(run_dir) is not None
    path = RunFolder(run_dir).launcher_file
    plant(path, path.read_text(), owner=owner, mode=mode)
    with pytest.raises(UntrustedFile, match=r"launcher\.json"):
        living_launcher(run_dir)


@as_root
@FOREIGN
def test_a_table_of_processes_that_others_could_have_written_is_refused(
    run_dir: Path, owner: int, mode: int
) -> None:
    path = RunFolder(run_dir).agent_file("agent-0")
    plant(path, "{}", owner=owner, mode=mode)
    with pytest.raises(UntrustedFile, match=r"agent-0\.json"):
        read_table(path)


@as_root
@FOREIGN
def test_a_request_that_others_could_have_written_is_put_aside(run_dir: Path, owner: int, mode: int) -> None:
    requests = UserRequests(run_dir)
    own = requests.submit(servers=3)
    planted = RunFolder(run_dir).request_file("00000000000000000001-planted")
    plant(planted, '{"servers":64}', owner=owner, mode=mode)
    assert [request.request for request in requests.waiting()] == [own]
    assert not planted.exists() and planted.with_suffix(".refused").exists()
