"""Files that a run needs on every host: its configuration, data, models and user code. They travel by digest.

A host has a scratch folder in place of the run folder. Files of the run folder have the same names there; files from
elsewhere are put below `files/`, and the configuration on that host names them there.

All hosts of a session get the same files, also those that are ordered again after a file was edited: the first host
manager keeps them in `host_files/` of the run folder, where its successors find them. Copied are all Python files, and
models and data up to `MOST_COPIED_FILE_BYTES` each and `MOST_COPIED_BYTES` together. Larger ones, and those that lie in
the run folder anyway, stay in their place and must not change. The folder is removed at the end of the session:
`kintsugi resume` takes the files as they are then.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from kintsugi.config.recipe import dump
from kintsugi.config.schema import Config
from kintsugi.errors import ConfigError
from kintsugi.protocol.hosts import RunFile
from kintsugi.run_folder.layout import RELATIVE, RunFolder
from kintsugi.runtime.disk import storage_errors, write_atomically
from kintsugi.runtime.user_modules import IN_A_FILE

COPIES = "files"
"""Folder of copies in the scratch folder of a host."""
MOST_NEIGHBOURS = 1000
"""Python files beside a file of user code, which it may import."""
MOST_COPIED_FILE_BYTES, MOST_COPIED_BYTES = 64 << 20, 1 << 30
"""Largest file of a model or of data that is copied into the run folder, and all of them together."""
_BLOCK = 1 << 20


class KeptFiles(msgspec.Struct, frozen=True):
    """`host_files/index.json` of a run folder."""

    job: str
    files: tuple[RunFile, ...]
    places: dict[str, str]
    """Digest → file on this machine."""
    python_path: tuple[str, ...]
    """Folders of modules that travel, relative to the scratch folder."""
    imports: tuple[str, ...]
    """User code that the hosts import, by the names that it has there."""


class RunFiles:
    """Files of one session of a run, kept by its first host manager: what travels, and where it is on this machine."""

    def __init__(self, config: Config, *, run_dir: Path, job: str) -> None:
        """ConfigError names a file that can not be read; StorageError if the files can not be kept."""
        kept = _kept_files(run_dir, job=job) or _keep_files(config, run_dir=run_dir, job=job)
        self._places = kept.places
        self.python_path, self.imports = kept.python_path, kept.imports
        self.files = list(kept.files)
        self._contents: dict[str, bytes] = {}
        """Digest → contents of a file that is made while the run runs."""
        decode_step_file = RunFolder(run_dir).decode_step_file
        if decode_step_file.exists():
            with storage_errors(f"could not read {decode_step_file}"):
                contents, status = decode_step_file.read_bytes(), decode_step_file.stat()
            digest = xxhash.xxh3_128_hexdigest(contents)
            self._contents[digest] = contents
            as_path = str(RELATIVE.decode_step_file)
            self.files.append(RunFile(as_path, digest, len(contents), status.st_mtime_ns))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.size for each in self.files)

    def read(self, digest: str, *, offset: int, size: int) -> tuple[bytes, int]:
        """Return a part of a file and the size of the whole; KeyError if no file has this digest."""
        if (contents := self._contents.get(digest)) is not None:
            return contents[offset : offset + size], len(contents)
        with open(self._places[digest], "rb") as file:
            file.seek(offset)
            return file.read(size), os.fstat(file.fileno()).st_size


def remove_kept_files(run_dir: Path) -> None:
    """Remove the files that were kept for the hosts of a session, which has ended."""
    shutil.rmtree(RunFolder(run_dir).host_files_folder, ignore_errors=True)


def _kept_files(run_dir: Path, *, job: str) -> KeptFiles | None:
    """Return the files that an earlier host manager of this session has kept; None if there was none. StorageError if
    they can not be read: new ones could differ from those that the hosts have."""
    path = RunFolder(run_dir).host_files_index_file
    with storage_errors(f"could not read {path}"):
        if not path.exists():
            return None
        contents = path.read_bytes()
    try:
        kept = msgspec.json.decode(contents, type=KeptFiles)
    except msgspec.DecodeError:  # Of another version of this program, and so of another session.
        return None
    return kept if kept.job == job else None


def _keep_files(config: Config, *, run_dir: Path, job: str) -> KeptFiles:
    """Keep the files of a run for a session that begins, in place of those of an earlier one."""
    remove_kept_files(run_dir)
    folder = RunFolder(run_dir).host_files_folder
    try:
        with storage_errors(f"could not keep the files of the hosts in {folder}"):
            folder.mkdir(mode=0o700)
            found = _FoundFiles(config, run_dir=run_dir.resolve())
            kept = KeptFiles(job, tuple(found.files), found.places, found.python_path, found.imports)
            index = RunFolder(run_dir).host_files_index_file
            write_atomically(index, msgspec.json.encode(kept), durable=False, mode=0o600)
    except BaseException:
        remove_kept_files(run_dir)
        raise
    return kept


class _FoundFiles:
    """Files of one run, found and kept once."""

    def __init__(self, config: Config, *, run_dir: Path) -> None:
        self._run_dir, self._folder = run_dir, RunFolder(run_dir).host_files_folder
        self._bytes_left = MOST_COPIED_BYTES
        self._moved: dict[str, str] = {}
        """Path on this machine → path relative to the scratch folder."""
        self.files: list[RunFile] = []
        self.places: dict[str, str] = {}
        """Digest → file on this machine."""
        for path in _named_files(config, run_dir=run_dir):
            self._add(path, as_path=self._copy_of(path))
        moved = self._config_for_hosts(config)
        self.imports = tuple(_user_code(moved))
        modules = (module_file(path) for path in self.imports if IN_A_FILE not in path)
        folders = (self._moved[str(path.parent)] for path in modules if path is not None)
        self.python_path = tuple(dict.fromkeys(folders))
        dump(moved, self._folder / RELATIVE.config_file)
        self._add_made(RELATIVE.config_file)
        data_file = RunFolder(run_dir).data_file
        if data_file.exists():
            tree = self._moved_in(msgspec.json.decode(data_file.read_bytes()))
            contents = msgspec.json.encode(tree)
            write_atomically(self._folder / RELATIVE.data_file, contents, durable=False, mode=0o600)
            self._add_made(RELATIVE.data_file)

    def _copy_of(self, path: Path) -> str:
        """Return where a file is on the hosts: below `COPIES`, under the name of its folder, which keeps neighbours
        together and folders of equal names apart."""
        folder = xxhash.xxh3_64_hexdigest(str(path.parent).encode())[:8]
        relative = f"{COPIES}/{folder}/{path.name}"
        self._moved[str(path)] = relative
        self._moved.setdefault(str(path.parent), f"{COPIES}/{folder}")
        return relative

    def _add(self, path: Path, *, as_path: str) -> None:
        """Add a file; the digest is of the very bytes that are copied."""
        try:
            status = path.stat()
        except OSError as error:
            raise _unreadable(path, error) from error
        digest, size = xxhash.xxh3_128(), 0

        def hashed() -> Iterator[bytes]:
            nonlocal size
            for block in _blocks(path):
                digest.update(block)
                size += len(block)
                yield block

        if self._is_copied(path, size=status.st_size):
            target = self._folder / as_path
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(target, hashed(), durable=False, mode=0o600)
            place = target
        else:
            deque(hashed(), maxlen=0)
            place = path.absolute()
        self.places.setdefault(digest.hexdigest(), str(place))
        self.files.append(RunFile(as_path, digest.hexdigest(), size, status.st_mtime_ns))

    def _is_copied(self, path: Path, *, size: int) -> bool:
        if path.suffix == ".py":
            return True
        if path.is_relative_to(self._run_dir) or size > min(MOST_COPIED_FILE_BYTES, self._bytes_left):
            return False
        self._bytes_left -= size
        return True

    def _add_made(self, relative: Path) -> None:
        """Add a file that was made for the hosts."""
        path = self._folder / relative
        contents = path.read_bytes()
        digest = xxhash.xxh3_128_hexdigest(contents)
        self.places[digest] = str(path)
        self.files.append(RunFile(str(relative), digest, len(contents)))

    def _config_for_hosts(self, config: Config) -> Config:
        """Return the configuration with the paths of the hosts; `SCRATCH` stands for their folder."""
        tree = self._moved_in(msgspec.to_builtins(config))
        tree["run_dir"] = SCRATCH
        tree["data"]["cache_dir"] = f"{SCRATCH}/cache"
        return msgspec.convert(tree, Config)

    def _moved_in(self, tree: Any) -> Any:
        """Replace paths of this machine in a tree of values."""
        if isinstance(tree, dict):
            return {key: self._moved_in(value) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return [self._moved_in(value) for value in tree]
        if isinstance(tree, str):
            path, colon, rest = tree.partition(IN_A_FILE)
            path = f"{path}.py" if colon else path
            moved = self._moved.get(path)
            if moved is not None:
                return f"{SCRATCH}/{moved}" + (f":{rest}" if colon else "")
        return tree


SCRATCH = "/kintsugi-scratch"
"""Stands for the scratch folder in files that are made for the hosts, which replace it by their own."""


def fill_in_scratch(contents: bytes, scratch: Path) -> bytes:
    """Name the scratch folder of this host in a file that was made for the hosts."""
    return contents.replace(SCRATCH.encode(), str(scratch).encode())


def _blocks(path: Path) -> Iterator[bytes]:
    """Read a file in parts."""
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                yield block
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: expected a file to copy to the hosts: {error.strerror}")


def _user_code(config: Config) -> Iterator[str]:
    """User code that a configuration names, in files and in modules; names of our own have no dot."""
    algorithm = config.algorithm
    named = (*algorithm.reward, algorithm.custom, config.rollout.environment)
    return (path for path in named if path is not None and ("." in path or IN_A_FILE in path))


def module_file(reference: str) -> Path | None:
    """Return the file of a module outside the installed packages that a dotted path names; None for a package, which
    has to be installed on every host."""
    name = reference.partition(".")[0]
    spec = importlib.util.find_spec(name) if name.isidentifier() and name != "kintsugi" else None
    if spec is not None and spec.submodule_search_locations is not None:
        return None
    path = Path(spec.origin) if spec is not None and spec.origin else Path.cwd() / f"{name}.py"
    is_installed = any(path.is_relative_to(each) for each in (sys.prefix, sys.base_prefix))
    return path if path.suffix == ".py" and path.is_file() and not is_installed else None


def _named_files(config: Config, *, run_dir: Path) -> Iterator[Path]:
    """Files on this machine that a configuration names, each once."""
    seen: set[Path] = set()
    for path in _all_named_files(config, run_dir=run_dir):
        if path not in seen:
            seen.add(path)
            yield path


def _all_named_files(config: Config, *, run_dir: Path) -> Iterator[Path]:
    for section in (config.model, config.critic, config.reference, config.reward_model):
        if section is not None and section.path is not None:
            folder = Path(section.path)
            yield from (
                sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else [folder]
            )
    for reference in _user_code(config):
        file, in_a_file, _ = reference.partition(IN_A_FILE)
        path = Path(f"{file}.py") if in_a_file else module_file(reference)
        if path is not None:
            neighbours = sorted(path.parent.glob("*.py"))
            yield from neighbours if len(neighbours) <= MOST_NEIGHBOURS else [path]
    data_file = RunFolder(run_dir).data_file
    if data_file.exists():
        for path in _paths_in(msgspec.json.decode(data_file.read_bytes())):
            yield path


def _paths_in(tree: Any) -> Iterator[Path]:
    """Files that the record of the data names."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _paths_in(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _paths_in(value)
    elif isinstance(tree, str) and tree.startswith("/") and Path(tree).is_file():
        yield Path(tree)
