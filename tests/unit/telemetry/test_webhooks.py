from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kintsugi.telemetry.export.webhooks import (
    ATTEMPTS,
    MOST_WAITING,
    Notification,
    NotificationRefused,
    Webhook,
    post,
    webhook_problem,
)

URL = "http://127.0.0.1:1/hook"


def notification(text: str = "slow") -> Notification:
    return Notification(run="runs/demo-1", time=1.0, process="model-1", kind="alert", text=text)


class FakeHook:
    """Takes what is posted, or fails as it is told to."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.taken: list[str] = []
        self.num_tries = 0

    def post(self, url: str, body: bytes) -> None:
        assert url == URL
        self.num_tries += 1
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error
        self.taken.append(json.loads(body)["text"])


def sent(hook: FakeHook, *texts: str) -> list[str]:
    """What was said about it while these were sent."""
    said: list[str] = []
    webhook = Webhook(URL, say=said.append, post=hook.post, first_pause_s=0.001)
    for text in texts:
        webhook.send(notification(text))
    webhook.close()
    return said


def test_alerts_are_posted_in_their_order() -> None:
    hook = FakeHook()
    assert sent(hook, "one", "two", "three") == []
    assert hook.taken == ["one", "two", "three"]


def test_what_is_not_taken_is_tried_again() -> None:
    hook = FakeHook(ConnectionRefusedError("refused"), TimeoutError("slow"))
    assert sent(hook, "one") == []
    assert (hook.taken, hook.num_tries) == (["one"], 3)


def test_trouble_is_told_once_and_so_is_its_end() -> None:
    hook = FakeHook(*[OSError("no route")] * (2 * ATTEMPTS))
    said = sent(hook, "one", "two", "three")
    assert said == [f"alerts can not be posted to {URL}: no route", f"alerts are posted to {URL} again"]
    assert hook.taken == ["three"]


def test_what_is_refused_for_good_is_not_tried_again() -> None:
    hook = FakeHook(NotificationRefused("404 Not Found"))
    assert sent(hook, "one") == [f"alerts can not be posted to {URL}: 404 Not Found"]
    assert hook.num_tries == 1


def test_nobody_waits_and_the_oldest_go_first_when_too_many_wait() -> None:
    release = threading.Event()
    begun = threading.Event()
    hook = FakeHook()

    def post_slowly(url: str, body: bytes) -> None:
        begun.set()
        assert release.wait(timeout=10)
        hook.post(url, body)

    webhook = Webhook(URL, say=lambda text: None, post=post_slowly)
    webhook.send(notification("first"))
    assert begun.wait(timeout=10)
    for number in range(MOST_WAITING + 10):
        webhook.send(notification(str(number)))
    release.set()
    webhook.close()
    assert hook.taken == ["first", *map(str, range(10, MOST_WAITING + 10))]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https://hooks.example.com/services/T0/B0", None),
        ("http://127.0.0.1:9000", None),
        ("ftp://example.com", "its scheme is 'ftp'"),
        ("example.com/hook", "its scheme is ''"),
        ("http:///hook", "it names no host"),
        ("http://host:99999/", "Port out of range 0-65535"),
        ("http://host:0/", "its port is 0"),
    ],
)
def test_a_url_that_nothing_can_be_posted_to_is_known_before(url: str, problem: str | None) -> None:
    assert webhook_problem(url) == problem


@pytest.fixture
def status() -> Iterator[tuple[str, list[int], list[bytes]]]:
    """A real server that answers with what stands in the list."""
    answers: list[int] = []
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            code = answers.pop(0)
            self.send_response(code)
            if 300 <= code < 400:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            bodies.append(b"asked for")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/", answers, bodies
    server.shutdown()
    server.server_close()


def test_an_answer_that_is_no_http_is_a_failure_like_any_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"220 mail.example.com ESMTP\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(OSError, match="no HTTP came back: BadStatusLine"):
            post(f"http://127.0.0.1:{listener.getsockname()[1]}/", b"{}")
        thread.join()
    with pytest.raises(OSError, match="InvalidURL"):
        post("http://127.0.0.1:1/a hook", b"{}")


def test_what_a_server_answers_decides_whether_it_is_tried_again(
    status: tuple[str, list[int], list[bytes]],
) -> None:
    url, answers, bodies = status
    answers += [204, 503, 429, 410]
    post(url, b'{"text": "x"}')
    assert bodies == [b'{"text": "x"}']
    for code in (503, 429):
        with pytest.raises(OSError, match=str(code)):
            post(url, b"{}")
    with pytest.raises(NotificationRefused, match="410"):
        post(url, b"{}")


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_hook_that_is_elsewhere_has_taken_nothing(
    status: tuple[str, list[int], list[bytes]], code: int
) -> None:
    url, answers, bodies = status
    answers.append(code)
    with pytest.raises(NotificationRefused, match=f"{code} .*, it is at /elsewhere"):
        post(url, b"{}")
    assert bodies == [b"{}"], "nobody asks for the page there"
