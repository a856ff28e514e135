"""Downloads of models by the client of the Hugging Face hub, from a server on this machine."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from tests.unit.model.hub_server import COMMIT, HubServer

pytestmark = pytest.mark.slow

NAME = "someone/tiny-model"
WEIGHTS = "model.safetensors"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    WEIGHTS: os.urandom(1 << 20) * 24,
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"another format of the same weights",
    "modeling_custom.py": b"raise SystemExit('code of a model was run')",
}
WANTED = {"config.json", WEIGHTS, "tokenizer.json"}
PROGRAM = """
import sys
from kintsugi.errors import ModelError
from kintsugi.model.hub import local_folder
try:
    print(local_folder(sys.argv[1], field="model.path", say=lambda text: print(text, file=sys.stderr)))
except ModelError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""
PATIENCE_S = 60.0
CHUNK = 10 << 20
"""Bytes that the client writes at a time; a part of them is asked for again."""


def environment(server: str, cache: Path, **more: str) -> dict[str, str]:
    """Environment in which the client knows this server only."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, "HF_ENDPOINT": server, "HF_HOME": str(cache), "PYTHONPATH": str(Path.cwd()), **more}


def fetch(server: str, cache: Path, name: str = NAME, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        env=environment(server, cache, **more),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def content_of(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder.strip()).iterdir()}


def test_a_model_by_name_is_downloaded_once_without_code_and_other_formats(tmp_path: Path) -> None:
    with HubServer(NAME, FILES) as hub:
        first = fetch(hub.address, tmp_path)
        num_requests = len(hub.requests)
        second = fetch(hub.address, tmp_path)
        assert len(hub.requests) == num_requests, "the second time everything is in the cache"
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert content_of(first.stdout) == content_of(second.stdout) == {name: FILES[name] for name in WANTED}
    assert first.stdout.strip().endswith(COMMIT)
    assert f"model.path: {NAME} is not in the local cache" in first.stderr
    assert second.stderr == ""
    offline = fetch("http://127.0.0.1:9", tmp_path)
    assert offline.stdout == first.stdout


def test_a_transfer_that_breaks_off_is_continued_where_it_ended(tmp_path: Path) -> None:
    with HubServer(NAME, FILES, cut=WEIGHTS, cut_after=15 << 20) as hub:
        done = fetch(hub.address, tmp_path)
        ranges = [asked for method, path, asked in hub.requests if path.endswith(WEIGHTS) and method == "GET"]
    assert hub.is_cut.is_set()
    assert done.returncode == 0, done.stderr
    assert content_of(done.stdout)[WEIGHTS] == FILES[WEIGHTS]
    assert len(ranges) == 2 and int(ranges[1].removeprefix("bytes=").partition("-")[0]) >= CHUNK


def test_a_download_that_was_killed_is_no_model_and_is_completed_by_the_next_start(tmp_path: Path) -> None:
    with HubServer(NAME, FILES, cut=WEIGHTS, cut_after=15 << 20, holds=True) as hub:
        killed = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, NAME],
            env=environment(hub.address, tmp_path),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert hub.is_cut.wait(PATIENCE_S)
        killed.kill()
        killed.wait(PATIENCE_S)
    alone = fetch("http://127.0.0.1:9", tmp_path)
    assert alone.returncode == 2, alone.stdout
    assert f"`hf download {NAME}`" in alone.stderr and "can not be reached" in alone.stderr
    with HubServer(NAME, FILES) as hub:
        done = fetch(hub.address, tmp_path)
    assert done.returncode == 0, done.stderr
    assert content_of(done.stdout) == {name: FILES[name] for name in WANTED}


def test_a_name_that_the_hub_does_not_know_is_named(tmp_path: Path) -> None:
    with HubServer(NAME, FILES) as hub:
        done = fetch(hub.address, tmp_path, "someone/misspelt")
    assert done.returncode == 2
    assert "'someone/misspelt'" in done.stderr and "the hub knows no such model" in done.stderr


def test_the_offline_switch_of_the_client_is_obeyed_and_said(tmp_path: Path) -> None:
    with HubServer(NAME, FILES) as hub:
        done = fetch(hub.address, tmp_path, HF_HUB_OFFLINE="1")
        assert hub.requests == []
    assert done.returncode == 2 and f"`hf download {NAME}`" in done.stderr


def test_a_terminal_shows_a_progress_bar(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with HubServer(NAME, FILES) as hub:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, NAME],
            env=environment(hub.address, tmp_path, TERM="xterm", COLUMNS="80"),
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        shown = bytearray()
        try:
            while block := os.read(ours, 1 << 16):
                shown += block
        except OSError:  # The terminal is closed by its last process.
            pass
        os.close(ours)
        assert process.wait(PATIENCE_S) == 0
    text = shown.decode(errors="replace")
    assert "100%" in text and "MB" in text, text
