"""Access to the gateway: which key a request has, and what it may do with it.

Inference needs the API key, or a token of any role; administration needs the admin key, or a token of the role admin.
So the key that clients get changes neither weights nor servers. Administration is recorded in the audit log of the
host, and refused when that cannot be written.
"""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from aiohttp import web

from kintsugi.access.audit import ACCEPTED, record
from kintsugi.access.gate import Caller, Gate, bearer_token
from kintsugi.access.hosts import is_known_host, is_loopback
from kintsugi.access.quota import Quotas
from kintsugi.access.roles import AccessRole, Action, may
from kintsugi.access.tokens import TokenFile
from kintsugi.errors import KintsugiError, StorageError, UserError
from kintsugi.openai_api.api_errors import ApiError, wrong_key
from kintsugi.runtime.owned_files import read_owned

LONGEST_KEY = 1024


@dataclass(frozen=True)
class Credentials:
    """Keys of a gateway, and the address it listens on."""

    api_key: str | None = None
    admin_key: str | None = None
    token_file: Path | None = None
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    """Further names by which clients may address the gateway."""

    @property
    def has_keys(self) -> bool:
        return self.api_key is not None or self.token_file is not None

    def check(self, *, insecure: bool) -> None:
        """Refuse keys that protect nothing: UserError."""
        for option, key in (("API key", self.api_key), ("admin key", self.admin_key)):
            if key is not None and not key.strip():
                raise UserError(
                    f"expected an {option} that is not empty, got an empty one; leave it out to serve without"
                )
        if self.admin_key is not None and self.admin_key == self.api_key:
            raise UserError("expected an admin key that differs from the API key, got the same")
        if not self.has_keys and not insecure and not is_loopback(self.host):
            raise UserError(
                f"--host {self.host} accepts connections from other machines: expected `--api-key-file` or `--tokens` "
                "with it, or `--insecure` to serve without any key"
            )
        if self.token_file is not None:
            TokenFile(self.token_file).all()


class GatewayAccess:
    """Decides about the requests of a gateway. For its event loop."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._gate = None if credentials.token_file is None else Gate(TokenFile(credentials.token_file))
        self.quotas = Quotas()

    def check_host(self, request: web.Request) -> None:
        """Refuse a Host header that does not name this machine. Beyond loopback a required key protects as well."""
        credentials = self._credentials
        if credentials.has_keys and not is_loopback(credentials.host):
            return
        if not is_known_host(request.headers.get("Host"), allowed=credentials.allowed_hosts):
            raise ApiError(
                "the Host header names another machine; start with `--allowed-host` if it is this one",
                status=HTTPStatus.MISDIRECTED_REQUEST,
            )

    def sees_details(self, request: web.Request) -> bool:
        """Tell whether a request may see processes and their errors: with any key or, where there is none, locally."""
        if not self._credentials.has_keys:
            return is_loopback(self._credentials.host)
        try:
            self.demand(request, Action.GENERATE)
        except ApiError:
            return False
        return True

    def demand(self, request: web.Request, action: Action) -> Caller:
        """Return the caller of a request that may do this; `ApiError` 401, 403, 429 or 503 otherwise."""
        origin = request.remote or "unknown"
        credentials = self._credentials
        given = bearer_token(_bearer_header(request))
        caller = self._caller_by_key(given, origin=origin)
        if caller is None and self._gate is not None and given is not None:
            decision = self._gate.decide(given, action, origin=origin)
            if decision.caller is None:
                raise _refused(decision.status, decision.reason)
            return decision.caller
        if caller is None and not credentials.has_keys and action is Action.GENERATE:
            return Caller("anonymous", AccessRole.VIEWER, origin)
        if caller is None and not self._has_administrator and action is not Action.GENERATE:
            raise _refused(
                403, "Administration needs a key of its own: start with `--admin-key-file` or `--tokens`."
            )
        if caller is None:
            raise wrong_key(given="Authorization" in request.headers)
        if not may(caller.role, action):
            raise _refused(403, "This key may request completions, but not administer the server.")
        return caller

    @property
    def _has_administrator(self) -> bool:
        return self._credentials.admin_key is not None or self._gate is not None

    def _caller_by_key(self, given: str | None, *, origin: str) -> Caller | None:
        presented = (given or "")[:LONGEST_KEY].encode(errors="replace")
        is_api = _is_key(presented, self._credentials.api_key)
        is_admin = _is_key(presented, self._credentials.admin_key)
        if is_admin:
            return Caller("admin key", AccessRole.ADMIN, origin)
        return Caller("api key", AccessRole.VIEWER, origin) if is_api else None

    async def record(self, caller: Caller, action: Action, *, answer: str = ACCEPTED, detail: str) -> None:
        """Record an action of an administrator before it is carried out; one that cannot be recorded is refused."""
        try:
            await asyncio.to_thread(record, None, caller, action, answer=answer, detail=detail)
        except (KintsugiError, OSError) as error:
            raise _refused(503, f"the audit log of this host cannot be written: {error}") from error


def read_key(path: Path) -> str:
    """Read a key from a file that only this user can read; UntrustedFile otherwise."""
    try:
        return read_owned(path, secret=True).decode().strip()
    except UnicodeDecodeError:
        raise UserError(f"{path}: expected a key as text, got other bytes") from None
    except OSError as error:
        raise StorageError(f"could not read {path}: {error.strerror or error}") from error


def _is_key(presented: bytes, key: str | None) -> bool:
    return key is not None and hmac.compare_digest(presented, key.encode())


def _bearer_header(request: web.Request) -> str | None:
    header = request.headers.get("Authorization")
    return header if header is not None and header[:7].lower() == "bearer " else None


def _refused(status: int, reason: str) -> ApiError:
    kinds = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
    return ApiError(reason, status=HTTPStatus(status), code=kinds.get(status))
