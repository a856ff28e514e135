"""A span for what a rank is asked: which call of which step, for which prompts; which version it published."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from kintsugi.messages import Body, FetchWeights, RunCall
from kintsugi.operations import FetchState
from kintsugi.runtime import SPANS, SYSTEM_CLOCK
from kintsugi.transfers import FetchRelayed
from kintsugi.transport import subject
from kintsugi.types import ticket_of

QUICK_S = 0.1
OFTEN = (FetchWeights, FetchState, FetchRelayed)
"""Asked again and again, for a piece each time: only those that took a while are worth a line."""
MOST_TICKETS = 64
"""Of which a span names all; of a larger batch the journal knows them."""


@contextmanager
def recorded(body: Body) -> Iterator[None]:
    """Around the answer to a request. The call of a graph has its own name, the others that of the request."""
    since = SYSTEM_CLOCK.monotonic()
    error: str | None = None
    try:
        yield
    except Exception as failure:
        error = type(failure).__name__
        raise
    finally:
        is_quick = SYSTEM_CLOCK.monotonic() - since < QUICK_S
        if not (isinstance(body, OFTEN) and is_quick):
            SPANS.add(_name(body), {**subject(body), **_call(body), "error": error}, since=since)


def _name(body: Body) -> str:
    """`CommitStep` → `commit_step`."""
    if isinstance(body, RunCall):
        return body.call
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(body).__name__).lower()


def _call(body: Body) -> dict[str, object]:
    if not isinstance(body, RunCall):
        return {}
    tickets = dict.fromkeys(ticket_of(item.key) for shard in body.shards for item in shard.items)
    named = ",".join(tickets) if len(tickets) <= MOST_TICKETS else None
    return {"stage": body.stage, "generation": body.generation, "tickets": named}
