"""Write the problems, with a demonstration of each reply of the model.

python examples/calculator_agent/problems.py > examples/calculator_agent/problems.jsonl
"""

from __future__ import annotations

import itertools
import json
import random
import sys

COUNT = 600


def main() -> None:
    pairs = list(itertools.product(range(10, 100), range(10, 100)))
    for a, b in random.Random(0).sample(pairs, COUNT):
        result = str(a * b)
        row = {
            "prompt": f"{a}*{b}=",
            "completion": result,
            "replies": [f"[{a}*{b}]", result],
            "answer": result,
        }
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
