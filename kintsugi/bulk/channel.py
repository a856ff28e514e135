"""One bulk connection after its set-up: small messages and announced bytes, in both directions.

`TlsChannel` encrypts. `TaggedChannel` sends plain bytes, each chunk with an AES-GMAC tag. The key belongs to one
connection and one direction, and the nonce is the number of the chunk: a chunk that was changed, injected, left out,
reordered, or recorded on another connection or in the other direction does not have the expected tag.

A connection that makes no progress for `STALL_S` fails. Any failure ends the connection.
"""

from __future__ import annotations

import hmac
import os
import socket
import ssl
import struct
from contextlib import suppress
from typing import Protocol, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kintsugi.bulk.exports import Region
from kintsugi.errors import IntegrityError, WorldError

CHUNK_BYTES = 1 << 20
"""Bytes under one tag."""
LARGEST_MESSAGE = 1 << 20
RECORDS_BYTES = 128 << 10
"""Encrypted bytes that are taken from a socket at once."""
STALL_S = 10.0
TAG_BYTES = 16
NONCE_BYTES = 16
"""Random bytes of each side, from which the keys of a connection are derived."""
CLIENT, SERVER = b"kintsugi bulk client", b"kintsugi bulk server"

_length = struct.Struct("<I")


class Channel(Protocol):
    """Either kind; one thread uses it at a time."""

    num_bytes: int
    """Bytes received and sent so far; they grow while a transfer makes progress."""

    def send_message(self, content: bytes) -> None: ...

    def attempt_message(self) -> bytes: ...

    def send_region(self, region: Region) -> None: ...

    def attempt_fill(self, target: memoryview) -> None: ...

    def interrupt(self) -> None:
        """End the connection; a transfer that another thread is in fails."""
        ...

    def close(self) -> None:
        """Close; only for the thread that uses the connection."""
        ...


def connection_keys(key: bytes, *, client_nonce: bytes, server_nonce: bytes) -> dict[bytes, bytes]:
    """Keys of one connection, by the side that sends: HMAC-SHA256 of both nonces under the session's key."""
    return {
        side: hmac.digest(key, side + client_nonce + server_nonce, "sha256")[:16] for side in (CLIENT, SERVER)
    }


class TlsChannel:
    """Messages and bytes over TLS 1.3.

    The library works on buffers in memory, and this class moves them to and from the socket: reading from the socket
    itself, it would need two calls of the kernel for every record of 16 KB.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        """Nothing is sent before the hand-shake."""
        self._socket = connection
        self._arriving, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arriving, self._leaving, server_side=is_server)
        self._buffer = memoryview(bytearray(RECORDS_BYTES))
        self.num_bytes = 0

    def attempt_handshake(self) -> bytes:
        """Agree on keys, within the time-out that the socket has; return the certificate of the other side (DER). From
        then on the time-out is `STALL_S`."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._attempt_more(0, 1)
            except ssl.SSLError:
                with suppress(OSError):  # The other side is told why, if it is still there.
                    self._flush()
                raise
        self._flush()
        self._socket.settimeout(STALL_S)
        return self._tls.getpeercert(binary_form=True) or b""

    def send_message(self, content: bytes) -> None:
        self._send(memoryview(_length.pack(len(content)) + content))

    def attempt_message(self) -> bytes:
        (size,) = _length.unpack(self._attempt_bytes(_length.size))
        return self._attempt_bytes(_checked(size))

    def _attempt_bytes(self, size: int) -> bytes:
        content = bytearray(size)
        self.attempt_fill(memoryview(content))
        return bytes(content)

    def send_region(self, region: Region) -> None:
        for start in range(0, len(region.view), CHUNK_BYTES):
            chunk = region.view[start : start + CHUNK_BYTES]
            self._send(chunk)
            self.num_bytes += len(chunk)

    def attempt_fill(self, target: memoryview) -> None:
        filled = 0
        while filled < len(target):
            try:
                # With a buffer the result is its number of bytes, which the annotation of the library does not say.
                count = cast(int, self._tls.read(len(target) - filled, target[filled:]))
            except ssl.SSLWantReadError:
                self._attempt_more(filled, len(target))
                continue
            except ssl.SSLZeroReturnError:
                raise _ended(filled, len(target)) from None
            filled += count
            self.num_bytes += count

    def _attempt_more(self, filled: int, size: int) -> None:
        """Take what has arrived at the socket, at most one buffer of it."""
        count = self._socket.recv_into(self._buffer)
        if count == 0:
            raise _ended(filled, size)
        self._arriving.write(self._buffer[:count])

    def _send(self, content: memoryview) -> None:
        while content:
            content = content[self._tls.write(content) :]
            self._flush()

    def _flush(self) -> None:
        if self._leaving.pending:
            self._socket.sendall(self._leaving.read())

    def interrupt(self) -> None:
        shut_down(self._socket)

    def close(self) -> None:
        self._socket.close()


class TaggedChannel:
    """Messages and bytes over plain TCP, each chunk with its tag."""

    def __init__(self, connection: socket.socket, *, own_key: bytes, other_key: bytes) -> None:
        # The kernel's own time-outs: a Python time-out would cost a poll per call, and `MSG_WAITALL` its effect.
        connection.settimeout(None)
        timeout = struct.pack("ll", int(STALL_S), int(STALL_S % 1 * 1_000_000))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, timeout)
        self._socket = connection
        self._own, self._other = AESGCM(own_key), AESGCM(other_key)
        self._num_sent = self._num_received = 0
        self.num_bytes = 0

    def send_message(self, content: bytes) -> None:
        frame = _length.pack(len(content)) + content
        self._socket.sendall(frame + self._next_tag(frame))

    def attempt_message(self) -> bytes:
        head = self._attempt_bytes(_length.size)
        (size,) = _length.unpack(head)
        body = self._attempt_bytes(_checked(size))
        self._check(head + body, self._attempt_bytes(TAG_BYTES))
        return body

    def send_region(self, region: Region) -> None:
        for start in range(0, len(region.view), CHUNK_BYTES):
            chunk = region.view[start : start + CHUNK_BYTES]
            tag = self._next_tag(chunk)
            if region.descriptor >= 0:
                self._send_file(region.descriptor, region.offset + start, len(chunk))
            else:
                self._socket.sendall(chunk)
            self._socket.sendall(tag)
            self.num_bytes += len(chunk)

    def _send_file(self, descriptor: int, offset: int, size: int) -> None:
        end = offset + size
        while offset < end:
            count = os.sendfile(self._socket.fileno(), descriptor, offset, end - offset)
            if count == 0:
                raise WorldError(f"a file in memory ended {end - offset} bytes early")
            offset += count

    def attempt_fill(self, target: memoryview) -> None:
        for start in range(0, len(target), CHUNK_BYTES):
            chunk = target[start : start + CHUNK_BYTES]
            self._attempt_receive(chunk)
            self._check(chunk, self._attempt_bytes(TAG_BYTES))
            self.num_bytes += len(chunk)

    def _attempt_bytes(self, size: int) -> bytes:
        content = bytearray(size)
        self._attempt_receive(memoryview(content))
        return bytes(content)

    def _attempt_receive(self, target: memoryview) -> None:
        filled = 0
        while filled < len(target):
            count = self._socket.recv_into(target[filled:], 0, socket.MSG_WAITALL)
            if count == 0:
                raise _ended(filled, len(target))
            filled += count

    def _next_tag(self, content: bytes | memoryview) -> bytes:
        self._num_sent += 1
        return self._own.encrypt(self._num_sent.to_bytes(12, "little"), b"", content)

    def _check(self, content: bytes | memoryview, tag: bytes) -> None:
        self._num_received += 1
        try:
            self._other.decrypt(self._num_received.to_bytes(12, "little"), tag, content)
        except InvalidTag:
            raise IntegrityError(
                f"chunk {self._num_received} of a bulk connection does not have the expected tag"
            ) from None

    def interrupt(self) -> None:
        shut_down(self._socket)

    def close(self) -> None:
        self._socket.close()


def _checked(size: int) -> int:
    """Check the announced size of a message before memory is taken for it."""
    if size > LARGEST_MESSAGE:
        raise IntegrityError(f"expected a message of at most {LARGEST_MESSAGE} bytes, got {size} announced")
    return size


def _ended(got: int, expected: int) -> WorldError:
    return WorldError(f"the bulk connection ended after {got} of {expected} bytes")


def shut_down(connection: socket.socket) -> None:
    """End a connection that another thread may be using; the descriptor stays open, so that it is not used again."""
    with suppress(OSError):  # It has ended already.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
