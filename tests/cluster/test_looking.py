"""A run is looked at by people while it goes on and is disturbed, and one prompt is followed through that."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kintsugi.journal.facts import ProcessLost, TicketReturned
from tests.cluster.real_runs import Run, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KILLED = "rollout-0"
PROCESSES = ("model-0", "model-1", "rollout-0", "server-1", "manager-0")


class Looked:
    """What the commands said."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.figures = ""
        self.live = ""
        self.followed = ""
        self.watched = ""


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Looked]:
    """Standing at a step, all commands look; then a rollout worker is killed, and the run goes on to its end."""
    run = Run(tmp_path_factory.mktemp("looking") / "run")
    try:
        looked = Looked(run)
        run.start("cluster.hosts=2", gates=(4,))
        run.wait_at(4)
        followed = run.command("logs", str(run.run_dir), "--follow", "--kind", "StepCommitted")
        watched = run.command("watch", str(run.run_dir), "--port", "0")
        assert watched.stdout is not None
        address = watched.stdout.readline().split()[-1]
        # Hosts are looked at once a second, and a run of four steps may be younger than that.
        until(lambda: num_sampled(figures_at(address)) == len(PROCESSES), "figures of every process")
        looked.figures = figures_at(address)
        code, looked.live = run.ask("logs", str(run.run_dir), "--process", "master-0", "--kind", "Transition")
        assert code == 0, looked.live
        run.kill(KILLED)
        until(lambda: any(isinstance(fact, ProcessLost) for fact in run.facts), "the loss to be known")
        run.let_through(4)
        code, errors = run.end()
        assert code == 0, errors
        looked.followed, looked.watched = ended(followed), ended(watched)
        run.assert_nothing_left()
        yield looked
    finally:
        run.close()


def figures_at(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as page:
        content: bytes = page.read()
        return content.decode()


def num_sampled(figures: str) -> int:
    return sum(
        f'kintsugi_process_cpu_seconds_total{{process="{process}"}}' in figures for process in PROCESSES
    )


def ended(command: subprocess.Popen[str]) -> str:
    """All that a command says that ends with the run."""
    output, errors = command.communicate(timeout=30)
    assert command.returncode == 0, errors
    return output


def test_a_run_that_goes_on_can_be_searched(looked: Looked) -> None:
    assert "collecting → training" in looked.live


def test_following_tells_every_step_once_until_the_run_ends(looked: Looked) -> None:
    assert re.findall(r"StepCommitted +step (\d+)", looked.followed) == [str(step) for step in range(1, 8)]


def test_watching_tells_of_the_loss_and_of_the_steps_and_ends_with_the_run(looked: Looked) -> None:
    assert f"{KILLED} " in looked.watched and "killed by SIGKILL" in looked.watched
    assert "step 7 took" in looked.watched
    assert looked.watched.rstrip().endswith("finished")


def test_figures_of_every_process_and_host_are_handed_out(looked: Looked) -> None:
    for process in PROCESSES:
        assert re.search(rf'kintsugi_process_live{{host="host-.",process="{process}"}} 1\.0', looked.figures)
        assert f'kintsugi_process_cpu_seconds_total{{process="{process}"}}' in looked.figures
    for host in ("host-0", "host-1"):
        assert f'kintsugi_host_memory_available_bytes{{host="{host}"}}' in looked.figures


def test_a_prompt_whose_worker_was_killed_is_followed_through_both(looked: Looked, tmp_path: Path) -> None:
    run = looked.run
    ticket = next(fact.ticket for fact in run.facts if isinstance(fact, TicketReturned))
    code, said = run.ask(
        "trace",
        str(run.run_dir),
        ticket,
        "--json",
        "--chrome",
        str(tmp_path / "c"),
        "--otlp",
        str(tmp_path / "o"),
    )
    assert code == 0, said
    trace = json.loads(said)
    names = [station["name"] for station in trace["stations"]]
    expected = ["issued", "assigned", "returned", "assigned", "scored", "batched", "committed", "current"]
    assert [name for name in names if name in expected] == expected
    by_name = {station["name"]: station for station in trace["stations"]}
    done = {"episode", "actor_generate", "request", "generate", "reward", "actor_train", "weights_swap"}
    assert done <= by_name.keys()
    order = ["request", "generate", "reward", "scored", "batched", "committed", "current"]
    starts = [max(s["start"] for s in trace["stations"] if s["name"] == name) for name in order]
    assert starts == sorted(starts)
    trained = {station["process"] for station in trace["stations"] if station["name"] == "actor_train"}
    assert {"model-0", "model-1"} <= trained
    assert trace["row"] and trace["prompt"] and trace["version"] == trace["steps"][-1]
    assert all(station["start"] > 0 and station["exact"] for station in trace["stations"])
    assert json.loads((tmp_path / "c").read_text())["traceEvents"]
    assert json.loads((tmp_path / "o").read_text())["resourceSpans"]


def test_the_same_prompt_is_found_by_its_text_or_its_row(looked: Looked) -> None:
    run = looked.run
    ticket = next(fact.ticket for fact in run.facts if isinstance(fact, TicketReturned))
    _, said = run.ask("trace", str(run.run_dir), ticket, "--json")
    trace = json.loads(said)
    for named in (trace["prompt"], trace["row"].split()[1]):
        code, again = run.ask("trace", str(run.run_dir), named, "--json")
        assert ticket in again if code == 0 else "name one of" in again
