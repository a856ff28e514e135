"""The harness of `benchmarks/real_model_bad_input.py`: its inputs are refused for the reason they were made for."""

import argparse
import os
from pathlib import Path

import pytest

from benchmarks import real_model_bad_input
from benchmarks.real_model_bad_input import (
    FOURTEEN_B,
    Cases,
    Row,
    last_line,
    processes_that_name,
    table,
    why_not,
    write_hollow_gguf,
    write_hollow_model,
)
from kintsugi.errors import ModelError
from kintsugi.model.architecture import num_parameters
from kintsugi.model.folder import check_weights, load_config
from kintsugi.model.import_gguf import import_model
from kintsugi.model.tokenizer import character_tokenizer
from tests.unit.model.test_import_gguf import TINY
from tests.unit.model.written_gguf import new_state, write_gguf


def test_a_hollow_model_is_a_whole_one_to_what_reads_headers_and_takes_no_space(tmp_path: Path) -> None:
    character_tokenizer("abc").save(tmp_path / "tokenizer")
    write_hollow_model(FOURTEEN_B, folder=tmp_path / "model", tokenizer=tmp_path / "tokenizer")
    config = load_config(tmp_path / "model")
    check_weights(tmp_path / "model", config=config)
    assert 14e9 < num_parameters(config) < 15e9
    assert (tmp_path / "model" / "model.safetensors").stat().st_blocks * 512 < 1e6


def test_a_hollow_gguf_file_is_refused_for_its_family_or_its_length(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", config=TINY["qwen2"], state=new_state(TINY["qwen2"]))
    write_hollow_gguf(tmp_path / "model.gguf", tmp_path / "foreign.gguf", family="gemma")
    with pytest.raises(ModelError, match=r"supported family .*got 'gemma'"):
        import_model(tmp_path / "foreign.gguf", tmp_path / "imported")
    write_hollow_gguf(tmp_path / "model.gguf", tmp_path / "cut.gguf", share=0.5)
    with pytest.raises(ModelError, match="is cut"):
        import_model(tmp_path / "cut.gguf", tmp_path / "imported")


def test_what_a_command_says_is_its_error_else_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("warning: a\nerror: b\nhint: c\n\n")
    assert last_line(log) == "error: b"
    log.write_text("a\nb\n")
    assert last_line(log) == "b"
    log.write_text("")
    assert last_line(log) == "nothing"


def test_cases_that_this_machine_can_not_do_are_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(real_model_bad_input, "read_devices", lambda: ())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    given = argparse.Namespace(gguf=None, model=None, tokenizer=None)
    assert why_not("card-full", given) == "no card"
    assert why_not("disk-full", given).startswith("no root")
    assert why_not("killed-import", given) == "no --gguf"
    assert why_not("too-large", given) == "no --model or --tokenizer"
    assert "| too-large | refused | 1.2 | 2 | nothing |" in table([Row("too-large", "refused", 1.23, 2)])


def test_a_command_that_leaves_something_is_named_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(real_model_bad_input, "shared_memory_files", lambda: {"of another run"})
    given = argparse.Namespace(out=tmp_path, timeout=60.0)
    row = Cases(given)._command("import", "import", str(tmp_path / "nowhere.gguf"), str(tmp_path / "new"))
    assert (row.code, row.left) == (2, "") and row.said.startswith(
        "error: expected a model folder or a .gguf"
    )
    (tmp_path / "left").mkdir()
    assert Cases(given)._left(set(), set()) == "/dev/shm/of another run, left"
    assert processes_that_name(tmp_path) == []
