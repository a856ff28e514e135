"""The decision about one request: credentials, action and run → caller or refusal, with an HTTP status and a reason.

A right token is always accepted, however many wrong ones come from the same address. Wrong ones are answered with 401,
and beyond `FREE_FAILURES` per address and minute with 429; only the former are worth a line of the audit log
(`Decision.is_recorded`), so that a stranger can fill neither the log nor the memory.
"""

from __future__ import annotations

import os
import pwd
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from kintsugi.access.roles import NEEDED, AccessRole, Action, may
from kintsugi.access.tokens import Token, TokenFile
from kintsugi.errors import KintsugiError
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock

FREE_FAILURES = 20
"""Wrong tokens of one address within `WINDOW_S` that are answered with 401 and recorded."""
WINDOW_S = 60.0
MOST_ORIGINS = 4096
"""Addresses whose failures are counted; the one that failed longest ago is forgotten first."""
_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """Origin of a request: `Caller("ada", AccessRole.OPERATOR, origin="10.0.0.7", token="3f9a61c2")`."""

    name: str
    role: AccessRole
    origin: str
    uid: int | None = None
    """User id, of a local caller."""
    token: str = ""
    """Public id of the token."""
    quota: Token | None = None
    """Record of the token with its quotas."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Outcome: `caller` is None if the request is refused."""

    caller: Caller | None
    status: int
    """HTTP status: 200, 401 (no, wrong or expired token), 403 (right token without the right), 429, 503."""
    reason: str
    name: str = ""
    """Name of the token that was refused, where it is known."""
    is_recorded: bool = True
    """Whether a refusal belongs into the audit log."""


class Gate:
    """Decides about requests by a file of tokens. Safe to use from several threads."""

    def __init__(self, tokens: TokenFile, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._tokens = tokens
        self._clock = clock
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """Address → start of its window, wrong tokens in it."""
        self._lock = threading.Lock()

    def decide(
        self, authorization: str | None, action: Action, *, origin: str, run: str | None = None
    ) -> Decision:
        """Decide about an action. `authorization` is the header's value, `Bearer kt_…`, or the token itself.

        `run` is the name of the run folder; None for an action that concerns no run.
        """
        presented = bearer_token(authorization)
        if presented is None:
            return Decision(None, 401, "a token is needed: Authorization: Bearer kt_…", is_recorded=False)
        try:
            token = self._tokens.find(presented)
        except KintsugiError as error:
            return Decision(None, 503, str(error))
        if token is None:
            return self._failed(origin)
        if token.is_expired(self._clock.wall()):
            return Decision(None, 401, f"the token {token.name} has expired", token.name)
        if run is not None and not token.covers(run):
            scope = ", ".join(token.runs)
            return Decision(
                None, 403, f"the token {token.name} is for runs {scope}, not for {run}", token.name
            )
        if not may(token.access_role, action):
            needed = NEEDED[action].title
            return Decision(
                None,
                403,
                f"{action} needs the role {needed}; the token {token.name} has {token.role}",
                token.name,
            )
        caller = Caller(token.name, token.access_role, origin, token=token.id, quota=token)
        return Decision(caller, 200, "accepted", token.name)

    def _failed(self, origin: str) -> Decision:
        now = self._clock.monotonic()
        with self._lock:
            since, count = self._failures.pop(origin, (now, 0))
            if now - since > WINDOW_S:
                since, count = now, 0
            self._failures[origin] = (since, count + 1)
            while len(self._failures) > MOST_ORIGINS:
                self._failures.popitem(last=False)
        if count >= FREE_FAILURES:
            return Decision(
                None, 429, "too many wrong tokens from this address; try again in a minute", is_recorded=False
            )
        return Decision(None, 401, "the token is not known")


def bearer_token(authorization: str | None) -> str | None:
    """`bearer_token("Bearer kt_1") == bearer_token("kt_1") == "kt_1"`; None without credentials."""
    if authorization is None:
        return None
    text = authorization.strip()
    if text[: len(_SCHEME)].lower() == _SCHEME:
        text = text[len(_SCHEME) :].strip()
    return text or None


def local_caller(folder: Path | None = None, *, origin: str | None = None) -> Caller:
    """Return the user of this process. The owner of `folder`, and root, is admin; another user is viewer."""
    uid = os.getuid()
    owner = uid
    if folder is not None:
        try:
            owner = folder.stat().st_uid
        except OSError:
            owner = uid
    role = AccessRole.ADMIN if uid in (owner, 0) else AccessRole.VIEWER
    return Caller(user_name(uid), role, origin or f"local, process {os.getpid()}", uid=uid)


def user_name(uid: int) -> str:
    """Return the login name of a user id; `uid 1234` if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
