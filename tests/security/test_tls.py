"""TLS with real certificates: versions, rotation, and client certificates."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import warnings
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from security.test_token_file import AUTHORITY, pem_files
from structlog.testing import capture_logs
from support.every_method import HEALTH, status_of
from support.serving import BOUND_SECONDS, HELLO_IDS, Serving, error_of, read_all, serving, text_request
from support.session_driver import Caller, submit
from support.time_limits import PATIENCE_SECONDS

from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import Identity, cache_salt


def credentials(leaf: trustme.LeafCert | None = None, authority: trustme.CA = AUTHORITY) -> grpc.ChannelCredentials:
    if leaf is None:
        return grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
    return grpc.ssl_channel_credentials(authority.cert_pem.bytes(), leaf.private_key_pem.bytes(), chain)


def secure(s: Serving, chosen: grpc.ChannelCredentials, address: str = "") -> grpc.aio.Channel:
    # A separate pool: gRPC would reuse the connection of an earlier channel with the same arguments.
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.secure_channel(address or s.server.address, chosen, options=options)


def tcp(**settings: Any) -> dict[str, Any]:
    return {"listen": "localhost:0", **settings}


async def test_tls_rejects_plaintext_and_untrusted_certificates(tmp_path: Path) -> None:
    files = pem_files(tmp_path, AUTHORITY.issue_cert("localhost"))
    async with serving(tmp_path, plaintext=False, **tcp(**files)) as s:
        s.engine.answer = lambda request: [5]
        async with secure(s, credentials()) as channel:
            await read_all(s.stub_of(channel).Generate(text_request()))
        async with secure(s, credentials(authority=trustme.CA())) as untrusted:
            assert await status_of(untrusted, HEALTH[0]) == "UNAVAILABLE"
        async with grpc.aio.insecure_channel(s.server.address) as plain:
            assert await status_of(plain, HEALTH[0]) == "UNAVAILABLE"


async def test_tls_versions_before_1_2_are_rejected(tmp_path: Path) -> None:
    """The same client connects to a server of Python's ssl module that accepts these versions."""
    leaf = AUTHORITY.issue_cert("localhost")

    def connects(address: tuple[str, int], version: ssl.TLSVersion) -> bool:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        AUTHORITY.configure_trust(context)
        context.set_ciphers("ALL:@SECLEVEL=0")
        context.set_alpn_protocols(["h2"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = context.maximum_version = version
        with socket.create_connection(address, PATIENCE_SECONDS) as raw:
            try:
                context.wrap_socket(raw, server_hostname="localhost").close()
            except (ssl.SSLError, ConnectionError):
                return False
        return True

    def accept_old_versions(listener: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        leaf.configure_cert(context)
        context.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = ssl.TLSVersion.TLSv1
        with listener.accept()[0] as raw:
            context.wrap_socket(raw, server_side=True).close()

    with socket.create_server(("localhost", 0)) as listener:
        server = asyncio.to_thread(accept_old_versions, listener)
        client = asyncio.to_thread(connects, listener.getsockname()[:2], ssl.TLSVersion.TLSv1_1)
        assert (await asyncio.gather(client, server))[0]
    async with serving(tmp_path, plaintext=False, **tcp(**pem_files(tmp_path, leaf))) as s:
        address = ("localhost", int(s.server.address.rpartition(":")[2]))
        versions = (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
        found = [await asyncio.to_thread(connects, address, version) for version in versions]
        assert found == [False, False, True, True]


async def test_certificate_rotation_ignores_broken_files(tmp_path: Path) -> None:
    """The new certificate is from another authority, so a client that trusts only that authority sees the change.

    Each of the three listeners gets it.
    """
    other = trustme.CA()

    files = pem_files(tmp_path, AUTHORITY.issue_cert("localhost"))
    key = Path(files["tls_key_file"])
    listeners = tcp(**files, admin_listen="localhost:0", gateway_listen="localhost:0")
    async with serving(tmp_path, plaintext=False, **listeners) as s:
        s.engine.answer = lambda request: []
        async with secure(s, credentials()) as before:
            assert await status_of(before, HEALTH[0]) != "UNAVAILABLE"
            await asyncio.to_thread(key.write_text, "half a key")
            with capture_logs() as lines:
                async with asyncio.timeout(BOUND_SECONDS):
                    while not any(line["event"] == "reload_failed" for line in lines):
                        async with secure(s, credentials()) as channel:
                            assert await status_of(channel, HEALTH[0]) != "UNAVAILABLE"
            pem_files(tmp_path, other.issue_cert("localhost"))
            for address in (s.server.address, s.server.admin_address, s.server.gateway_address):
                async with asyncio.timeout(BOUND_SECONDS):
                    while True:
                        async with secure(s, credentials(authority=other), address) as channel:
                            if await status_of(channel, HEALTH[0]) != "UNAVAILABLE":
                                break
                        await asyncio.sleep(0.1)
            # An open connection stays usable.
            await read_all(s.stub_of(before).Generate(text_request()))


async def test_client_without_certificate_is_rejected(tmp_path: Path) -> None:
    clients = trustme.CA()
    (tmp_path / "clients.pem").write_bytes(clients.cert_pem.bytes())

    files = pem_files(tmp_path, AUTHORITY.issue_cert("localhost"))
    settings = tcp(**files, tls_client_ca_file=str(tmp_path / "clients.pem"))
    async with serving(tmp_path, plaintext=False, **settings) as s:
        s.engine.answer = lambda request: [5]
        for untrusted in (None, AUTHORITY.issue_cert("alice@example.org")):
            async with secure(s, credentials(untrusted)) as channel:
                assert await status_of(channel, HEALTH[0]) == "UNAVAILABLE"
        for name in ("alice", "bob"):
            async with secure(s, credentials(clients.issue_cert(f"{name}@example.org"))) as channel:
                await read_all(s.stub_of(channel).Generate(text_request()))
        salts = [request.cache_salt for request in s.engine.submitted]
        wanted = [cache_salt(Identity(f"{name}@example.org", "certificate")) for name in ("alice", "bob")]
        assert salts == wanted


async def test_expired_client_certificate_ends_new_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Admitted requests complete, then the Session ends, as for a revoked token."""
    clients, day = trustme.CA(), datetime.timedelta(days=1)
    (tmp_path / "clients.pem").write_bytes(clients.cert_pem.bytes())
    tomorrow = datetime.datetime.now(datetime.UTC) + day

    files = pem_files(tmp_path, AUTHORITY.issue_cert("localhost"))
    settings = tcp(**files, tls_client_ca_file=str(tmp_path / "clients.pem"))
    leaf = clients.issue_cert("alice@example.org", not_after=tomorrow)
    async with (
        serving(tmp_path, plaintext=False, **settings) as s,
        secure(s, credentials(leaf)) as channel,
    ):
        caller = Caller(s, channel)
        await caller.send(submit(1))
        key = await s.engine.next_request()
        monkeypatch.setattr(identity, "_wall_clock", lambda: tomorrow.timestamp() - 60)
        await caller.send(submit(2))
        await s.engine.next_request(2)
        monkeypatch.setattr(identity, "_wall_clock", lambda: tomorrow.timestamp() + 1)
        await caller.send(submit(3))
        await caller.until(lambda: caller.failed)
        assert {handle: failure.reason for handle, failure in caller.failed.items()} == {3: "UNAUTHENTICATED"}
        for request in list(s.engine.requests):
            s.engine.start(request)
            s.engine.tokens(request, HELLO_IDS)
            s.engine.finish_by(request, FinishReason.LENGTH)
        await caller.until(lambda: len(caller.finished) == 2)
        assert key
        assert (await error_of(caller.call)).reason == "UNAUTHENTICATED"
