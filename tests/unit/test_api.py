"""`kintsugi.train` around a session that only leaves behind what a run leaves behind."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kintsugi
from kintsugi import Config, RunResult, read_run, train
from kintsugi.config.recipe import load_config
from kintsugi.config.schema import ActorSection, AlgorithmSection, DataSection, ModelSection, NewModel
from kintsugi.errors import ConfigError, RunFailed, UserError
from kintsugi.rollout.rewards.builtin import exact_answer
from tests.unit.run_folder.test_reader import SUMMARY
from tests.unit.test_source_capture import cell

CONFIG = Config(
    name="mine",
    model=ModelSection(new=NewModel(max_positions=32)),
    data=DataSection(max_digits=1, num_eval=10),
    algorithm=AlgorithmSection(steps=2, batch_size=4),
    actor=ActorSection(workers=1),
)

SESSION = """
import json, os, sys, time
folder = sys.argv[1]
{body}
with open(os.path.join(folder, "metrics.jsonl"), "w") as metrics:
    for line in ({{"step": 1, "reward/mean": 0.5}}, {{"step": 2, "reward/mean": 0.7, "kl": 0.1}},
                 {{"step": 2, "eval/accuracy": 0.9}}):
        metrics.write(json.dumps(line) + "\\n")
with open(os.path.join(folder, "summary.json"), "w") as summary:
    json.dump({summary!r}, summary)
"""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts a program in the place of `python -m kintsugi.cli.session`; `body` is what it does first."""
    monkeypatch.chdir(tmp_path)
    interpreter = sys.executable

    def pretend(body: str = "") -> None:
        program = tmp_path / "session.py"
        program.write_text(SESSION.format(body=body, summary=SUMMARY))
        stand_in = tmp_path / "python"
        stand_in.write_text(f'#!/bin/sh\nshift 3\nexec {interpreter} {program} "$@"\n')
        stand_in.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(stand_in))

    pretend()
    return pretend


def test_the_package_is_imported_without_what_it_offers() -> None:
    program = "import sys, kintsugi; sys.exit(any(name.startswith('kintsugi.') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=30).returncode == 0


def test_what_the_package_offers_is_there_by_name() -> None:
    assert set(kintsugi.__all__) <= set(dir(kintsugi))
    assert all(getattr(kintsugi, name) is not None for name in kintsugi.__all__)
    with pytest.raises(AttributeError, match="dance"):
        kintsugi.dance  # noqa: B018


def test_a_run_gives_its_figures_as_columns_and_its_folder(
    session: Callable[..., None], tmp_path: Path
) -> None:
    result = train(CONFIG)
    assert isinstance(result, RunResult)
    assert result.folder == tmp_path / "runs" / "mine-1"
    assert result.metrics == {"step": [1, 2], "reward/mean": [0.5, 0.7], "kl": [None, 0.1]}
    assert (result.accuracy_before, result.accuracy, result.weights) == (0.2, 0.9, None)
    assert result.evaluations == [{"step": 2, "eval/accuracy": 0.9}]
    assert repr(result) == f"RunResult(finished, 5 steps, accuracy 20.0% → 90.0%, '{result.folder}')"


def test_what_the_run_says_goes_where_the_caller_prints(session: Callable[..., None]) -> None:
    session("print('Schritt für Schritt', flush=True)")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train(CONFIG)
    assert said.getvalue() == "Schritt für Schritt\n"


def test_a_recipe_and_overrides_and_a_folder_are_taken_as_on_the_command_line(
    session: Callable[..., None], tmp_path: Path
) -> None:
    recipe = Path(__file__).parents[2] / "kintsugi" / "recipes" / "grpo_arithmetic.yaml"
    result = train(recipe, "seed=5", "data.max_digits=1", "data.num_eval=9", run_dir=tmp_path / "here")
    assert (result.folder, result.config.seed) == (tmp_path / "here", 5)
    origins = json.loads((result.folder / "origins.json").read_text())
    assert (origins["seed"], origins["run_dir"], origins["cluster.hosts"]) == (
        "command line",
        "Python",
        "default",
    )


def test_a_function_of_a_module_is_given_to_workers_by_its_path(session: Callable[..., None]) -> None:
    result = train(CONFIG, reward=exact_answer)
    assert result.config.algorithm.reward == ("kintsugi.rollout.rewards.builtin.exact_answer",)
    assert not (result.folder / "rewards.py").exists()


def test_a_function_of_a_notebook_is_written_into_the_run_folder(session: Callable[..., None]) -> None:
    reward = cell("WEIGHT = 2.0\ndef mine(completions, **columns): return [WEIGHT for _ in completions]\n")
    result = train(CONFIG, reward=[reward["mine"], exact_answer])
    assert result.config.algorithm.reward == (
        f"{result.folder}/rewards.py:mine",
        "kintsugi.rollout.rewards.builtin.exact_answer",
    )
    assert "WEIGHT = 2.0" in (result.folder / "rewards.py").read_text()


def test_a_reward_that_can_not_be_called_with_the_columns_is_refused_before_anything_starts(
    session: Callable[..., None], tmp_path: Path
) -> None:
    reward = cell("def mine(completions): return [1.0 for _ in completions]\n")
    with pytest.raises(ConfigError, match="answer"):
        train(CONFIG, reward=reward["mine"])
    assert not (tmp_path / "runs").exists()


def test_what_is_no_reward_is_refused() -> None:
    with pytest.raises(UserError, match="expected functions or their dotted paths, got float"):
        train(CONFIG, reward=[1.0])  # type: ignore[list-item]


@pytest.mark.parametrize("wrong", [{"name": "mine"}, None, 3, b"mine.yaml"])
def test_what_is_no_configuration_is_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match="expected a `Config` or the path of a recipe, got "):
        train(wrong)


def test_weights_of_what_is_no_reward_are_refused() -> None:
    with pytest.raises(UserError, match="expected functions or their dotted paths, got int"):
        train(CONFIG, reward={3: 1.0})  # type: ignore[dict-item]


def test_a_value_of_the_wrong_type_is_refused_as_in_a_file() -> None:
    wrong = Config(name="mine", seed="three")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"`seed` \(from Python\): expected a whole number, got 'three'"):
        train(wrong)


def test_sections_may_be_plain_dictionaries(session: Callable[..., None]) -> None:
    config = Config(
        name="mine",
        model={"new": {"max_positions": 32}},  # type: ignore[arg-type]
        data={"max_digits": 1, "num_eval": 10},  # type: ignore[arg-type]
        algorithm={"batch_size": 4, "steps": 3},  # type: ignore[arg-type]
    )
    assert train(config).config.algorithm.steps == 3


def test_a_failed_run_raises_what_the_command_would_have_said(
    session: Callable[..., None], tmp_path: Path
) -> None:
    session("open(folder + '/journal', 'w'); sys.exit('cause: model-0: disk full\\nerror: the run failed')")
    with pytest.raises(RunFailed, match=r"^cause: model-0: disk full\nerror: the run failed$"):
        train(CONFIG)
    assert load_config(tmp_path / "runs/mine-1/config.yaml").name == "mine"


def test_a_mistake_that_only_the_session_sees_is_a_user_error_and_leaves_no_folder(
    session: Callable[..., None], tmp_path: Path
) -> None:
    session("print('error: port taken', file=sys.stderr); sys.exit(2)")
    with pytest.raises(UserError, match=r"^port taken$"):
        train(CONFIG)
    assert list((tmp_path / "runs").iterdir()) == []


def test_what_the_session_noted_is_passed_on(
    session: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    session("print('note: 3 rows were left out', file=sys.stderr)")
    train(CONFIG)
    assert capsys.readouterr().err == "note: 3 rows were left out\n"


def test_the_workers_find_modules_where_the_caller_does(session: Callable[..., None], tmp_path: Path) -> None:
    session("open(folder + '/path', 'w').write(os.environ['PYTHONPATH'])")
    sys.path.insert(0, str(tmp_path / "beside"))
    try:
        result = train(CONFIG)
    finally:
        sys.path.remove(str(tmp_path / "beside"))
    assert str(tmp_path / "beside") in (result.folder / "path").read_text().split(":")


def test_a_run_that_has_not_ended_has_no_result(session: Callable[..., None], tmp_path: Path) -> None:
    folder = train(CONFIG).folder
    (folder / "summary.json").unlink()
    with pytest.raises(UserError, match="expected a run that has ended"):
        read_run(folder)


def test_a_function_gets_the_metrics_of_every_step_and_evaluation_once(session: Callable[..., None]) -> None:
    seen: list[dict[str, float | None]] = []
    train(CONFIG, on_step=seen.append)
    assert seen == [
        {"step": 1, "reward/mean": 0.5},
        {"step": 2, "reward/mean": 0.7, "kl": 0.1},
        {"step": 2, "eval/accuracy": 0.9},
    ]


def test_an_exception_of_the_function_stops_the_run_and_is_raised(session: Callable[..., None]) -> None:
    def refuse(metrics: dict[str, float | None]) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        train(CONFIG, on_step=refuse)


def test_the_traceback_of_a_reward_is_a_note_of_the_failure(session: Callable[..., None]) -> None:
    session(
        'os.makedirs(f"{folder}/logs"); open(f"{folder}/journal", "w").close()\n'
        'open(f"{folder}/logs/rollout-0.log", "w").write("old\\nTraceback (most recent call last):\\n  boom\\n")\n'
        "sys.exit(1)"
    )
    with pytest.raises(RunFailed) as caught:
        train(CONFIG)
    (note,) = caught.value.__notes__
    assert "rollout-0.log" in note and note.endswith("Traceback (most recent call last):\n  boom")


def test_a_result_is_shown_with_its_curves_in_a_notebook(session: Callable[..., None]) -> None:
    html = train(CONFIG)._repr_html_()
    assert "<svg" in html and "reward: 0.5 → 0.7" in html and "held-out accuracy" in html


def test_a_configuration_shows_what_is_no_default_and_is_copied_with_other_values() -> None:
    assert repr(Config(name="a", seed=3)) == "Config(name='a', seed=3)"
    assert Config(name="a").replace(seed=5).seed == 5
