"""Files that a run needs on every host: its configuration, data, models and user code. They travel by digest.

A host has a scratch folder in place of the run folder. Files of the run folder have the same names there; files from
elsewhere are put below `files/`, and the configuration on that host names them there.
"""

from __future__ import annotations

import importlib.util
import sys
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
from kintsugi.runtime.user_modules import IN_A_FILE

COPIES = "files"
"""Folder of copies in the scratch folder of a host."""
MOST_NEIGHBOURS = 1000
"""Python files beside a file of user code, which it may import."""
_BLOCK = 1 << 20


class RunFiles:
    """Files of one run, found once: what travels, and where each of them is on this machine."""

    def __init__(self, config: Config, *, run_dir: Path) -> None:
        """ConfigError names a file that can not be read."""
        self._run_dir = run_dir
        self._moved: dict[str, str] = {}
        """Path on this machine → path relative to the scratch folder."""
        self._sources: dict[str, Path] = {}
        """Digest → file on this machine."""
        self.files: list[RunFile] = []
        for path in _named_files(config, run_dir=run_dir):
            self._add(path, as_path=self._copy_of(path))
        self._contents: dict[str, bytes] = {}
        """Digest → contents that are made for the hosts."""
        self._add_contents(str(RELATIVE.config_file), self._config_for_hosts(config))
        data_file = RunFolder(run_dir).data_file
        if data_file.exists():
            tree = self._moved_in(msgspec.json.decode(data_file.read_bytes()))
            self._add_contents(str(RELATIVE.data_file), msgspec.json.encode(tree))
        if RunFolder(run_dir).decode_step_file.exists():
            self._add(RunFolder(run_dir).decode_step_file, as_path=str(RELATIVE.decode_step_file))

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.size for each in self.files)

    @property
    def python_path(self) -> tuple[str, ...]:
        """Folders of modules that travel, relative to the scratch folder."""
        files = (module_file(path) for path in self._imports if IN_A_FILE not in path)
        return tuple(dict.fromkeys(self._moved[str(path.parent)] for path in files if path is not None))

    @property
    def imports(self) -> tuple[str, ...]:
        """User code that the hosts import, by the names that it has there."""
        return self._imports

    def read(self, digest: str, *, offset: int, size: int) -> tuple[bytes, int]:
        """Return a part of a file and the size of the whole; KeyError if no file has this digest."""
        if (contents := self._contents.get(digest)) is not None:
            return contents[offset : offset + size], len(contents)
        path = self._sources[digest]
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size), path.stat().st_size

    def _copy_of(self, path: Path) -> str:
        """Return where a file is on the hosts: below `COPIES`, under the name of its folder, which keeps neighbours
        together and folders of equal names apart."""
        folder = xxhash.xxh3_64_hexdigest(str(path.parent).encode())[:8]
        relative = f"{COPIES}/{folder}/{path.name}"
        self._moved[str(path)] = relative
        self._moved.setdefault(str(path.parent), f"{COPIES}/{folder}")
        return relative

    def _add(self, path: Path, *, as_path: str) -> None:
        try:
            digest, status = _digest(path), path.stat()
        except OSError as error:
            raise ConfigError(f"{path}: expected a file to copy to the hosts: {error.strerror}") from error
        self._sources[digest] = path
        self.files.append(RunFile(as_path, digest, status.st_size, status.st_mtime_ns))

    def _add_contents(self, as_path: str, contents: bytes) -> None:
        digest = xxhash.xxh3_128_hexdigest(contents)
        self._contents[digest] = contents
        self.files.append(RunFile(as_path, digest, len(contents)))

    def _config_for_hosts(self, config: Config) -> bytes:
        """Return the configuration with the paths of the hosts; `SCRATCH` stands for their folder."""
        tree = self._moved_in(msgspec.to_builtins(config))
        tree["run_dir"] = SCRATCH
        tree["data"]["cache_dir"] = f"{SCRATCH}/cache"
        moved = msgspec.convert(tree, Config)
        self._imports = tuple(path for path in _user_code(moved))
        unfinished = self._run_dir / ".config-for-hosts.yaml"
        try:
            dump(moved, unfinished)
            return unfinished.read_bytes()
        finally:
            unfinished.unlink(missing_ok=True)

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


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


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
