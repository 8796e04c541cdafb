"""TLS certificates of the listeners: read from files, verified before use, and read again when they change.

A TLS handshake in memory verifies that the key belongs to the certificate and that the certificate is valid today.
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
    """The certificate chain of the listeners, and the authority that signs client certificates."""

    chain: bytes
    key: bytes
    client_authority: bytes | None
    expires_at: datetime

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.chain)], self.client_authority)

    def context(self) -> ssl.SSLContext:
        """Return the certificates as a listener without gRPC expects them."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with memory_file(self.chain) as chain, memory_file(self.key) as key:
            context.load_cert_chain(chain, key)
        if self.client_authority is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=_pem(self.client_authority))
        return context


class ServerCertificates:
    """Certificates of the TCP listeners, reloaded on change. The constructor raises ConfigurationError."""

    def __init__(self, settings: SchedulerSettings) -> None:
        names = [settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file]
        self._file = ReloadingFile([Path(name) for name in names if name], lambda: _read_and_log(settings))
        self._asks_for_client = bool(settings.tls_client_ca_file)
        self._logged: tuple[datetime, int] | None = None
        self._context: tuple[Certificates, ssl.SSLContext] | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials for one listener; two must not share them. New files apply within about a second."""
        sent = self._file.current()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Return the configuration for new connections if it has changed, else None. Called on a gRPC thread."""
            nonlocal sent
            if (certificates := self._file.current()) is sent:
                return None
            sent = certificates
            return certificates.configuration()

        return grpc.dynamic_ssl_server_credentials(
            sent.configuration(),
            fetch,  # type: ignore[arg-type]  # None is documented, the stubs leave it out
            require_client_authentication=self._asks_for_client,
        )

    @property
    def expires_at(self) -> datetime:
        return self._file.current().expires_at

    def context(self) -> ssl.SSLContext:
        """Return a context with the certificates in force, for the next connection. Any thread."""
        certificates = self._file.current()
        if self._context is None or self._context[0] is not certificates:
            self._context = certificates, certificates.context()
        return self._context[1]

    def log_expiry(self, now: datetime) -> None:
        """Log once a day that the certificate expires within 14 days, or has expired."""
        expires_at = self.expires_at
        days_left = (expires_at - now).days
        if expires_at - now > _SOON or self._logged == (expires_at, days_left):
            return
        self._logged = expires_at, days_left
        if expires_at <= now:
            log.error("certificate_expired", expired_at=expires_at.isoformat(), hint="new callers cannot connect")
        else:
            log.warning("certificate_expires_soon", days_left=days_left, expires_at=expires_at.isoformat())


def _read_and_log(settings: SchedulerSettings) -> Certificates:
    try:
        certificates = read_certificates(settings)
    except ConfigurationError as error:
        raise ConfigurationError(settings.named(str(error))) from None
    left, asks_for_client = certificates.expires_at - datetime.now(UTC), certificates.client_authority is not None
    write = log.warning if left < _SOON else log.info
    write("certificate_read", file=settings.tls_cert_file, days_left=left.days, asks_for_client=asks_for_client)
    return certificates


def read_certificates(settings: SchedulerSettings) -> Certificates:
    """Read and verify the files. Raises ConfigurationError with the file and the problem.

    Each file is read once, so that the verified pair is the one in use, even if files change in between.
    """
    chain_file = settings.tls_cert_file
    chain, key = _read("--tls-cert-file", chain_file), _read("--tls-key-file", settings.tls_key_file)
    _check_certificates("--tls-cert-file", chain_file, chain, "the certificate of this server and its chain")
    authority = None
    if settings.tls_client_ca_file:
        authority = _read("--tls-client-ca-file", settings.tls_client_ca_file)
        what = "the certificates of the authorities that sign client certificates"
        _check_certificates("--tls-client-ca-file", settings.tls_client_ca_file, authority, what)
    return Certificates(chain, key, authority, _verify(chain_file, chain, settings.tls_key_file, key))


def _read(setting: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{setting} {path}: {error.strerror}") from None


def _check_certificates(setting: str, path: str, data: bytes, what: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=_pem(data))
    except (ssl.SSLError, ValueError):
        raise ConfigurationError(
            f"{setting} {path} contains no valid certificate in PEM form; write {what} into it"
        ) from None


def _pem(data: bytes) -> str:
    """Return the text of a PEM file. Bytes that are not ASCII can only be comments."""
    return data.decode("ascii", "ignore")


def _verify(chain_file: str, chain: bytes, key_file: str, key: bytes) -> datetime:
    """Run a handshake in memory. Return the expiry of the certificate. Raises ConfigurationError."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # trust the certificate itself, not its issuer
    try:
        with memory_file(chain) as chain_copy, memory_file(key) as key_copy:
            server.load_cert_chain(chain_copy, key_copy, password=_no_password)
            client.load_verify_locations(chain_copy)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigurationError(
                f"--tls-key-file {key_file} is not the key of --tls-cert-file {chain_file}; give the key that this"
                " certificate was made with"
            ) from None
        problem = f" ({error.reason.replace('_', ' ').lower()})" if error.reason else ""
        raise ConfigurationError(
            f"--tls-key-file {key_file} contains no private key in PEM form for --tls-cert-file {chain_file}{problem};"
            " write the key of this certificate into it"
        ) from None
    except OSError as error:  # no descriptor or memory is left; SSLError is an OSError too and comes first
        raise ConfigurationError(f"--tls-cert-file {chain_file} cannot be verified: {error.strerror}") from None
    except ValueError:
        raise ConfigurationError(f"--tls-key-file {key_file} is encrypted; remove the password from the key") from None
    try:
        found = _handshake(server, client)
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(
            f"--tls-cert-file {chain_file}: {error.verify_message}; give a certificate that is valid now, for servers"
        ) from None
    except ssl.SSLError as error:
        raise ConfigurationError(f"--tls-cert-file {chain_file}: {error.reason}") from None
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(found["notAfter"])), UTC)


def _no_password() -> str:
    raise ValueError  # otherwise the library prompts on the terminal


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, object]:
    """Return the server certificate as the client verified it."""
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
