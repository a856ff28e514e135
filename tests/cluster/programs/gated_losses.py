"""The clipped loss of GRPO, with which a test can make every rank stand in the middle of a training call.

While the file `<run>.gates/call-5` exists, no micro-batch after step 5 ends; `<run>.gates/call-5.PID` says that the
rank stands there. Every micro-batch is a line of `<run>.gates/micro_batches`: the step that it is part of.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kintsugi import CustomAlgorithm
from kintsugi.graph.advantages import group_advantages

if TYPE_CHECKING:
    from torch import Tensor

    from kintsugi.config.schema import Algorithm
    from kintsugi.training.objectives import PolicyTokens
    from tests.cluster.programs.custom_algorithms import clipped_loss
else:  # The folder of an algorithm's file is on the search path.
    from custom_algorithms import clipped_loss


def gated_loss(tokens: PolicyTokens, settings: Algorithm) -> Tensor:
    run_dir = Path(os.environ["KINTSUGI_TEST_RUN"])
    step = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    gate = run_dir.with_suffix(".gates") / f"call-{step}"
    with gate.with_name("micro_batches").open("a") as file:
        file.write(f"{step + 1}\n")
    if gate.exists():
        gate.with_name(f"{gate.name}.{os.getpid()}").touch()
    while gate.exists():
        time.sleep(0.005)
    return clipped_loss(tokens, settings)


gated_grpo = CustomAlgorithm(base="grpo", group_advantages=group_advantages, token_loss=gated_loss)
