"""Runs side by side, from folders that hold what a run leaves behind."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import msgspec
import pytest

from kintsugi.cli import main
from kintsugi.cli.compare import comparison_text, plot, sparkline
from kintsugi.config.recipe import given
from kintsugi.config.schema import AlgorithmSection, Config, ModelSection, NewModel
from kintsugi.errors import UserError
from kintsugi.run_folder.comparison import compare
from kintsugi.run_folder.creation import make_run_folder
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.eval_stats import difference_interval, mcnemar, unpaired_interval
from tests.unit.run_folder.test_reader import SUMMARY


def a_run(
    folder: Path,
    *overrides: str,
    right: list[bool] | None = None,
    problems: str = "same",
    outcome: str = "finished",
) -> Path:
    """A run of ten steps whose reward rises, evaluated before and after."""
    base = Config(
        name="mine", model=ModelSection(new=NewModel()), algorithm=AlgorithmSection(steps=10, batch_size=4)
    )
    make_run_folder(given(base, [*overrides, f"run_dir={folder}"]))
    right = right if right is not None else [True, False]
    share = sum(right) / len(right)
    lines: list[dict[str, float]] = [{"step": 0, "eval/accuracy": 0.0, "eval/problems": len(right)}]
    lines += [{"step": step, "reward/mean": step / 10, "loss": -0.1} for step in range(1, 11)]
    lines += [{"step": 10, "eval/accuracy": share, "eval/problems": len(right)}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdicts = {"step": 10, "problems": problems, "right": right}
    (folder / "verdicts.jsonl").write_text(json.dumps(verdicts) + "\n")
    RunFolder(folder).summary_file.write_text(json.dumps({**SUMMARY, "outcome": outcome}))
    return folder


def test_only_fields_that_differ_are_named_with_where_they_came_from(tmp_path: Path) -> None:
    first, second = a_run(tmp_path / "a"), a_run(tmp_path / "b", "actor.learning_rate=0.01", "seed=3")
    told = compare([first, second]).differences
    assert [(each.field, each.values, each.origins) for each in told] == [
        ("seed", ("0", "3"), ("default", "command line")),
        ("actor.learning_rate", ("0.0005", "0.01"), ("default", "command line")),
    ]


def test_an_absent_section_differs_from_one_that_is_there(tmp_path: Path) -> None:
    fields = {
        each.field: each.values
        for each in compare([a_run(tmp_path / "a"), a_run(tmp_path / "b", "warmup.steps=3")]).differences
    }
    assert fields["warmup"] == ("nothing", "–") and fields["warmup.steps"] == ("–", "3")


def test_runs_that_were_asked_the_same_problems_are_judged_problem_by_problem(tmp_path: Path) -> None:
    first = a_run(tmp_path / "a", right=[True] * 4 + [False] * 16)
    second = a_run(tmp_path / "b", right=[False] + [True] * 13 + [False] * 6)
    (judgement,) = compare([first, second]).judgements
    assert (judgement.only_first, judgement.only_second, judgement.paired) == (1, 10, True)
    assert judgement.difference == pytest.approx(9 / 20)
    assert judgement.low < judgement.difference < judgement.high
    assert judgement.p_value == pytest.approx(2 * 12 / 2**11)


def test_runs_that_were_asked_other_problems_are_compared_as_shares_and_it_is_said(tmp_path: Path) -> None:
    comparison = compare([a_run(tmp_path / "a"), a_run(tmp_path / "b", problems="others")])
    (judgement,) = comparison.judgements
    assert not judgement.paired and judgement.p_value is None
    assert any("same held-out problems" in remark for remark in comparison.remarks)


def test_one_seed_each_is_said_to_tell_little_about_the_recipe(tmp_path: Path) -> None:
    comparison = compare([a_run(tmp_path / "a"), a_run(tmp_path / "b", "actor.learning_rate=0.01")])
    assert any(remark.startswith("One seed each") for remark in comparison.remarks)


def test_runs_that_differ_in_the_seed_alone_show_what_chance_does(tmp_path: Path) -> None:
    comparison = compare([a_run(tmp_path / f"s{seed}", f"seed={seed}") for seed in range(3)])
    assert [group.labels for group in comparison.seeds] == [("A", "B", "C")]
    assert any("only in the seed" in remark for remark in comparison.remarks)
    assert "over 3 seeds" in comparison_text(comparison)


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a")
    with pytest.raises(UserError, match=r"expected different runs to compare, got .*a twice"):
        compare([run, tmp_path / "b" / ".." / "a"])


def test_runs_with_the_same_seed_are_not_counted_as_several_seeds(tmp_path: Path) -> None:
    text = comparison_text(compare([a_run(tmp_path / "a"), a_run(tmp_path / "b")]))
    assert "seeds" not in text and "the same configuration" in text


def test_a_run_that_did_not_finish_is_said_to(tmp_path: Path) -> None:
    comparison = compare([a_run(tmp_path / "a"), a_run(tmp_path / "b", outcome="stopped")])
    assert "B is stopped at step 10 of 10." in comparison.remarks


def test_curves_are_shown_on_one_scale_under_their_steps(tmp_path: Path) -> None:
    text = comparison_text(compare([a_run(tmp_path / "a"), a_run(tmp_path / "b")], metrics=["reward/mean"]))
    header, first, second = (line for line in text.splitlines() if "reward/mean" in line or "▁" in line)
    steps = [f"step {step}" for step in (1, 3, 5, 8, 10)]
    assert header.split() == ["reward/mean", *" ".join(steps).split(), "mean"]
    assert first.startswith("  A  ▁") and first.split()[2:] == ["0.1", "0.3", "0.5", "0.8", "1", "0.55"]
    assert first[3:] == second[3:]


def test_a_figure_that_no_run_has_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward/mean.*got 'reward'"):
        compare([a_run(tmp_path / "a"), a_run(tmp_path / "b")], metrics=["reward"])


def test_the_command_gives_the_comparison_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(a_run(tmp_path / "a")), str(a_run(tmp_path / "b"))]
    monkeypatch.setattr("sys.argv", ["kintsugi", "compare", *names, "--json"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["label"] for run in told["runs"]] == ["A", "B"] and told["curves"][0]["values"]


def test_a_sparkline_spans_the_scale_and_leaves_gaps() -> None:
    assert sparkline([0.0, 0.5, None, 1.0], low=0.0, high=1.0) == "▁▅ █"
    assert sparkline([2.0, 2.0], low=2.0, high=2.0) == "▁▁"


def test_no_problem_that_tells_two_apart_is_not_no_difference() -> None:
    low, high = difference_interval(both=5, only_first=0, only_second=0, neither=5)
    assert low < -0.1 and high > 0.1
    assert mcnemar(only_first=0, only_second=0) == 1.0


def test_the_paired_interval_covers_the_true_difference_about_as_often_as_it_says() -> None:
    chances = {(True, True): 0.4, (True, False): 0.1, (False, True): 0.25, (False, False): 0.25}
    draw, covered = random.Random(5), 0
    for _ in range(1000):
        pairs = draw.choices(list(chances), list(chances.values()), k=60)
        both, first, second, neither = (pairs.count(kind) for kind in chances)
        low, high = difference_interval(both=both, only_first=first, only_second=second, neither=neither)
        covered += low <= 0.15 <= high
    assert 930 <= covered <= 985


def test_pairing_narrows_the_interval_where_answers_agree() -> None:
    low, high = difference_interval(both=40, only_first=1, only_second=5, neither=54)
    loose_low, loose_high = unpaired_interval(0.41, 0.45, counts=(100, 100))
    assert high - low < 0.6 * (loose_high - loose_low)


def test_the_curves_are_drawn_where_there_is_a_library_for_it(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(compare([a_run(tmp_path / "a"), a_run(tmp_path / "b")]), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_runs_without_a_step_have_nothing_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    comparison = compare([a_run(tmp_path / "a"), a_run(tmp_path / "b")])
    with pytest.raises(UserError, match="--png: expected runs with at least one step"):
        plot(msgspec.structs.replace(comparison, curves=()), tmp_path / "curves.png")


def test_without_the_library_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'kintsugi\[plots\]'"):
        plot(compare([a_run(tmp_path / "a"), a_run(tmp_path / "b")]), tmp_path / "curves.png")
