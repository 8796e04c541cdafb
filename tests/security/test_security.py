"""Authentication, tenants and listeners, on real sockets and for every method."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from security.test_tls import credentials, secure, tcp
from security.test_token_file import ALICE, AUTHORITY, BOB, pem_files, token_file
from structlog.testing import capture_logs
from support.every_method import ADMIN, CHANNELZ, HEALTH, METHODS, REFLECTION, bearer, status_of
from support.http2 import Connection, message
from support.serving import BOUND_SECONDS, HELLO_IDS, Serving, error_of, read_all, serving, text_request
from support.session_driver import Caller, submit

from lineclear.scheduler.addresses import is_local
from lineclear.scheduler.core.events import FinishReason
from lineclear.scheduler.grpc_api.server import ADMIN_ONLY, EVERYWHERE
from lineclear.scheduler.grpc_api.token_interceptor import _Token
from lineclear.scheduler.security import identity
from lineclear.scheduler.security.identity import ANONYMOUS, Identity, cache_salt
from lineclear.scheduler.security.reloading_file import CHECK_SECONDS, ReloadingFile
from lineclear.scheduler.security.token_file import read_tokens
from lineclear.scheduler.settings import SchedulerSettings


async def wait_for_status(channel: Any, method: str, token: str, *, refused: bool) -> None:
    """Call until the token is rejected or, with `refused` False, accepted."""
    async with asyncio.timeout(BOUND_SECONDS):
        while (await status_of(channel, method, *bearer(token)) == "UNAUTHENTICATED") is not refused:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def test_default_listen_address_is_local() -> None:
    settings = SchedulerSettings()
    assert settings.listen == "127.0.0.1:50051"
    assert is_local(settings.listen)
    assert settings.health_listen == settings.admin_listen == ""


async def test_listener_that_others_reach_is_logged_with_what_it_lacks(tmp_path: Path) -> None:
    with capture_logs() as lines:
        async with serving(tmp_path, listen="0.0.0.0:0", insecure_allow_remote=True):
            pass
    (line,) = [line for line in lines if line["event"] == "insecure_listener"]
    assert (line["log_level"], line["address"]) == ("warning", "0.0.0.0:0")
    assert line["there_is"]


async def test_every_method_but_health_requires_a_token(tmp_path: Path) -> None:
    """Methods come from the descriptors, so new ones are included; unknown methods get the same status."""
    assert {"/lineclear.v1.InferenceService/Generate", "/lineclear.v1.AdminService/Drain"} <= {*METHODS}

    file = token_file(tmp_path, f"alice {ALICE}")
    async with serving(tmp_path, token_file=str(file)) as s:
        unknown = ("/lineclear.v1.InferenceService/None", "/any.Thing/AtAll")
        for method in (*METHODS, *REFLECTION, *CHANNELZ, *unknown):
            assert await status_of(s.channel, method) == "UNAUTHENTICATED", method
            assert await status_of(s.channel, method, *bearer(BOB)) == "UNAUTHENTICATED", method
            assert await status_of(s.channel, method, *bearer(ALICE)) != "UNAUTHENTICATED", method
        for method in HEALTH:
            assert await status_of(s.channel, method) != "UNAUTHENTICATED", method
        assert s.engine.submitted == []
        assert s.server.health.is_serving("readiness")


async def test_request_without_token_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the message never arrives, and the rejection does not wait for it."""

    file = token_file(tmp_path, f"alice {ALICE}")
    monkeypatch.setattr("lineclear.scheduler.grpc_api.request_reader.READ_TIMEOUT_SECONDS", 4 * BOUND_SECONDS)
    async with serving(tmp_path, token_file=str(file)) as s:

        def speak() -> bytes:
            with Connection(tmp_path / "s") as connection:
                stream = connection.call("/lineclear.v1.InferenceService/Generate", message(b"", declared=1000))
                while stream not in connection.ended:
                    assert connection.receive()
                return connection.ended[stream]

        assert b"a token is required" in await asyncio.to_thread(speak)
        assert s.engine.submitted == []


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ALICE),),
        (("authorization", f"Basic {ALICE}"),),
        (("authorization", "Bearer "),),
        (("authorization", f"Bearer {ALICE}x"),),
        (*bearer(ALICE), *bearer(ALICE)),
        (("authorization-bin", b"Bearer"),),
        (("x-authorization", f"Bearer {ALICE}"),),
    ],
)
async def test_invalid_tokens_are_rejected(tmp_path: Path, metadata: Any) -> None:
    file = token_file(tmp_path, f"alice {ALICE}")
    async with serving(tmp_path, token_file=str(file)) as s:
        error = await error_of(s.generate(metadata=metadata))
        assert (error.code, error.reason) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        assert error.retry_after_seconds is None
        assert ALICE not in str(error)
        assert s.engine.submitted == []


async def test_token_rotation_without_restart(tmp_path: Path) -> None:
    file = token_file(tmp_path, f"alice {ALICE}")
    async with serving(tmp_path, token_file=str(file)) as s:
        s.engine.answer = lambda request: [5]
        stats = "/lineclear.v1.InferenceService/GetStats"
        assert await status_of(s.channel, stats, *bearer(BOB)) == "UNAUTHENTICATED"
        open_call = s.generate(metadata=bearer(ALICE))
        await open_call.read()
        token_file(tmp_path, f"alice {ALICE}", f"alice {BOB}")
        await wait_for_status(s.channel, stats, BOB, refused=False)
        assert await status_of(s.channel, stats, *bearer(ALICE)) != "UNAUTHENTICATED"
        token_file(tmp_path, f"alice {BOB}")
        await wait_for_status(s.channel, stats, ALICE, refused=True)
        assert await status_of(s.channel, stats, *bearer(BOB)) != "UNAUTHENTICATED"


async def test_revoked_token_ends_new_requests_of_a_session(tmp_path: Path) -> None:
    """Admitted requests complete, then the Session ends. Sessions of other callers continue."""

    file = token_file(tmp_path, f"alice {ALICE}", f"bob {BOB}")
    async with serving(tmp_path, token_file=str(file)) as s:
        alice, bob = (Caller(s, metadata=bearer(token)) for token in (ALICE, BOB))
        await alice.send(submit(1))
        key = await s.engine.next_request()
        token_file(tmp_path, f"bob {BOB}")
        await wait_for_status(s.channel, "/lineclear.v1.InferenceService/GetModel", ALICE, refused=True)
        await alice.send(submit(2))
        await alice.until(lambda: alice.failed)
        assert {handle: failure.reason for handle, failure in alice.failed.items()} == {2: "UNAUTHENTICATED"}
        s.engine.start(key)
        s.engine.tokens(key, HELLO_IDS)
        s.engine.finish_by(key, FinishReason.LENGTH)
        await alice.until(lambda: alice.finished)
        assert alice.tokens[1] == HELLO_IDS
        assert (await error_of(alice.call)).reason == "UNAUTHENTICATED"
        await bob.send(submit(1))
        s.engine.start(await s.engine.next_request(2))
        await bob.until(lambda: bob.started)


def test_token_moved_to_another_tenant_is_invalid(tmp_path: Path) -> None:
    now = 0.0
    watched = ReloadingFile([file := token_file(tmp_path, f"alice {ALICE}")], lambda: read_tokens(file), lambda: now)
    shown = _Token(watched, watched.current(), ALICE, "alice")
    for lines, expected in (([f"bob {BOB}", f"alice {ALICE}"], True), ([f"carol {ALICE}"], False)):
        token_file(tmp_path, *lines)
        now += CHECK_SECONDS
        assert shown.is_valid() is expected


async def test_identity_belongs_to_its_call_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Identity] = []
    real = identity.caller
    monkeypatch.setattr(identity, "caller", lambda context: seen.append(real(context)) or real(context))

    file = token_file(tmp_path, f"alice {ALICE}", f"bob {BOB}")
    async with serving(tmp_path, token_file=str(file)) as s:
        s.engine.answer = lambda request: [5]
        calls = [s.generate(metadata=bearer(token)) for token in (ALICE, BOB) * 8]
        await asyncio.gather(*map(read_all, calls))
        assert Counter(i.tenant for i in seen) == {"alice": 16, "bob": 16}, "by reading and handler"
        assert {i.proof for i in seen} == {"token"}
    seen.clear()
    async with serving(tmp_path) as s:
        s.engine.answer = lambda request: [5]
        await read_all(s.generate())
        assert seen == [ANONYMOUS] * 2


def test_client_salt_only_narrows_the_cache() -> None:
    alice, bob = Identity("alice", "token"), Identity("bob", "token")
    salts = [
        cache_salt(i, salt)
        for i in (ANONYMOUS, alice, bob, Identity("alice", "certificate"))
        for salt in ("", "bob", "alice", "x")
    ]
    assert len(set(salts)) == len(salts)
    assert cache_salt(alice, "x") == cache_salt(alice, "x")
    assert cache_salt(Identity("ab", "token"), "c") != cache_salt(Identity("a", "token"), "bc")


@pytest.mark.parametrize("share", [False, True])
async def test_cache_salt_is_that_of_the_tenant(tmp_path: Path, share: bool) -> None:
    file = token_file(tmp_path, f"alice {ALICE}", f"bob {BOB}")
    async with serving(tmp_path, token_file=str(file), share_prefix_cache_across_tenants=share) as s:
        s.engine.answer = lambda request: [5]
        for token, salt in ((ALICE, ""), (ALICE, "x"), (BOB, ""), (BOB, "x")):
            await read_all(s.generate(text_request(cache_salt=salt), metadata=bearer(token)))
        salts = [request.cache_salt for request in s.engine.submitted]
        assert len(set(salts)) == (2 if share else 4)


async def test_admin_listener_has_its_own_methods_and_tokens(tmp_path: Path) -> None:
    """With an admin address, each method is served on the listed listeners only."""

    files = {"token_file": str(token_file(tmp_path, f"alice {ALICE}"))}
    (tmp_path / "admin").mkdir()
    files["admin_token_file"] = str(token_file(tmp_path / "admin", f"operator {BOB}"))
    async with (
        serving(tmp_path, admin_listen=f"unix:{tmp_path}/a", lora_dir=str(tmp_path), **files) as s,
        grpc.aio.insecure_channel(s.server.admin_address) as admin,
    ):
        with capture_logs() as lines:
            for method in ADMIN:
                await status_of(admin, method, *bearer(BOB))
        audited = {line["rpc"]: line["name"] for line in lines if line["event"] == "admin_call"}
        # All but those that only read, and SetLogLevel, which refuses an empty message.
        names = ("drain", "dump_recording", "flush_prefix_cache", "restart_workers", "watch_steps", "profile")
        assert audited == dict.fromkeys((*names, "update_scheduling", "load_adapter", "unload_adapter"), "operator")
        for method in METHODS:
            is_served = (
                await status_of(s.channel, method, *bearer(ALICE)) != "UNIMPLEMENTED",
                await status_of(admin, method, *bearer(BOB)) != "UNIMPLEMENTED",
            )
            operators = method in ADMIN or method in ADMIN_ONLY
            assert is_served == (not operators, operators or method in EVERYWHERE), method
            # Neither listener accepts the other's token.
            assert await status_of(s.channel, method, *bearer(BOB)) == "UNAUTHENTICATED"
            assert await status_of(admin, method, *bearer(ALICE)) == "UNAUTHENTICATED"
        for method in REFLECTION:
            for channel, right, wrong in ((s.channel, ALICE, BOB), (admin, BOB, ALICE)):
                assert await status_of(channel, method, *bearer(right)) != "UNIMPLEMENTED"
                assert await status_of(channel, method, *bearer(wrong)) == "UNAUTHENTICATED"
        for method in CHANNELZ:
            assert await status_of(s.channel, method, *bearer(ALICE)) == "UNIMPLEMENTED"
            assert await status_of(admin, method, *bearer(BOB)) == "UNIMPLEMENTED"
        answer = await health_pb2_grpc.HealthStub(admin).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_admin_methods_are_not_on_the_data_listener(s: Serving) -> None:
    """Also without an admin listener."""
    for method in ADMIN:
        assert await status_of(s.channel, method) == "UNIMPLEMENTED"
    assert s.operations.calls == []


async def test_channelz_is_on_the_admin_listener_if_enabled(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, admin_listen=f"unix:{tmp_path}/a", channelz=True) as s,
        grpc.aio.insecure_channel(s.server.admin_address) as admin,
    ):
        answer = await channelz_pb2_grpc.ChannelzStub(admin).GetServers(channelz_pb2.GetServersRequest())
        sockets = [socket.name for server in answer.server for socket in server.listen_socket]
        assert any(s.server.admin_address.removeprefix("unix:") in name for name in sockets), sockets
        for method in CHANNELZ:
            assert await status_of(s.channel, method) == "UNIMPLEMENTED"
        # Unparsable bytes get the server's sentence, not an exception's text.
        call = admin.unary_unary(CHANNELZ[0])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_health_listener_needs_no_tls_and_no_token(tmp_path: Path) -> None:
    files = pem_files(tmp_path, AUTHORITY.issue_cert("localhost"))
    settings = tcp(**files, token_file=str(token_file(tmp_path, f"alice {ALICE}")), health_listen="127.0.0.1:0")
    async with (
        serving(tmp_path, plaintext=False, **settings) as s,
        grpc.aio.insecure_channel(s.server.health_address) as probe,
    ):
        answer = await health_pb2_grpc.HealthStub(probe).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        async with secure(s, credentials()) as channel:
            for method in (*METHODS, *REFLECTION, *CHANNELZ):
                # Call on the listener that serves it: each listener lists only its own calls.
                await status_of(channel, method, *bearer(ALICE))
                assert await status_of(probe, method) == "UNIMPLEMENTED", method
