"""Where a library comes from; of a source that compiles at once, with the functions of `native.cpp`."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.errors import CompileFailed
from kintsugi.generation.native import library
from kintsugi.generation.native.library import HeadShape, Library, compiler, library_of, why_not

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")

SHAPE = HeadShape(16, 1, is_half=False)
SOURCE = """extern "C" {
long panel() { return %d; }
long rows_at_once() { return 8; }
void forward() {}
void draw() {}
}"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    home, source = tmp_path / "home", tmp_path / "native.cpp"
    home.mkdir()
    source.write_text(SOURCE % 32)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(library, "_SOURCE", source)
    forget()
    yield home
    forget()


def forget() -> None:
    library_of.cache_clear()
    why_not.cache_clear()


def kept(home: Path) -> Path:
    """The one library of the cache folder."""
    (path,) = home.rglob("*.so")
    return path


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """From where libraries are loaded."""
    paths: list[Path] = []

    def load(path: Path) -> Library:
        paths.append(path)
        return Library(path)

    monkeypatch.setattr(library, "Library", load)
    return paths


def test_a_library_is_compiled_once_into_a_folder_of_ones_own(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert library_of(SHAPE).panel == 32
    assert kept(home).parent.stat().st_mode & 0o777 == 0o700
    forget()
    monkeypatch.setattr(library, "_compile", lambda *_, **__: pytest.fail("compiled again"))
    assert library_of(SHAPE).panel == 32


def test_another_source_and_another_compiler_make_another_library(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library_of(SHAPE)
    (tmp_path / "native.cpp").write_text(SOURCE % 16)
    forget()
    assert library_of(SHAPE).panel == 16
    program = tmp_path / "c++"
    monkeypatch.setattr(library, "compiler", lambda: str(program))
    for version in ("1", "2.0"):
        program.write_text(f'#!/bin/sh\n# {version}\nexec {compiler()} "$@"\n')
        program.chmod(0o755)
        forget()
        library_of(SHAPE)
    assert len(list(home.rglob("*.so"))) == 4


@pytest.mark.parametrize("damage", ["cut off", "empty", "changed"])
def test_a_library_that_was_damaged_is_compiled_again(home: Path, damage: str) -> None:
    library_of(SHAPE)
    path = kept(home)
    code = path.read_bytes()
    # In a new file: this process has the old one in its memory.
    path.unlink()
    path.write_bytes({"cut off": code[:5000], "empty": b"", "changed": b"?" + code[1:]}[damage])
    forget()
    assert library_of(SHAPE).panel == 32
    assert path.read_bytes() == code


@pytest.mark.parametrize("trouble", ["writable by others", "of another user", "a link"])
def test_a_folder_where_others_could_put_a_library_is_not_used(
    home: Path, loaded: list[Path], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    library_of(SHAPE)
    folder = kept(home).parent
    if trouble == "writable by others":
        folder.chmod(0o777)
    elif trouble == "of another user":
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    else:
        folder.rename(home / "elsewhere")
        folder.symlink_to(home / "elsewhere")
    forget()
    assert library_of(SHAPE).panel == 32
    first, second = loaded
    assert first.parent == folder
    assert home not in second.parents


@pytest.mark.parametrize("folder", ["~/file/native", "~no-such-user/native"])
def test_without_a_folder_of_ones_own_a_library_is_compiled_for_this_process(
    home: Path, loaded: list[Path], monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    (home / "file").write_text("in the way")
    monkeypatch.setattr(library, "_FOLDER", folder)
    assert library_of(SHAPE).panel == 32
    (path,) = loaded
    assert not path.exists(), "it is in memory, and nobody needs the file"


def test_a_folder_from_which_nothing_can_be_executed_is_no_hindrance(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: Path) -> Library:
        if home in path.parents:
            raise OSError("failed to map segment from shared object")
        return Library(path)

    monkeypatch.setattr(library, "Library", load)
    assert library_of(SHAPE).panel == 32


def test_several_may_compile_the_same_at_once(home: Path) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(library_of.__wrapped__(SHAPE).panel)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [32] * 4
    assert [path.name for path in kept(home).parent.iterdir()] == [kept(home).name]


def test_source_that_does_not_compile_is_an_error_that_says_why(home: Path, tmp_path: Path) -> None:
    (tmp_path / "native.cpp").write_text("this is not C++")
    with pytest.raises(CompileFailed, match=r"could not compile native\.cpp: .*error"):
        library_of(SHAPE)
    assert "could not compile" in why_not(SHAPE)
    assert not list(home.rglob("*.so"))


def test_a_compiler_that_can_not_be_started_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "compiler", lambda: str(tmp_path / "gone"))
    assert "No such file" in why_not(SHAPE)


def test_a_compiler_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "c++"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(library, "compiler", lambda: str(program))
    monkeypatch.setattr(library, "_COMPILE_TIMEOUT_S", 0.05)
    with pytest.raises(CompileFailed, match=r"waited .* for the compiler"):
        library_of(SHAPE)
