"""Tokens of a sample with their log-probabilities, where the run recorded them (`kintsugi rollout`)."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kintsugi.config.schema import Config
from kintsugi.errors import KintsugiError
from kintsugi.page.schema import TokenCell
from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.saved_rollouts import SavedSample
from kintsugi.telemetry.step_metrics import SampleRecord

MOST_BYTES = 64 << 20
"""Part of the saved rollouts of one step that is searched for a sample."""
_decoder = msgspec.json.Decoder(SavedSample)


def token_strip(folder: Path, config: Config | None, record: SampleRecord) -> tuple[TokenCell, ...] | None:
    """Return the tokens of a sample; None where they were not recorded."""
    saved = _saved(folder, record)
    if saved is None:
        return None
    texts = _texts(config, saved.tokens)
    return tuple(
        TokenCell(
            text=text,
            logprob=logprob if mask else None,
            trainer_minus_sampler=None,
            entropy=None,
            mask=mask,
            version=version if version >= 0 else None,
        )
        for text, logprob, mask, version in zip(
            texts, saved.logprobs, saved.loss_mask, saved.versions, strict=False
        )
    )


def _saved(folder: Path, record: SampleRecord) -> SavedSample | None:
    wanted, read = msgspec.json.encode(record.ticket), 0
    for path in sorted(RunFolder(folder).rollouts_folder.glob(f"step-{record.step:06}-shard-*.jsonl")):
        try:
            with path.open("rb") as file:
                for line in file:
                    read += len(line)
                    if read > MOST_BYTES:
                        return None
                    if wanted in line:
                        saved = _decoder.decode(line)
                        if (saved.ticket, saved.sample) == (record.ticket, record.sample):
                            return saved
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            continue
    return None


def _texts(config: Config | None, tokens: list[int]) -> list[str]:
    """Return the text of each token; its number where the tokenizer can not be loaded."""
    return [f"[{token}]" for token in tokens] if config is None else _decoded(config, tokens)


def _decoded(config: Config, tokens: list[int]) -> list[str]:
    from kintsugi.model.tokenizer import Tokenizer, character_tokenizer

    try:
        if config.model.path:
            tokenizer = Tokenizer.load(Path(config.model.path))
        else:
            tokenizer = character_tokenizer(config.model.new.alphabet if config.model.new else "")
        return [tokenizer.decode([token]) for token in tokens]
    except (KintsugiError, OSError, ValueError):
        return [f"[{token}]" for token in tokens]
