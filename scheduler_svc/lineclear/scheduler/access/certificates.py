"""TLS for the listeners: certificates from files, checked before they are used, read again when they change.

Decides whether a certificate can serve at all. The proof is a handshake with ourselves in memory: the key belongs to
the certificate, and the certificate is valid today. Whether its names fit is for the callers to judge.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import structlog

from lineclear.scheduler.access.watched import Watched
from lineclear.scheduler.settings import ConfigurationError, SchedulerSettings

log = structlog.get_logger()

_SOON = timedelta(days=14)


@dataclass(frozen=True, slots=True)
class Certificates:
    """What the listeners present, and whom they trust to sign callers' certificates."""

    chain: bytes
    key: bytes
    client_authority: bytes | None
    expires_at: datetime

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        """As gRPC wants it."""
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.client_authority)


def server_credentials(settings: SchedulerSettings) -> grpc.ServerCredentials | None:
    """What the TCP listeners encrypt with; None where no certificate is set.

    New files are in force for connections made after about a second. Raises ConfigurationError.
    """
    if not settings.tls_cert_file:
        return None
    names = [settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file]
    watched = Watched([Path(name) for name in names if name], lambda: read_certificates(settings))
    given = watched.version

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """What a new connection is to see, None if that is what it was. Called by gRPC on a thread of its own."""
        nonlocal given
        certificates = watched.current()
        if watched.version == given:
            return None
        given = watched.version
        return certificates.configuration()

    return grpc.dynamic_ssl_server_credentials(
        watched.current().configuration(),
        fetch,  # type: ignore[arg-type]  # None is documented, the stubs leave it out
        require_client_authentication=bool(settings.tls_client_ca_file),
    )


def read_certificates(settings: SchedulerSettings) -> Certificates:
    """What is in the files now. Raises ConfigurationError with the file and what is wrong with it."""
    chain_file, key_file = Path(settings.tls_cert_file), Path(settings.tls_key_file)
    chain, key = _read("tls_cert_file", chain_file), _read("tls_key_file", key_file)
    authority = None
    if settings.tls_client_ca_file:
        authority = _read("tls_client_ca_file", Path(settings.tls_client_ca_file))
        _check_authority(Path(settings.tls_client_ca_file))
    expires_at = _prove(chain_file, key_file)
    left = expires_at - datetime.now(UTC)
    say = log.warning if left < _SOON else log.info
    say("certificate_read", file=str(chain_file), days_left=left.days, asks_for_client=authority is not None)
    return Certificates(chain, key, authority, expires_at)


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{setting} {path}: {error.strerror}") from None


def _check_authority(path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise ConfigurationError(f"tls_client_ca_file {path} holds no certificate in PEM form") from None


def _prove(chain_file: Path, key_file: Path) -> datetime:
    """Shake hands with ourselves; when the certificate expires. Raises ConfigurationError."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(chain_file, key_file, password=_no_password)
    except ssl.SSLError as error:
        what = error.reason or "not a certificate and its key in PEM form"
        problem = what.replace("_", " ").lower()
        raise ConfigurationError(f"tls_cert_file {chain_file} and tls_key_file {key_file}: {problem}") from None
    except ValueError:
        raise ConfigurationError(f"tls_key_file {key_file} is locked by a password; give the key without one") from None
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust the certificate itself: who signed it is not the point
    client.load_verify_locations(chain_file)
    try:
        found = _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(f"tls_cert_file {chain_file}: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise ConfigurationError(f"tls_cert_file {chain_file}: {error.reason}") from None
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(found["notAfter"])), UTC)


def _no_password() -> str:
    raise ValueError  # or the library would ask whoever sits at the terminal


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, object]:
    """The server's certificate as the client verified it. In memory."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    waiting = list(ends)
    while waiting:
        for end in tuple(waiting):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            waiting.remove(end)
    found = ends[0].getpeercert()
    assert found is not None
    return dict(found)
