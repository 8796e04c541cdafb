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

from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.security.memory_file import memory_file
from lineclear.scheduler.security.reloading_file import ReloadingFile
from lineclear.scheduler.settings import SchedulerSettings

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


class ServerCertificates:
    """The certificates of the TCP listeners, read again when their files change. Raises ConfigurationError at first."""

    def __init__(self, settings: SchedulerSettings) -> None:
        names = [settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file]
        self._watched = ReloadingFile([Path(name) for name in names if name], lambda: _read_as_given(settings))
        self._given = self._watched.version
        self._announced: tuple[datetime, int] | None = None
        self.credentials = grpc.dynamic_ssl_server_credentials(
            self._watched.current().configuration(),
            self._fetch,  # type: ignore[arg-type]  # None is documented, the stubs leave it out
            require_client_authentication=bool(settings.tls_client_ca_file),
        )
        """New files are in force for connections made after about a second."""

    @property
    def expires_at(self) -> datetime:
        """When the certificate that is in force expires."""
        return self._watched.current().expires_at

    def announce_expiry(self, now: datetime) -> None:
        """Log once a day that the certificate expires within 14 days, or has expired. To be called now and then."""
        expires_at = self.expires_at
        days_left = (expires_at - now).days
        if expires_at - now > _SOON or self._announced == (expires_at, days_left):
            return
        self._announced = expires_at, days_left
        if expires_at <= now:
            log.error("certificate_expired", expired_at=expires_at.isoformat(), hint="new callers cannot connect")
        else:
            log.warning("certificate_expires_soon", days_left=days_left, expires_at=expires_at.isoformat())

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """What a new connection is to see, None if that is what it was. Called by gRPC on a thread of its own."""
        certificates = self._watched.current()
        if self._watched.version == self._given:
            return None
        self._given = self._watched.version
        return certificates.configuration()


def _read_as_given(settings: SchedulerSettings) -> Certificates:
    try:
        return read_certificates(settings)
    except ConfigurationError as error:
        raise ConfigurationError(settings.named(str(error))) from None


def read_certificates(settings: SchedulerSettings) -> Certificates:
    """What is in the files now. Raises ConfigurationError with the file and what is wrong with it.

    Each file is read once, and what was read is proven: files that are exchanged meanwhile make no pair that was not.
    """
    chain_file = settings.tls_cert_file
    chain, key = _read("--tls-cert-file", chain_file), _read("--tls-key-file", settings.tls_key_file)
    authority = None
    if settings.tls_client_ca_file:
        authority = _read("--tls-client-ca-file", settings.tls_client_ca_file)
        _check_authority(settings.tls_client_ca_file, authority)
    expires_at = _prove(chain_file, chain, settings.tls_key_file, key)
    left = expires_at - datetime.now(UTC)
    say = log.warning if left < _SOON else log.info
    say("certificate_read", file=chain_file, days_left=left.days, asks_for_client=authority is not None)
    return Certificates(chain, key, authority, expires_at)


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{setting} {path}: {error.strerror}") from None


def _check_authority(path: str, authority: bytes) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=authority.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError):
        raise ConfigurationError(f"--tls-client-ca-file {path} holds no certificate in PEM form") from None


def _prove(chain_file: str, chain: bytes, key_file: str, key: bytes) -> datetime:
    """Shake hands with ourselves; when the certificate expires. Raises ConfigurationError."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust the certificate itself: who signed it is not the point
    try:
        with memory_file(chain) as chain_copy, memory_file(key) as key_copy:
            server.load_cert_chain(chain_copy, key_copy, password=_no_password)
            client.load_verify_locations(chain_copy)
    except ssl.SSLError as error:
        what = error.reason or "not a certificate and its key in PEM form"
        problem = what.replace("_", " ").lower()
        raise ConfigurationError(f"--tls-cert-file {chain_file} and --tls-key-file {key_file}: {problem}") from None
    except OSError as error:  # no descriptor or no memory is left; an SSLError is one, too, and comes first
        raise ConfigurationError(f"--tls-cert-file {chain_file} cannot be proven: {error.strerror}") from None
    except ValueError:
        raise ConfigurationError(
            f"--tls-key-file {key_file} is locked by a password; give the key without one"
        ) from None
    try:
        found = _shake_hands(server, client)
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(f"--tls-cert-file {chain_file}: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise ConfigurationError(f"--tls-cert-file {chain_file}: {error.reason}") from None
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
