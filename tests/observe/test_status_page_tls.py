"""The status page over TLS, with the certificate and the authorities of gRPC."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from observe.status_viewer import TOKEN, address, events, get
from security.test_token_file import pem_files
from support.processes import Running, endless, starting, until
from support.time_limits import PATIENCE_SECONDS

from lineclear.process.setting_fields import flag_of


def tls_flags(folder: Path, authority: trustme.CA) -> list[str]:
    """Write a certificate for localhost and its key. Return the flags."""
    files = pem_files(folder, authority.issue_cert("localhost", "127.0.0.1"))
    return [word for setting, path in files.items() for word in (flag_of(setting), path)]


def fetch(server: Running, authority: trustme.CA, path: str, *client: trustme.LeafCert, **headers: str) -> Any:
    """Return the response to GET over TLS. Raises ssl.SSLError if one side does not trust the other."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    for leaf in client:
        leaf.configure_cert(context)
    connection = http.client.HTTPSConnection(*address(server), timeout=PATIENCE_SECONDS, context=context)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


@pytest.fixture
def start_on_a_socket(model: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """The clients of Running have no TLS, so gRPC is on a Unix socket."""
    with starting(model, "--listen", f"unix:{tmp_path}/s", "--status-listen", "127.0.0.1:0") as start_scheduler:
        yield start_scheduler


def test_the_page_has_the_certificate_of_the_other_addresses(
    start_on_a_socket: Callable[..., Running], tmp_path: Path, tokens: Path
) -> None:
    authority, other = trustme.CA(), trustme.CA()
    server = start_on_a_socket(*tls_flags(tmp_path, authority), "--admin-token-file", str(tokens))
    assert server.wait_for("status_page_listening")["url"].startswith("https://")
    assert fetch(server, authority, "/status").status == 200
    stream = events(fetch(server, authority, "/status/steps", Authorization=f"Bearer {TOKEN}"))
    assert "state" in next(stream)
    list(server.stub.Generate(endless()))
    assert any(step["ended"] for data in stream for step in data.get("steps", ()))
    with pytest.raises(ssl.SSLCertVerificationError):
        fetch(server, other, "/status")
    with pytest.raises((http.client.HTTPException, OSError)):
        get(server, "/status")  # plain HTTP
    with contextlib.ExitStack() as stack:
        for _ in range(60):  # none of them begins the handshake
            stack.enter_context(socket.create_connection(address(server), timeout=PATIENCE_SECONDS))
        assert fetch(server, authority, "/status").status == 200
    tls_flags(tmp_path, other)
    until(lambda: is_trusted(server, other))
    assert not is_trusted(server, authority)


def is_trusted(server: Running, authority: trustme.CA) -> bool:
    try:
        return bool(fetch(server, authority, "/status").status == 200)
    except ssl.SSLCertVerificationError:
        return False


def test_the_page_asks_for_a_client_certificate_where_grpc_does(
    start_on_a_socket: Callable[..., Running], tmp_path: Path
) -> None:
    authority, clients = trustme.CA(), trustme.CA()
    clients.cert_pem.write_to_path(tmp_path / "clients.pem")
    server = start_on_a_socket(*tls_flags(tmp_path, authority), "--tls-client-ca-file", f"{tmp_path}/clients.pem")
    with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
        fetch(server, authority, "/status")
    with pytest.raises((ssl.SSLError, OSError, http.client.HTTPException)):
        fetch(server, authority, "/status", authority.issue_cert("operator@example.org"))
    assert fetch(server, authority, "/status", clients.issue_cert("operator@example.org")).status == 200
