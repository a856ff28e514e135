"""Models of commands and recipes as local folders: a path, a run, or a name on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kintsugi.cli.output import print_message
from kintsugi.config.recipe import Resolved
from kintsugi.model.hub import is_hub_name, local_folder
from kintsugi.run_folder import reader
from kintsugi.run_folder.layout import RunFolder


def with_local_models(resolved: Resolved) -> Resolved:
    """Replace the names of models on the hub by their local folders, downloaded if they are not there yet. Origins keep
    the names."""
    config, origins = resolved.config, dict(resolved.origins)
    for name in ("model", "critic", "reference", "reward_model"):
        section, field = getattr(config, name), f"{name}.path"
        if section is None or section.path is None or not is_hub_name(section.path):
            continue
        folder = local_folder(section.path, field=field, say=print_message)
        origins[field] = f"{origins[field]}: {section.path} of the hub"
        config = msgspec.structs.replace(config, **{name: msgspec.structs.replace(section, path=folder)})
    return Resolved(config, origins)


def model_folder(model: Path, *, field: str) -> Path:
    """Return the folder of a model argument: a folder, a run (its newest checkpoint), or a name on the hub."""
    for folder in (model, Path("runs") / model):
        if RunFolder(folder).config_file.is_file():
            return reader.chosen_checkpoint(folder, step=None)
    return Path(local_folder(str(model), field=field, say=print_message))
