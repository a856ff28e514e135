"""Models by name: `HuggingFaceTB/SmolLM2-135M-Instruct` of the local cache of the Hugging Face hub, else downloaded.

A path that exists is that path, whatever it is called. Only weights as safetensors, the configuration and the tokenizer
are downloaded; no code of a model is ever run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from kintsugi.errors import ModelError

FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt"]
"""Files of a model; other formats of the same weights are left out."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")


def is_hub_name(path: str) -> bool:
    """Whether a path reads like `owner/name`, or `owner/name@revision`, and its first folder does not exist: what is
    missing below `runs` is a path."""
    return _NAME.fullmatch(path) is not None and not Path(path).parent.exists()


def local_folder(
    path: str,
    *,
    field: str,
    cache_dir: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> str:
    """Return the folder of a model: the path itself, or of a hub name its folder in the local cache, downloaded if
    needed; `say` is called before. ModelError names `field`, and says what to do without a connection."""
    if not is_hub_name(path):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    name, _, revision = path.partition("@")
    try:
        return snapshot_download(
            name, revision=revision or None, cache_dir=cache_dir, allow_patterns=FILES, local_files_only=True
        )
    except LocalEntryNotFoundError:
        say(f"{field}: {path} is not in the local cache of the Hugging Face hub; downloading it")
    expected = (
        f"`{field}`: expected a model folder, or the name of a model on the Hugging Face hub, got {path!r}"
    )
    try:
        return snapshot_download(name, revision=revision or None, cache_dir=cache_dir, allow_patterns=FILES)
    except GatedRepoError as error:
        why = "its owner gives access on request: accept the terms on its page, then `hf auth login`"
        raise ModelError(f"{expected}; {why}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{expected}; there is no such folder, and the hub knows no such model") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        raise ModelError(
            f"{expected}; there is no such folder, it is not in the local cache, and the hub can not be reached "
            f"({type(error).__name__}: {reason}). Where there is a connection: `hf download {name}`; then copy the "
            f"folder here and give its path, or copy ~/.cache/huggingface/hub"
        ) from error
