"""Rights at the page by named tokens (`kintsugi token`), with every action in the audit log.

Tokens of this start of the page (`SessionAccess`) are accepted as before; any other token is looked up in the file.
"""

from __future__ import annotations

from pathlib import Path

from kintsugi.access import audit
from kintsugi.access.gate import Caller, Gate
from kintsugi.access.roles import AccessRole, Action
from kintsugi.page.access import PageDecision, SessionAccess


class TokenAccess(SessionAccess):
    """Decides by the tokens of this start, then by the file of tokens, and records in the audit log."""

    def __init__(self, gate: Gate, *, needs_token: bool, may_act: bool) -> None:
        super().__init__(needs_token=needs_token, may_act=may_act)
        self._gate = gate

    def decide(self, token: str | None, action: str, *, run: str | None, origin: str) -> PageDecision:
        if not token or self._role(token):
            return super().decide(token, action, run=run, origin=origin)
        found = self._gate.decide(token, Action(action), origin=origin, run=run)
        role = found.caller.role.title if found.caller is not None else ""
        return PageDecision(found.status, role, found.reason, name=found.name, origin=origin)

    def record(self, run_dir: Path, decision: PageDecision, action: str, *, answer: str, detail: str) -> None:
        """Write the action to the audit logs of run and host."""
        caller = Caller(decision.name, AccessRole[decision.role.upper()], origin=decision.origin)
        audit.record(run_dir, caller, Action(action), answer=answer, detail=detail)
