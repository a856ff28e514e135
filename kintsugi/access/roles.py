"""Roles of a caller, each with the rights of the one before, and the role that each action needs."""

from __future__ import annotations

from enum import IntEnum, StrEnum

from kintsugi.errors import UserError


class AccessRole(IntEnum):
    """`AccessRole.OPERATOR >= AccessRole.VIEWER`: a role has the rights of all roles below it."""

    VIEWER = 1
    """Reads runs; requests completions of `kintsugi serve`."""
    OPERATOR = 2
    """Stops, scales and resumes runs."""
    EDITOR = 3
    """Starts runs."""
    ADMIN = 4
    """Manages tokens; loads weights into and scales `kintsugi serve`."""

    @property
    def title(self) -> str:
        return self.name.lower()


class Action(StrEnum):
    """Actions that are decided about and recorded."""

    VIEW = "view"
    GENERATE = "generate"
    STOP = "stop"
    SCALE = "scale"
    RESUME = "resume"
    START = "start"
    LOAD_WEIGHTS = "load weights"
    SCALE_SERVICE = "scale service"
    SERVE = "serve"
    ADD_TOKEN = "add token"
    REVOKE_TOKEN = "revoke token"


NEEDED: dict[Action, AccessRole] = {
    Action.VIEW: AccessRole.VIEWER,
    Action.GENERATE: AccessRole.VIEWER,
    Action.STOP: AccessRole.OPERATOR,
    Action.SCALE: AccessRole.OPERATOR,
    Action.RESUME: AccessRole.OPERATOR,
    Action.START: AccessRole.EDITOR,
    Action.LOAD_WEIGHTS: AccessRole.ADMIN,
    Action.SCALE_SERVICE: AccessRole.ADMIN,
    Action.SERVE: AccessRole.ADMIN,
    Action.ADD_TOKEN: AccessRole.ADMIN,
    Action.REVOKE_TOKEN: AccessRole.ADMIN,
}


def may(role: AccessRole, action: Action) -> bool:
    """Tell whether a role has the right to an action.

    >>> may(AccessRole.VIEWER, Action.STOP), may(AccessRole.ADMIN, Action.STOP)
    (False, True)
    """
    return role >= NEEDED[action]


def role_named(name: str) -> AccessRole:
    """Return the role of a name; UserError lists the roles."""
    try:
        return AccessRole[name.upper()]
    except KeyError:
        names = ", ".join(role.title for role in AccessRole)
        raise UserError(f"--role: expected one of {names}, got {name!r}") from None
