from __future__ import annotations

import json
from pathlib import Path

from kintsugi.control.protocol import RecordStep
from kintsugi.control.records import Records
from kintsugi.observe.events import EventLog, events_path
from kintsugi.types import Ticket
from tests.unit.control.driven import CONFIG, scored


def test_the_advantage_of_a_sample_whose_tokens_have_their_own_is_their_mean(tmp_path: Path) -> None:
    log = EventLog(events_path(tmp_path, "master-0"), process="master-0")
    records = Records(tmp_path, log, config=CONFIG, job="job")
    metas = scored(Ticket("ppo:0:0:0", "ppo", 0, 0, 0, 3), version=0).samples
    values = {metas[0].key: {"advantage": 0.5}, metas[1].key: {"mean_advantage": -1.5}, metas[2].key: {}}
    records.step(RecordStep(1, "ppo", metas, {}, values, {"loss": 0.25}, {}, ()), now=0.0)
    records.close()
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["advantage"] for line in lines] == [0.5, -1.5, None]
    (figures,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (figures["loss"], figures["advantage/abs_mean"]) == (0.25, 2.0 / 3)
