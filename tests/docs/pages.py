"""The pages of docs/ as things that can be done: files to write, programs and commands to run.

A fenced block says what it is by its first word and attributes:

    ```python               a script          ```console            commands behind `$ `, with what they print
    ```python title="f.py"  a file            ```yaml title="f"     a file, also jsonl and others
    ```python illustration  nothing to be done
    ```console root         commands that need root and a while: checked, not run
    ```yaml experiment      an experiment of the laboratory: checked, not run

Everything of a page happens in one folder, in order.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(?P<kind>\w*)(?P<attributes>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_S = 180


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    kind: str
    attributes: dict[str, str]
    body: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[tuple[str, str]]:
        """Each command with what is printed below it."""
        parts = re.split(r"^\$ ", self.body, flags=re.MULTILINE)[1:]
        return [(command, said) for command, _, said in (part.partition("\n") for part in parts)]


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        attributes = {
            name: value or "yes" for name, value in re.findall(r'(\w+)(?:="([^"]*)")?', found["attributes"])
        }
        if "illustration" not in attributes:
            line = text[: found.start()].count("\n") + 1
            yield Block(page, line, found["kind"], attributes, found["body"])


def is_run(block: Block) -> bool:
    return not {"root", "experiment"} & set(block.attributes)


class Follower:
    """Does what a page says, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        scripts = Path(sys.executable).parent
        self._environment = {
            **os.environ,
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "COLUMNS": "200",
        }
        self.num_runs = 0

    def follow(self, page: Path) -> None:
        for number, block in enumerate(filter(is_run, blocks_of(page))):
            match block.kind:
                case "console":
                    for command, said in block.commands:
                        self._run(["bash", "-c", command], block, said=said)
                case "python" if "title" not in block.attributes:
                    script = self._folder / f"script_{number}.py"
                    script.write_text(block.body)
                    self._run([sys.executable, str(script)], block)
                case _ if "title" in block.attributes:
                    (self._folder / block.attributes["title"]).write_text(block.body)

    def _run(self, command: list[str], block: Block, *, said: str = "") -> None:
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        self.num_runs += 1
        assert done.returncode == 0, f"{block.place}: {command[-1]}\n{done.stdout}{done.stderr}"
        assert said.strip() in done.stdout, f"{block.place}: {command[-1]}\n{done.stdout}"
