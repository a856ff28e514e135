from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from kintsugi.cli import main
from kintsugi.config.recipe import dump, load
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import Alert
from kintsugi.telemetry.readings import HostReading
from tests.unit.telemetry.recorded_run import FIRST, NOON, RecordedRun, a_step, begun_run

RECIPE = Path(__file__).parents[3] / "kintsugi" / "recipes" / "grpo_arithmetic.yaml"


class Result(msgspec.Struct):
    code: int
    output: str
    errors: str


Kintsugi = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    run = begun_run(tmp_path / "runs" / "demo-1")
    dump(load(RECIPE).config, run.folder / "config.yaml")
    a_step(run)
    run.say("model-1", Alert("far slower than its peers", {"ratio": 3.0}), at=4.0)
    run.measure("agent-0", HostReading("host-0", {"load_1": 0.5}), at=4.0)
    return run


@pytest.fixture
def kintsugi(
    run: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Kintsugi:
    """The command, run beside the folder of runs."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["kintsugi", *arguments])
        with pytest.raises(SystemExit) as exit:
            main.main()
        captured = capsys.readouterr()
        return Result(int(exit.value.code or 0), captured.out, captured.err)

    return call


def test_logs_are_searched_by_words_request_process_and_kind(kintsugi: Kintsugi) -> None:
    result = kintsugi("logs", "demo-1", "slower than", "--process", "model", "--kind", "alert")
    assert result.code == 0
    assert result.output.split(maxsplit=3)[1:] == [
        "model-1",
        "Alert",
        "far slower than its peers (ratio=3)\n",
    ]
    assert len(kintsugi("logs", "demo-1", "--request", FIRST).output.splitlines()) == 4
    assert "load_1=0.5" in kintsugi("logs", "demo-1", "--kind", "HostSample").output


def test_what_is_called_by_a_word_is_found_by_it(kintsugi: Kintsugi) -> None:
    (line,) = kintsugi("logs", "demo-1", "committed").output.splitlines()
    assert line.split()[2] == "StepCommitted"


def test_lines_of_a_run_of_more_than_a_day_have_their_day(kintsugi: Kintsugi, run: RecordedRun) -> None:
    day_s = 86400.0
    assert ":" in kintsugi("logs", "demo-1").output.split()[0]
    run.say("model-1", Alert("still there"), at=day_s)
    first, *_, last = kintsugi("logs", "demo-1").output.splitlines()
    days = [datetime.fromtimestamp(NOON + at).date().isoformat() for at in (0.0, day_s)]
    assert [first.split()[0], last.split()[0]] == days
    assert f"{days[0]} " in kintsugi("trace", "demo-1", FIRST).output


def test_a_diagnosis_as_json_says_what_was_wrong_earlier(kintsugi: Kintsugi, run: RecordedRun) -> None:
    cause = {"process": "model-0", "host": "", "kind": "cpu", "onset": NOON + 1, "confidence": 0.9}
    cause |= {"summary": "model-0: is starved", "path": [], "evidence": []}
    line = {"run": "r", "at": NOON + 2, "since": NOON, "causes": [cause]}
    RunFolder(run.folder).diagnoses_file.write_text(f"{json.dumps(line)}\n")
    told = json.loads(kintsugi("diagnose", "demo-1", "--at", "+6s", "--json").output)
    assert [(each["process"], each["told"]) for each in told["earlier"]] == [("model-0", NOON + 2)]


def test_logs_as_json_have_every_field_as_it_was_recorded(kintsugi: Kintsugi) -> None:
    (line,) = kintsugi("logs", "demo-1", "--kind", "Alert", "--json").output.splitlines()
    found = json.loads(line)
    assert found["content"] == {
        "kind": "Alert",
        "message": "far slower than its peers",
        "values": {"ratio": 3.0},
    }
    assert (found["process"], found["source"]) == ("model-1", "events/model-1.jsonl")


def test_a_window_of_time_is_counted_from_the_run(kintsugi: Kintsugi) -> None:
    output = kintsugi("logs", "demo-1", "--since", "+3.9s", "--until", "+4.1s").output
    assert [line.split()[2] for line in output.splitlines()] == ["BatchFormed", "Alert"]


def test_following_a_run_that_has_ended_prints_its_records_and_ends(kintsugi: Kintsugi) -> None:
    assert "far slower" in kintsugi("logs", "demo-1", "--follow", "--kind", "Alert").output


def test_an_empty_result_is_reported_on_standard_error(kintsugi: Kintsugi) -> None:
    result = kintsugi("logs", "demo-1", "nowhere")
    assert (result.code, result.output) == (0, "")
    assert "no matching records" in result.errors


def test_a_prompt_is_followed_and_exported(kintsugi: Kintsugi, tmp_path: Path) -> None:
    result = kintsugi("trace", "demo-1", FIRST, "--chrome", "c.json", "--otlp", "o.json")
    assert result.code == 0 and "version 1 is current at server-0, server-1" in result.output
    assert json.loads((tmp_path / "c.json").read_text())["traceEvents"]
    assert json.loads((tmp_path / "o.json").read_text())["resourceSpans"]
    told = json.loads(kintsugi("trace", "demo-1", FIRST, "--json").output)
    assert told["ticket"] == FIRST and told["stations"][0]["name"] == "issued"


def test_a_whole_run_is_exported(kintsugi: Kintsugi, tmp_path: Path) -> None:
    assert kintsugi("trace", "demo-1", "--chrome", "c.json").output == "c.json: 3 entries\n"
    assert kintsugi("trace", "demo-1", "--otlp", "o.json", "--since", "+4.5s").output == "o.json: 2 entries\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["logs", "nowhere"], "nowhere: expected a run folder"),
        (["trace", "nowhere", "1"], "nowhere: expected a run folder"),
        (["diagnose", "nowhere"], "nowhere: expected a run folder"),
        (["watch", "nowhere"], "nowhere: expected a run folder"),
        (["watch", "demo-1"], "is not running"),
        (["logs", "demo-1", "--since", "soon"], "--since: expected a time"),
        (["logs", "demo-1", "--since", "+9s", "--until", "+1s"], "--since +9s is later than --until +1s"),
        (["logs", "demo-1", "--follow", "--until", "+1s"], "expected no --until"),
        (["logs", "demo-1", "--process", "model-9"], "expected a process of the run"),
        (["logs", "demo-1", "--kind", "rumour"], "--kind: expected one of"),
        (["trace", "demo-1"], "expected a prompt to trace"),
        (["trace", "demo-1", "no such prompt"], "found none for the prompt 'no such prompt'"),
        (["trace", "demo-1", "grpo:7:7:7"], "no ticket grpo:7:7:7 was issued"),
        (["trace", "demo-1", FIRST, "--since", "+1s"], "--since and --until apply to the whole run"),
        (["diagnose", "demo-1", "--at", "teatime"], "--at: expected a time"),
        (["diagnose", "demo-1", "--at", "99"], "--at 99: expected a moment of the run, which goes from"),
    ],
)
def test_the_users_mistakes_are_named_in_one_sentence(
    kintsugi: Kintsugi, arguments: list[str], words: str
) -> None:
    result = kintsugi(*arguments)
    assert result.code == 2
    assert words in result.errors and "Traceback" not in result.errors


def test_a_file_that_can_not_be_written_is_said(kintsugi: Kintsugi) -> None:
    result = kintsugi("trace", "demo-1", FIRST, "--chrome", "no/such/folder/c.json")
    assert result.code == 1 and "No such file or directory" in result.errors
