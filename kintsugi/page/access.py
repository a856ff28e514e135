"""Rights of readers: the decision about a request, as the page needs it.

`PageAccess` is the seam: the page asks `decide` for every request and calls `record` for every action. `SessionAccess`
is complete by itself: viewers need the token that was printed when the page was started, unless it was started without
one for this machine; a second token may act. Tokens with names, scopes and an audit log are another implementation of
the same protocol (a file of tokens, `Gate.decide`, `audit.record`).
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from pathlib import Path
from typing import Protocol

import msgspec

from kintsugi.run_folder.layout import RunFolder
from kintsugi.telemetry.events import EventLog, Note

VIEW = "view"
ACTIONS = ("stop", "scale", "resume")
PAGE = "page-0"
"""Name under which actions of the page are in the run's events."""
_RANK = {"viewer": 1, "operator": 2, "editor": 3, "admin": 4}


class PageDecision(msgspec.Struct, frozen=True):
    """Outcome of a request: `PageDecision(200, "operator", "accepted", name="page token", origin="127.0.0.1")`."""

    status: int
    """200, 401 (no or wrong token), 403 (the token has not the right)."""
    role: str
    reason: str
    name: str = ""
    origin: str = ""

    @property
    def is_accepted(self) -> bool:
        return self.status == 200


class PageAccess(Protocol):
    """Decides about requests and records actions. Safe for several threads."""

    def decide(self, token: str | None, action: str, *, run: str | None, origin: str) -> PageDecision:
        """Decide about `view`, `stop`, `scale` or `resume` of a run, or of the page as a whole."""
        ...

    def record(self, run_dir: Path, decision: PageDecision, action: str, *, answer: str, detail: str) -> None:
        """Record an action and its answer; raises OSError or StorageError where that is not possible."""
        ...


class SessionAccess:
    """Two tokens that exist as long as the page: one reads, one acts too."""

    def __init__(self, *, needs_token: bool, may_act: bool, viewer: str = "", operator: str = "") -> None:
        """`needs_token`: viewers on this machine need one too. `may_act`: there is a token that may stop, scale and
        resume."""
        self.viewer_token = (viewer or secrets.token_urlsafe(32)) if needs_token else ""
        self.operator_token = (operator or secrets.token_urlsafe(32)) if may_act else ""

    def decide(self, token: str | None, action: str, *, run: str | None, origin: str) -> PageDecision:
        role = self._role(token)
        if token and not role:
            return PageDecision(
                401,
                "",
                "the token is not known; open the address that `kintsugi page` or `train --page` printed",
            )
        if not role and (self.viewer_token or not _is_loopback(origin)):
            reason = "a token is needed; open the address that `kintsugi page` or `train --page` printed"
            return PageDecision(401, "", reason, origin=origin)
        role = role or "viewer"
        if action != VIEW and _RANK[role] < _RANK["operator"]:
            reason = f"{action} needs the role operator, this page has the role {role}: start `kintsugi page --operate`"
            return PageDecision(403, role, reason, origin=origin)
        return PageDecision(200, role, "accepted", name=f"page token ({role})", origin=origin)

    def _role(self, token: str | None) -> str:
        if not token:
            return ""
        given = token.encode(errors="replace")
        # Both are compared, in constant time.
        is_operator = bool(self.operator_token) and hmac.compare_digest(given, self.operator_token.encode())
        is_viewer = bool(self.viewer_token) and hmac.compare_digest(given, self.viewer_token.encode())
        return "operator" if is_operator else "viewer" if is_viewer else ""

    def record(self, run_dir: Path, decision: PageDecision, action: str, *, answer: str, detail: str) -> None:
        """Write the action to the events of the run, where `kintsugi logs` finds it."""
        log = EventLog(RunFolder(run_dir).events_file(PAGE), process=PAGE)
        try:
            with_detail = f" ({detail})" if detail else ""
            if not log.try_emit(
                Note(f"{action}{with_detail} by {decision.name} from {decision.origin}: {answer}")
            ):
                raise OSError(f"{RunFolder(run_dir).events_file(PAGE)}: the disk does not accept the entry")
        finally:
            log.close()


def _is_loopback(origin: str) -> bool:
    try:
        return ipaddress.ip_address(origin).is_loopback
    except ValueError:
        return False
