"""Progress bar of `kintsugi import`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def import_bar() -> Iterator[Callable[[int, int], None]]:
    """Show one bar of the weights that are written, from the first call on; off a terminal only its end is shown."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("weights"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as bar:
        tasks: list[TaskID] = []

        def show(done: int, total: int) -> None:
            if not tasks:
                tasks.append(bar.add_task("weights", total=total))
            bar.update(tasks[0], completed=done)

        yield show
