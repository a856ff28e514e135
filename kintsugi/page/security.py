"""Protection of the page: Host header, tokens in a cookie, headers of every answer, origin and secret of every action.

A page on loopback can be reached by every user of the machine, and by every site that the browser has open. Reading
needs a token, and is kept from other sites by the Host header (a name that a foreign server resolves to this machine is
refused) and by the same-origin policy; acting needs a secret (`csrf`) that only this page can read.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from kintsugi.access.hosts import is_known_host
from kintsugi.errors import KintsugiError, StorageError, UserError
from kintsugi.page.access import VIEW, PageAccess, PageDecision
from kintsugi.page.schema import Failure

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
COOKIE = "kintsugi_page_{port}"
"""Browsers share cookies between all ports of a host, so that the name has the port."""
JSON = "application/json"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DECISION = web.RequestKey("decision", PageDecision)
TOKEN = web.RequestKey("token", str)
"""Token that a request was accepted with; empty if none."""

_log = logging.getLogger(__name__)


class Guard:
    """Checks every request before its handler, and sets the headers of every answer."""

    def __init__(self, access: PageAccess, *, host: str) -> None:
        """`host`: address that the server listens on; its name is accepted in the Host header."""
        self.access = access
        self._secret = secrets.token_bytes(32)
        self._host = host

    def csrf(self, token: str | None) -> str:
        """Return the secret of the actions of this session."""
        return hmac.new(self._secret, (token or "").encode(), hashlib.sha256).hexdigest()

    def check_order(self, request: web.Request, csrf: str) -> None:
        """Raise for an action that did not come from this page."""
        if request.content_type != JSON:
            raise refused(400, f"expected a body of {JSON}, got {request.content_type}")
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise refused(403, f"expected a request of this page, got one of {origin[:200]}")
        if not hmac.compare_digest(csrf.encode(errors="replace"), self.csrf(request[TOKEN] or None).encode()):
            raise refused(403, "the secret of this page is out of date; reload it and try again")

    def middleware(self) -> Middleware:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._answered(request, handler)

        return guarded

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if not is_known_host(request.headers.get("Host"), allowed=(self._host,)):
                raise refused(
                    403, f"expected the name or an address of this machine, got {request.host[:200]!r}"
                )
            if request.path == "/" and "token" in request.query:
                return self._logged_in(request)
            run = request.match_info.get("run")
            token, origin = token_of(request), request.remote or ""
            decision = self.access.decide(token, VIEW, run=run, origin=origin)
            if decision.status in (401, 429) and "Authorization" not in request.headers:
                # The cookie may be of an earlier page at this address.
                token, decision = None, self.access.decide(None, VIEW, run=run, origin=origin)
            if not decision.is_accepted:
                raise refused(decision.status, decision.reason)
            request[DECISION], request[TOKEN] = decision, token or ""
            return await handler(request)
        except web.HTTPException as error:
            return _failure(error.status, error.text or error.reason, request)
        except UserError as error:
            return _failure(400, str(error), request)
        except (ConnectionResetError, TimeoutError):
            raise
        except (StorageError, OSError) as error:
            return _failure(500, str(error), request)
        except KintsugiError as error:
            return _failure(409, str(error), request)
        except Exception as error:  # noqa: BLE001 - the boundary of a request: recorded, and answered
            _log.exception("%s %s", request.method, request.path)
            return _failure(500, f"an error of the page itself: {type(error).__name__}: {error}", request)

    def _logged_in(self, request: web.Request) -> web.StreamResponse:
        """Move the token of an address into a cookie, so that it is in no history and no log."""
        token = request.query["token"]
        decision = self.access.decide(token, VIEW, run=None, origin=request.remote or "")
        if not decision.is_accepted:
            return _failure(decision.status, decision.reason, request)
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(cookie_name(request), token, httponly=True, samesite="Lax", path="/")
        return response


def token_of(request: web.Request) -> str | None:
    """Return the token of a request: of the header, else of the cookie."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return request.cookies.get(cookie_name(request)) or None


def cookie_name(request: web.Request) -> str:
    return COOKIE.format(port=request.url.port or 0)


def refused(status: int, text: str) -> web.HTTPException:
    """Return an exception that is answered with this status and sentence."""
    kinds: dict[int, type[web.HTTPException]] = {
        400: web.HTTPBadRequest,
        401: web.HTTPUnauthorized,
        403: web.HTTPForbidden,
        404: web.HTTPNotFound,
        409: web.HTTPConflict,
        429: web.HTTPTooManyRequests,
        503: web.HTTPServiceUnavailable,
    }
    return kinds.get(status, web.HTTPForbidden)(text=text)


def _failure(status: int, text: str, request: web.Request) -> web.Response:
    if request.path.startswith("/api/"):
        return web.Response(status=status, body=msgspec.json.encode(Failure(error=text)), content_type=JSON)
    return web.Response(status=status, text=f"{text}\n", content_type="text/plain")


async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Set the headers of an answer, before it is sent."""
    for name, value in HEADERS.items():
        response.headers[name] = value
    response.headers.setdefault("Cache-Control", "no-store")
