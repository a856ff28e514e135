"""`kintsugi export`: copy a checkpoint out of its run folder as a Hugging Face model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from kintsugi.errors import StorageError, UserError
from kintsugi.run_folder import reader


def export_checkpoint(folder: Path, *, to: Path | None = None, step: int | None = None) -> list[Path]:
    """Verify a checkpoint and copy its Hugging Face files; the target is created completely or not at all.

    The default of `to` is `<run name>-step-<step>` in the current folder.
    """
    from kintsugi.checkpoint.store import is_trainer_file

    if to is None:
        number = max(reader.checkpoint_folders(folder), default=0) if step is None else step
        to = Path(f"{folder.resolve().name}-step-{number}")
    if to.exists():
        raise UserError(f"--to: expected a folder that does not exist yet, found {to}")
    checkpoint = reader.chosen_checkpoint(folder, step=step)
    names = [path.name for path in checkpoint.iterdir() if not is_trainer_file(path.name)]
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=f".{to.name}-") as scratch:
            staged = Path(scratch) / "staged"
            staged.mkdir()
            for name in names:
                shutil.copyfile(checkpoint / name, staged / name)
            staged.rename(to)
    except OSError as error:
        raise StorageError(f"could not write {to}: {error.strerror or error}") from error
    return [to / name for name in names]
