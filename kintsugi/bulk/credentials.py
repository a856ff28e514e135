"""Certificate of one process for bulk connections, and TLS contexts that accept exactly one certificate.

The certificate is made at start and never leaves memory. It proves nothing by itself: the other side has received it
over the control channel, and accepts only that one.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

VALID_DAYS = 3650
CLOCK_SKEW_DAYS = 365
"""Hosts may disagree about the time; a certificate ends with its process, not at a date."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Key and self-signed certificate of one process."""

    certificate: bytes
    """DER, for the other side."""
    _chain: bytes
    """PEM of key and certificate, for the TLS library."""

    @classmethod
    def create(cls, process: str) -> Credentials:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, process[:64])])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=CLOCK_SKEW_DAYS))
            .not_valid_after(now + timedelta(days=VALID_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        chain = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ) + certificate.public_bytes(pem)
        return cls(certificate.public_bytes(serialization.Encoding.DER), chain)

    def accepting(self, peer: bytes) -> ssl.SSLContext:
        """Context of the listening side, for connections of the process with this certificate."""
        return self._pinned(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), peer)

    def connecting(self, peer: bytes) -> ssl.SSLContext:
        """Context of the connecting side, to the process with this certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # The certificate itself is pinned, whatever name it has.
        return self._pinned(context, peer)

    def _pinned(self, context: ssl.SSLContext, peer: bytes) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=peer)
        # The library reads a path; a file in memory leaves no key on a disk.
        descriptor = os.memfd_create("kintsugi-bulk-key", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, self._chain)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return context
