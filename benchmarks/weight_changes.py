"""Bytes of the difference between consecutive checkpoints of a run: what an update costs a host that has the last one.

kintsugi train RECIPE checkpoint.every=1 checkpoint.keep=10 …
python benchmarks/weight_changes.py RUN …
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # So that it runs as a script.

from kintsugi.model.huggingface import WeightFiles
from kintsugi.weights import delta
from kintsugi.weights.manifest import tensor_bytes


def main() -> None:
    for run in (Path(argument) for argument in sys.argv[1:]):
        steps = sorted((run / "checkpoints").glob("step-*"))
        for earlier, later in pairwise(steps):
            before, after = WeightFiles(earlier), WeightFiles(later)
            size = num_bytes = num_changed = num_elements = 0
            seconds = 0.0
            for name in after.shapes:
                new, old = after.tensor(name), before.tensor(name)
                content, base = tensor_bytes(new), tensor_bytes(old)
                since = time.process_time()
                num_bytes += len(delta.encode(content, base, item_bytes=new.element_size()))
                seconds += time.process_time() - since
                size += len(content)
                num_elements += new.numel()
                num_changed += int((new != old).sum())
            print(
                f"{run.name} {later.name}: {size / 1e6:.1f} MB of {new.dtype}, {num_changed / num_elements:.2%} of the "
                f"elements changed, difference {num_bytes / size:.2%} of the bytes, compared in {seconds:.2f} s of CPU"
            )


if __name__ == "__main__":
    main()
