from __future__ import annotations

import re
import socket
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest

from kintsugi.errors import UserError
from kintsugi.run_folder.layout import RunFolder
from kintsugi.simulation.virtual_clock import VirtualClock
from kintsugi.telemetry.export import prometheus
from kintsugi.telemetry.export.prometheus import (
    CACHED_S,
    FRESH_S,
    LAST_BYTES,
    MOST_ANSWERS,
    MetricsServer,
    _CachedPage,
    render,
)
from kintsugi.telemetry.export.prometheus_text import CONTENT_TYPE
from kintsugi.telemetry.process_reports import write_processes
from kintsugi.telemetry.readings import TOTALS, ClockOffsetReading, HostReading, LinkReading, ProcessReading
from tests.unit.telemetry.recorded_run import NOON, RecordedRun, begun_run
from tests.unit.telemetry.test_process_reports import REPORTS

LINE = re.compile(
    r'[a-zA-Z_:][a-zA-Z0-9_:]*(\{[a-z_]+="(?:[^"\\\n]|\\.)*"(,[a-z_]+="(?:[^"\\\n]|\\.)*")*\})? \S+'
)


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    run = begun_run(tmp_path / "run")
    run.measure("agent-0", ProcessReading("model-0", 7, "S", {"cpu_s": 1.5, "rss_bytes": 2e8}), at=0.0)
    run.measure("agent-0", ProcessReading("model-0", 7, "S", {"cpu_s": 2.5, "rss_bytes": 3e8}), at=1.0)
    run.measure(
        "agent-0", HostReading("host-0", {"load_1": 0.5}), ClockOffsetReading("host-0", 0.1, 0.01), at=1.0
    )
    run.measure("agent-0", LinkReading("model-0", "agent-1", 80, "ESTABLISHED", {"rtt_s": 0.002}), at=1.0)
    return run


def test_the_last_figures_are_told_under_prometheus_names(run: RecordedRun) -> None:
    lines = render(run.folder, now=NOON + 2.0).splitlines()
    assert 'kintsugi_process_cpu_seconds_total{process="model-0"} 2.5' in lines
    assert "# TYPE kintsugi_process_cpu_seconds_total counter" in lines
    assert 'kintsugi_process_rss_bytes{process="model-0"} 300000000.0' in lines
    assert "# TYPE kintsugi_process_rss_bytes gauge" in lines
    assert 'kintsugi_host_load_1{host="host-0"} 0.5' in lines
    assert 'kintsugi_clock_error_seconds{host="host-0"} 0.01' in lines
    assert 'kintsugi_link_rtt_seconds{peer="agent-1",port="80",process="model-0"} 0.002' in lines


def test_every_line_has_the_formats_form_and_names_are_declared_once(run: RecordedRun) -> None:
    write_processes(run.folder, REPORTS)
    RunFolder(run.folder).metrics_file.write_text(
        '{"step": 3, "reward/mean": 0.5, "tokens_per_s": 9, "kl": null}\n'
    )
    text = render(run.folder, now=NOON + 2.0)
    assert text.endswith("\n")
    for line in text.splitlines():
        assert line.startswith("# ") or LINE.fullmatch(line), line
    declared = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(declared) == len(set(declared))
    assert {
        "kintsugi_step 3.0",
        "kintsugi_step_reward_mean 0.5",
        "kintsugi_step_tokens_per_second 9.0",
    } <= set(text.splitlines())


def test_labels_are_escaped(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.measure("agent-0", HostReading('a "b" \\ c\n', {"load_1": float("1")}), at=0.0)
    assert 'kintsugi_host_load_1{host="a \\"b\\" \\\\ c\\n"} 1.0' in render(run.folder, now=NOON)


def test_samples_of_somebody_who_is_gone_are_not_told(run: RecordedRun) -> None:
    assert "kintsugi_process_cpu" not in render(run.folder, now=NOON + 2.0 + FRESH_S)


def measure_many_links(run: RecordedRun, *, at: float) -> None:
    """A look at a host of 32 processes that are connected with each other."""
    values = dict.fromkeys((*sorted(TOTALS), "rtt_s", "unacked", "send_queue_bytes"), 1234567.0)
    links = [
        LinkReading(f"model-{number // 32}", f"model-{number % 32}", 4000, "ESTABLISHED", values)
        for number in range(1000)
    ]
    run.measure(
        "agent-0",
        ProcessReading("model-0", 7, "S", {"cpu_s": at}),
        HostReading("host-0", {"load_1": at}),
        *links,
        at=at,
    )


def test_many_links_hide_neither_processes_nor_the_host(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    run.measure("agent-0", LinkReading("model-0", "rarely", 80, "ESTABLISHED", {"rtt_s": 0.002}), at=2.0)
    for second in range(3, 7):
        measure_many_links(run, at=float(second))
    lines = render(run.folder, now=NOON + 6.0).splitlines()
    assert 'kintsugi_process_cpu_seconds_total{process="model-0"} 6.0' in lines
    assert 'kintsugi_host_load_1{host="host-0"} 6.0' in lines
    assert sum(line.startswith("kintsugi_link_rtt_seconds{") for line in lines) == 1001


def test_no_more_of_a_file_is_read_than_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun_run(tmp_path / "run")
    for second in range(30):
        measure_many_links(run, at=float(second))
    read: list[int] = []
    last_lines = prometheus._last_lines

    def counted(path: Path, most: int = LAST_BYTES) -> list[bytes]:
        lines = last_lines(path, most)
        if path.name == "agent-0.jsonl":
            read.append(len(lines))
        return lines

    monkeypatch.setattr(prometheus, "_last_lines", counted)
    render(run.folder, now=NOON + 29.0)
    assert 10 * 1000 < read[-1] <= 24 * 1000


def test_accelerators_have_a_label_and_temperatures_a_unit(tmp_path: Path) -> None:
    run = begun_run(tmp_path / "run")
    values = {"device_0_utilization": 0.5, "device_11_temperature": 61.0, "device_11_processes": 2.0}
    run.measure("agent-0", HostReading("host-0", values), at=0.0)
    lines = [
        line for line in render(run.folder, now=NOON).splitlines() if "_device_" in line and line[0] != "#"
    ]
    assert lines == [
        'kintsugi_host_device_processes{device="11",host="host-0"} 2.0',
        'kintsugi_host_device_temperature_celsius{device="11",host="host-0"} 61.0',
        'kintsugi_host_device_utilization{device="0",host="host-0"} 0.5',
    ]


def test_the_last_diagnosis_is_told(run: RecordedRun) -> None:
    cause = '{"process":"model-1","host":"host-1","kind":"cpu","confidence":0.9}'
    RunFolder(run.folder).diagnoses_file.write_text(
        f'{{"causes":[]}}\n{{"causes":[{cause}]}}\n{{"causes":[{cause}'
    )
    text = render(run.folder, now=NOON)
    assert "kintsugi_diagnosed_causes 1.0" in text
    assert 'kintsugi_diagnosed_confidence{host="host-1",kind="cpu",process="model-1"} 0.9' in text


def test_a_folder_with_nothing_in_it_has_next_to_no_figures(tmp_path: Path) -> None:
    assert "process" not in render(tmp_path, now=NOON)


def test_the_server_hands_the_page_out_and_nothing_else(run: RecordedRun) -> None:
    with MetricsServer(run.folder, host="127.0.0.1", port=0) as server:
        address = f"http://127.0.0.1:{server.port}"
        with urllib.request.urlopen(f"{address}/metrics", timeout=5) as answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            assert b"kintsugi_diagnosed_causes" in answer.read()
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{address}/journal", timeout=5)
        assert caught.value.code == 404
        caught.value.close()


def test_a_port_that_is_taken_is_the_users_mistake(run: RecordedRun) -> None:
    with (
        MetricsServer(run.folder, host="127.0.0.1", port=0) as server,
        pytest.raises(UserError, match=f"127.0.0.1:{server.port}: expected an address"),
    ):
        MetricsServer(run.folder, host="127.0.0.1", port=server.port)


def test_the_figures_that_only_grow_are_those_of_which_the_documentation_says_so() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    assert [
        name
        for name in sorted(TOTALS)
        if not any(f"`{name}`" in row[1] and "total" in row[2] for row in rows)
    ] == []


def test_requests_of_one_second_read_the_files_once(
    run: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    renders: list[Path] = []

    def count(run_dir: Path) -> str:
        renders.append(run_dir)
        return f"page {len(renders)}"

    monkeypatch.setattr("kintsugi.telemetry.export.prometheus.render", count)
    clock = VirtualClock()
    page = _CachedPage(run.folder, clock=clock)
    assert [page.body() for _ in range(5)] == [b"page 1"] * 5
    clock.advance(CACHED_S)
    assert page.body() == b"page 2"


def test_more_connections_than_can_be_answered_at_once_are_closed(run: RecordedRun) -> None:
    with MetricsServer(run.folder, host="127.0.0.1", port=0) as server, ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            for _ in range(MOST_ANSWERS + 1)
        ]
        assert silent[-1].recv(1) == b""
