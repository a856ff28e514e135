"""Creation of run folders, and removal of those in which nothing was started."""

from __future__ import annotations

import errno
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kintsugi.config.recipe import (
    Resolved,
    anchored,
    dump,
    fields_of,
    load_config,
)
from kintsugi.config.resolution import with_resolved_algorithm
from kintsugi.config.schema import Config
from kintsugi.errors import ConfigError, StorageError
from kintsugi.run_folder.layout import REDACTED, RunFolder
from kintsugi.runtime.disk import write_atomically

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENFILE, errno.EMFILE})
"""Error codes that are not a mistake in `run_dir`."""


def make_run_folder(resolved: Resolved, *, rewards: Path | None = None) -> tuple[Config, Path]:
    """Create the folder of a validated configuration and write configuration and origins into it.

    `rewards` is a file with captured reward functions (`source_capture.py`). If it exists, it is copied into the folder
    and the reward paths of the configuration refer to the copy.
    """
    resolved = with_resolved_algorithm(resolved)
    config = resolved.config
    run_dir = Path(config.run_dir) if config.run_dir else next_run_dir(config.name)
    run = RunFolder(run_dir)
    config = msgspec.structs.replace(config, run_dir=str(run_dir))
    source = rewards.read_bytes() if rewards is not None and rewards.exists() else None
    if source is not None:
        config = _with_rewards_in(run.rewards_file.resolve(), config, instead_of=rewards)
    config = anchored(config)
    webhook = config.monitoring.webhook
    if webhook is not None:
        section = msgspec.structs.replace(config.monitoring, webhook=redacted(webhook))
        config = msgspec.structs.replace(config, monitoring=section)
    create_run_dir(run_dir)
    try:
        if webhook is not None:
            _write(run.webhook_file, webhook.encode())
        dump(config, run.config_file)
        _write(run.origins_file, msgspec.json.format(msgspec.json.encode(resolved.origins), indent=1))
        if source is not None:
            _write(run.rewards_file, source)
    except StorageError:
        remove_unused(run_dir)
        raise
    return config, run_dir


def replace_config(run_dir: Path, config: Config, *, step: int) -> None:
    """Continue a run with another configuration after `step`; the earlier one is kept beside it."""
    run = RunFolder(run_dir)
    before = load_config(run.config_file)
    if config == before:
        return
    dump(before, run.earlier_config_file(step))
    unfinished = run.config_file.with_suffix(".new")
    dump(config, unfinished)
    try:
        unfinished.replace(run.config_file)
    except OSError as error:
        raise StorageError(f"could not write {run.config_file}: {error.strerror or error}") from error
    old, origins = fields_of(before), read_origins(run_dir)
    changed = {
        name: f"resume at step {step}" for name, value in fields_of(config).items() if old.get(name) != value
    }
    _write(run.origins_file, msgspec.json.format(msgspec.json.encode(origins | changed), indent=1))


def read_origins(run_dir: Path) -> dict[str, str]:
    """Read the origins of a run's values; empty if it did not record them."""
    try:
        return msgspec.json.decode(RunFolder(run_dir).origins_file.read_bytes(), type=dict[str, str])
    except (FileNotFoundError, msgspec.DecodeError):
        return {}


def _with_rewards_in(file: Path, config: Config, *, instead_of: Path | None) -> Config:
    paths = tuple(path.replace(str(instead_of), str(file), 1) for path in config.algorithm.reward)
    return msgspec.structs.replace(config, algorithm=msgspec.structs.replace(config.algorithm, reward=paths))


def redacted(url: str) -> str:
    """Return a URL without what may be a credential: user, password, path and query.

    >>> redacted("https://me:secret@hooks.example.com:8443/services/T0/B0/x?token=y")
    'https://hooks.example.com:8443/redacted'
    """
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{REDACTED}"


def _write(path: Path, data: bytes) -> None:
    """Write a file that only this user can read, also where the umask would let others."""
    try:
        write_atomically(path, data, durable=True, mode=0o600)
    except OSError as error:
        raise StorageError(f"could not write {path}: {error.strerror or error}") from error


def next_run_dir(name: str, *, folder: Path = Path("runs")) -> Path:
    """`runs/<name>-<number>`, with the number after the highest one in use."""
    taken = [path.name.removeprefix(f"{name}-") for path in folder.glob(f"{name}-*")]
    return folder / f"{name}-{1 + max((int(number) for number in taken if number.isdecimal()), default=0)}"


def create_run_dir(folder: Path) -> None:
    """Create the folder, for this user only: it holds prompts, completions and addresses of processes. An existing one
    is refused: two runs never share a folder."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise ConfigError(f"`run_dir`: expected a folder that does not exist yet, found {folder}") from None
    except OSError as error:
        if error.errno in _DISK_ERRORS:
            raise StorageError(f"could not make the run folder {folder}: {error.strerror}") from error
        raise ConfigError(f"`run_dir`: expected a place to write, {folder}: {error.strerror}") from error


def remove_unused(folder: Path) -> None:
    """Remove the folder of a run that never started, if it contains nothing but the files of `make_run_folder`."""
    run = RunFolder(folder)
    given = {
        run.config_file,
        run.origins_file,
        run.started_file,
        run.rewards_file,
        run.data_file,
        run.audit_file,
        run.webhook_file,
    }
    if set(folder.iterdir()) <= given:
        for path in given:
            path.unlink(missing_ok=True)
        folder.rmdir()
