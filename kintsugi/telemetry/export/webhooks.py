"""Notifications that are posted as JSON to a URL, by a thread of their own.

Raising an alert never waits for the webhook. A failed post is repeated a few times with growing pauses; new
notifications wait in a bounded queue, which drops its oldest when full. A failure of the webhook is reported once, and
so is its return.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kintsugi.errors import DeadlineExceeded
from kintsugi.runtime.backoff import growing_pause
from kintsugi.runtime.counters import COUNTERS
from kintsugi.runtime.waits import WaitTable, join, wait

MOST_WAITING = 64
ATTEMPTS = 5
FIRST_PAUSE_S = 0.5
TIMEOUT_S = 5.0
"""Timeout of a connection, and of a response."""
GLANCE_S = 0.1
"""Interval of checks for `close`."""
LONGEST_WAIT_S = 3600.0
LAST_WORDS_S = 3.0
"""Longest time that queued notifications may delay the end of a run."""


class Notification(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of a post: `{"run": …, "time": …, "process": …, "kind": "diagnosis", "text": …}`.

    `text` is what chat services show, so that one of their incoming hooks can be named as it is.
    """

    run: str
    time: float
    """Wall clock."""
    process: str
    """Process that it is about; otherwise the process that raised it."""
    kind: str
    """`alert`, `fault`, `diagnosis` or `learning`."""
    text: str
    values: Mapping[str, float] = {}
    details: Any = None
    """Full content as plain values: the cause with its path and evidence."""


def webhook_problem(url: str) -> str | None:
    """Return why a URL can not be used, if so: `its scheme is 'ftp'`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https"):
        return f"its scheme is {parts.scheme!r}"
    if not parts.hostname:
        return "it names no host"
    return "its port is 0" if port == 0 else None


class NotificationRefused(Exception):
    """A webhook refused permanently: a repetition would be refused as well."""


def post(url: str, body: bytes) -> None:
    """Post a body; raises OSError where a retry may help, NotificationRefused where not."""
    # Imported late: it takes as long as all other imports of a configuration check, which does not need it.
    import http.client
    import urllib.error
    import urllib.request

    class Staying(urllib.request.HTTPRedirectHandler):
        """Refuses redirections: they would be followed by a GET, which posts nothing."""

        def redirect_request(self, *_: Any) -> None:
            return None

    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.build_opener(Staying).open(request, timeout=TIMEOUT_S):
            return
    except urllib.error.HTTPError as error:
        again = error.code >= HTTPStatus.INTERNAL_SERVER_ERROR or error.code in (
            HTTPStatus.REQUEST_TIMEOUT,
            HTTPStatus.TOO_MANY_REQUESTS,
        )
        elsewhere = f", it is at {address}" if (address := error.headers.get("Location")) else ""
        error.close()
        if not again:
            raise NotificationRefused(f"{error.code} {error.reason}{elsewhere}") from error
        raise
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP came back: {error!r}") from error


class Webhook:
    """Posts notifications from a thread of its own, which consumes the queue and ends at `close`.

    hook = Webhook("http://127.0.0.1:9000/alerts", say=lambda text: log.emit(Note(text)))
    hook.send(Notification(run="runs/demo-1", time=now, process="model-1", kind="alert", text="…"))
    """

    def __init__(
        self,
        url: str,
        *,
        say: Callable[[str], None],
        post: Callable[[str, bytes], None] = post,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        self._url, self._say, self._post, self._first_pause_s = url, say, post, first_pause_s
        self._waiting: queue.Queue[bytes] = queue.Queue(MOST_WAITING)
        self._is_failing = False
        # The waits of this thread say nothing about the progress of the process.
        self._waits = WaitTable()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
        self._thread.start()

    def send(self, notification: Notification) -> None:
        """Queue a notification; never blocks and never raises."""
        body = msgspec.json.encode(notification)
        while True:
            try:
                self._waiting.put_nowait(body)
                return
            except queue.Full:
                with suppress(queue.Empty):
                    self._waiting.get_nowait()
                    COUNTERS.add("alerts.dropped")

    def close(self) -> None:
        """Post queued notifications for a short time, then stop."""
        self._closing.set()
        with suppress(DeadlineExceeded):
            join(self._thread, whom="the webhook", what="the last alerts", timeout_s=LAST_WORDS_S)

    def _work(self) -> None:
        """Post until `close` was called and the queue is empty."""
        while True:
            try:
                body = wait(
                    self._attempt_next,
                    whom="anyone",
                    what="an alert",
                    timeout_s=LONGEST_WAIT_S,
                    waits=self._waits,
                )
            except DeadlineExceeded:
                continue
            if not body:
                return
            self._deliver(body)

    def _attempt_next(self, remaining_s: float) -> bytes | None:
        try:
            return self._waiting.get(timeout=min(remaining_s, GLANCE_S))
        except queue.Empty:
            return b"" if self._closing.is_set() else None

    def _deliver(self, body: bytes) -> None:
        reason = ""
        for attempt in range(ATTEMPTS):
            if attempt:
                self._pause(growing_pause(attempt, first_s=self._first_pause_s))
            try:
                self._post(self._url, body)
            except NotificationRefused as error:
                reason = str(error)
                break
            except (OSError, ValueError) as error:  # ValueError: the URL has characters that can not be sent.
                reason = str(error)
            else:
                COUNTERS.add("alerts.posted")
                if self._is_failing:
                    self._say(f"alerts are posted to {self._url} again")
                self._is_failing = False
                return
        COUNTERS.add("alerts.dropped")
        if not self._is_failing:
            self._say(f"alerts can not be posted to {self._url}: {reason}")
        self._is_failing = True

    def _pause(self, seconds: float) -> None:
        def attempt(remaining_s: float) -> bool | None:
            if self._closing.is_set():
                return True
            time.sleep(min(GLANCE_S, max(0.0, remaining_s)))
            return None

        with suppress(DeadlineExceeded):
            wait(attempt, whom="the webhook", what="the next try", timeout_s=seconds, waits=self._waits)
