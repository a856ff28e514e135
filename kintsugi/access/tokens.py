"""Tokens by name: rights of the bearer of a secret, for which runs, until when. The file holds hashes only.

A token is shown once, when it is added: `kt_3f9a61c2_…`. The part in the middle is public and finds the record; the
rest is 256 random bits. The file has the SHA-256 of the whole. A random secret of that size needs no slow hash: it
cannot be guessed, and a wrong token costs the server microseconds.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from kintsugi.access.roles import AccessRole, role_named
from kintsugi.errors import StorageError, UserError
from kintsugi.runtime.clock import SYSTEM_CLOCK, Clock
from kintsugi.runtime.disk import storage_errors, write_atomically
from kintsugi.runtime.owned_files import open_owned, problem_of, read_owned
from kintsugi.runtime.waits import wait

PREFIX = "kt"
MOST_TOKENS = 10_000
LONGEST_TOKEN = 128
"""Longer credentials are wrong, and are not hashed."""
LOCK_TIMEOUT_S = 10.0
LOCK_POLL_S = 0.02
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_TOKEN = re.compile(rf"{PREFIX}_([0-9a-f]{{8}})_([A-Za-z0-9_-]{{43}})")
_NO_DIGEST = hashlib.sha256(b"no token has this id").hexdigest()


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Record of a token: `Token(id="3f9a61c2", name="ada", role="operator", digest="…", created=1.7e9)`."""

    id: str
    """Public part of the secret, by which the record is found."""
    name: str
    """Name of the bearer, for the audit log."""
    role: str
    digest: str
    """SHA-256 of the whole token, in hexadecimal."""
    created: float
    runs: tuple[str, ...] = ("*",)
    """Patterns of run names: `("grpo-*",)`."""
    expires: float | None = None
    """Wall clock time from which the token is not accepted any more."""
    requests_per_minute: int | None = None
    """Quota at `kintsugi serve`."""
    in_flight: int | None = None
    """Completions that the token may have in flight at `kintsugi serve`."""

    @property
    def access_role(self) -> AccessRole:
        return AccessRole[self.role.upper()]

    def covers(self, run: str) -> bool:
        """Tell whether a run name is in the token's scope."""
        return any(fnmatchcase(run, pattern) for pattern in self.runs)

    def is_expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires


class _Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    tokens: tuple[Token, ...]


def default_token_file() -> Path:
    return access_folder() / "tokens.json"


def access_folder() -> Path:
    """Folder of tokens and of the host's audit log: `$KINTSUGI_HOME`, else `~/.kintsugi`."""
    given = os.environ.get("KINTSUGI_HOME")
    return Path(given) if given else Path.home() / ".kintsugi"


class TokenFile:
    """The tokens of a file, read again when the file changes. Safe to use from several threads.

    Every use checks owner and permissions: a file that others can read is refused (UntrustedFile), a damaged one raises
    StorageError. A file that does not exist has no tokens.
    """

    def __init__(self, path: Path, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._by_id: dict[str, Token] = {}

    def find(self, presented: str) -> Token | None:
        """Return the record of a presented token; None for a wrong one. Expiry is for the caller to check.

        The digests are compared in constant time, also if no record has the id.
        """
        tokens = self._tokens()
        if len(presented) > LONGEST_TOKEN or (parts := _TOKEN.fullmatch(presented)) is None:
            return None
        found = tokens.get(parts[1])
        digest = hashlib.sha256(presented.encode()).hexdigest()
        is_right = hmac.compare_digest(digest, found.digest if found is not None else _NO_DIGEST)
        return found if is_right else None

    def all(self) -> list[Token]:
        """Return the records in the order of their names."""
        return sorted(self._tokens().values(), key=lambda token: token.name)

    def add(
        self,
        name: str,
        *,
        role: str,
        runs: tuple[str, ...] = ("*",),
        expires: float | None = None,
        requests_per_minute: int | None = None,
        in_flight: int | None = None,
    ) -> str:
        """Add a token and return its text, which is not stored anywhere."""
        if _NAME.fullmatch(name) is None:
            raise UserError(
                f"expected a name of letters, digits and . _ @ - that begins with a letter or digit, got {name!r}"
            )
        if expires is not None and expires <= self._clock.wall():
            raise UserError("--expires: expected a time in the future")
        if any(not pattern for pattern in runs) or not runs:
            raise UserError("--runs: expected a pattern of run names, e.g. 'grpo-*', got an empty one")
        granted = role_named(role)
        with self._exclusive():
            tokens = self._read()
            if any(token.name == name for token in tokens):
                raise UserError(
                    f"{self.path} has a token {name} already; revoke it first, or choose another name"
                )
            if len(tokens) >= MOST_TOKENS:
                raise UserError(f"{self.path} has {MOST_TOKENS:,} tokens, the maximum; revoke some first")
            taken = {token.id for token in tokens}
            identifier = next(each for each in iter(lambda: secrets.token_hex(4), None) if each not in taken)
            text = f"{PREFIX}_{identifier}_{secrets.token_urlsafe(32)}"
            token = Token(
                id=identifier,
                name=name,
                role=granted.title,
                digest=hashlib.sha256(text.encode()).hexdigest(),
                created=self._clock.wall(),
                runs=runs,
                expires=expires,
                requests_per_minute=requests_per_minute,
                in_flight=in_flight,
            )
            self._write((*tokens, token))
        return text

    def revoke(self, name: str) -> Token:
        """Remove a token. Servers that use the file refuse it from their next request on."""
        with self._exclusive():
            tokens = self._read()
            revoked = next((token for token in tokens if token.name == name), None)
            if revoked is None:
                names = ", ".join(sorted(token.name for token in tokens)) or "none"
                raise UserError(f"{self.path}: expected the name of a token ({names}), got {name!r}")
            self._write(tuple(token for token in tokens if token is not revoked))
        return revoked

    def _tokens(self) -> dict[str, Token]:
        """Return the records by id. The file is read again if it was replaced or changed, or its permissions were."""
        with self._lock:
            try:
                now = os.stat(self.path, follow_symlinks=False)
            except FileNotFoundError:
                self._seen, self._by_id = None, {}
                return self._by_id
            seen = (
                now.st_ino,
                now.st_dev,
                now.st_mtime_ns,
                now.st_ctime_ns,
                now.st_size,
                now.st_mode,
                now.st_uid,
            )
            if seen != self._seen or problem_of(now, secret=True) is not None:
                self._seen = None
                self._by_id = {token.id: token for token in self._read()}
                self._seen = seen
            return self._by_id

    def _read(self) -> tuple[Token, ...]:
        try:
            data = read_owned(self.path, secret=True)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise StorageError(f"could not read {self.path}: {error.strerror or error}") from error
        try:
            contents = msgspec.json.decode(data, type=_Contents)
        except msgspec.MsgspecError as error:
            raise StorageError(
                f"{self.path} is damaged ({error}): no token is accepted until it is restored or removed"
            ) from error
        for token in contents.tokens:
            if token.role.upper() not in AccessRole.__members__:
                raise StorageError(f"{self.path} is damaged: the token {token.name!r} has an unknown role")
        return contents.tokens

    def _write(self, tokens: tuple[Token, ...]) -> None:
        data = msgspec.json.format(msgspec.json.encode(_Contents(1, tokens)), indent=1)
        with storage_errors(f"could not write {self.path}"):
            write_atomically(self.path, data + b"\n", durable=True, mode=0o600)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock of the file against other commands; the folder is created for this user alone."""
        with storage_errors(f"could not write {self.path}"):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = open_owned(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
        try:
            lock_file(descriptor, what=f"the lock of {self.path}")
            yield
        finally:
            os.close(descriptor)


def lock_file(descriptor: int, *, what: str) -> None:
    """Lock an open file until it is closed; DeadlineExceeded if another process holds the lock too long."""

    def attempt(remaining_s: float) -> bool | None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(min(LOCK_POLL_S, remaining_s))
            return None
        return True

    wait(attempt, whom="another process", what=what, timeout_s=LOCK_TIMEOUT_S)
