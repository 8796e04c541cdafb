"""Token and certificate files: accepted formats, the error for each invalid one, and reloads after changes."""

from __future__ import annotations

import datetime
import errno
import os
from hashlib import sha256
from pathlib import Path

import pytest
import trustme
from structlog.testing import capture_logs

from lineclear.process.settings_base import ConfigurationError
from lineclear.scheduler.security.reloading_file import CHECK_SECONDS, ReloadingFile
from lineclear.scheduler.security.tls import ServerCertificates, read_certificates
from lineclear.scheduler.security.token_file import TokenTable, read_tokens
from lineclear.scheduler.settings import SchedulerSettings

ALICE, BOB = "alice-" + "a" * 32, "bob-" + "b" * 32


def token_file(path: Path, *lines: str, mode: int = 0o400) -> Path:
    file = path / "tokens"
    file.unlink(missing_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines))
    file.chmod(mode)
    return file


def test_names_plain_tokens_hashes_and_comments(tmp_path: Path) -> None:
    """Two tokens of one name are valid at once, and nothing secret is shown."""
    hashed, third = f"sha256:{sha256(BOB.encode()).hexdigest()}", "third-" + "c" * 32
    lines = ("# for people", "", f"alice {ALICE}", f"  bob   {hashed}", f"alice {third}")
    tokens = read_tokens(token_file(tmp_path, *lines))
    assert tokens.name_of(ALICE) == tokens.name_of(third) == "alice"
    assert tokens.name_of(BOB) == "bob"
    for wrong in ("", "alice", ALICE[:-1], ALICE + "a", ALICE.upper(), hashed, "x" * 10_000, "\udcff"):
        assert tokens.name_of(wrong) is None
    digest = sha256(ALICE.encode())
    assert not [secret for secret in ("alice", digest.hexdigest(), repr(digest.digest())) if secret in repr(tokens)]


def test_a_token_is_compared_with_every_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry is compared, in constant time, also after a match."""
    compared: list[int] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return a == b

    tokens = read_tokens(token_file(tmp_path, f"alice {ALICE}", f"bob {BOB}"))
    monkeypatch.setattr("lineclear.scheduler.security.token_file.hmac.compare_digest", compare)
    for shown in (ALICE, BOB, "nobody's"):
        tokens.name_of(shown)
    assert compared == [32] * 6
    tokens.name_of("x" * 4097)  # longer than any token, so it is not even hashed
    assert compared == [32] * 6


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "no token"),
        (["# only this"], "no token"),
        (["alice"], "line 1: expected a name and a token"),
        (["# x", f"alice {ALICE} more"], "line 2: expected a name and a token"),
        (["alice short"], "16 to 4096"),
        ([f"al!ce {ALICE}"], "a name is"),
        (["alice sha256:beef"], "64 lower-case"),
        ([f"alïce {ALICE}"], "ASCII"),
    ],
)
def test_invalid_file_error_quotes_no_content(tmp_path: Path, lines: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        read_tokens(token_file(tmp_path, *lines))
    assert "tokens" in str(caught.value)
    assert not any(secret in str(caught.value) for secret in (ALICE, "short", "beef"))


@pytest.mark.parametrize("mode", [0o404, 0o444, 0o604, 0o402])
def test_file_readable_by_others_is_rejected(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigurationError, match="chmod 0400"):
        read_tokens(token_file(tmp_path, f"alice {ALICE}", mode=mode))


def test_too_large_or_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="larger than 1048576 bytes"):
        read_tokens(token_file(tmp_path, f"alice {ALICE}", "#" * 2**20))
    with pytest.raises(ConfigurationError, match="No such file"):
        read_tokens(tmp_path / "absent")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_change_applies_after_a_second_if_valid(tmp_path: Path) -> None:
    clock = Clock()
    file = token_file(tmp_path, f"alice {ALICE}")
    watched = ReloadingFile([file], lambda: read_tokens(file), clock)
    token_file(tmp_path, f"bob {BOB}")
    clock.now += CHECK_SECONDS / 2
    assert watched.current().name_of(ALICE) == "alice"
    clock.now += CHECK_SECONDS / 2
    assert (watched.current().name_of(ALICE), watched.current().name_of(BOB)) == (None, "bob")
    assert watched.version == 1
    for broken in (lambda: token_file(tmp_path, "rubbish"), file.unlink):
        broken()
        clock.now += CHECK_SECONDS
        assert watched.current().name_of(BOB) == "bob"
        assert watched.version == 1
    token_file(tmp_path, f"alice {ALICE}")
    clock.now += CHECK_SECONDS
    assert watched.current().name_of(ALICE) == "alice"


def test_swapped_link_is_a_change(tmp_path: Path) -> None:
    """Kubernetes renews a mounted secret this way."""
    clock = Clock()
    for name, token in (("one", ALICE), ("two", BOB)):
        (tmp_path / name).mkdir()
        token_file(tmp_path / name, f"x {token}")
    link = tmp_path / "data"
    link.symlink_to("one")
    file = tmp_path / "tokens"
    file.symlink_to("data/tokens")
    watched = ReloadingFile([file], lambda: read_tokens(file), clock)
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").rename(link)
    clock.now += CHECK_SECONDS
    assert watched.current().name_of(BOB) == "x"


@pytest.mark.parametrize("way", ["rewritten", "replaced"])
def test_a_change_of_the_same_size_is_seen(tmp_path: Path, way: str) -> None:
    clock, times = Clock(), (1_700_000_000, 1_700_000_000)
    file = token_file(tmp_path, f"alice {ALICE}", mode=0o600)
    os.utime(file, times)
    watched = ReloadingFile([file], lambda: read_tokens(file), clock)
    other = f"carol {ALICE}\n"
    assert len(other) == file.stat().st_size
    if way == "rewritten":  # in place: the time differs
        file.write_text(other)
    else:  # by a copy with the same time: the file differs
        (tmp_path / "new").write_text(other)
        (tmp_path / "new").chmod(0o600)
        os.utime(tmp_path / "new", times)
        (tmp_path / "new").rename(file)
    clock.now += CHECK_SECONDS
    assert watched.current().name_of(ALICE) == "carol"


def test_unchanged_files_are_read_once(tmp_path: Path) -> None:
    """And files that change all the time once a second."""
    clock = Clock()
    reads: list[float] = []
    file = token_file(tmp_path, f"alice {ALICE}")
    watched = ReloadingFile([file], lambda: reads.append(clock.now), clock)
    for _ in range(5):
        clock.now += CHECK_SECONDS
        watched.current()
    file = token_file(tmp_path, f"bob {BOB}")
    for _ in range(5):
        clock.now += CHECK_SECONDS
        watched.current()
    assert len(reads) == 2
    assert watched.version == 1
    for _ in range(1000):
        clock.now += CHECK_SECONDS / 100
        file.touch()
        watched.current()
    assert len(reads) <= 12


def test_read_is_retried_after_a_temporary_error(tmp_path: Path) -> None:
    """For example with too many open files: the next check reads the change although the file does not change again."""
    clock, broken = Clock(), [True, True, False]
    file = token_file(tmp_path, f"alice {ALICE}")

    def read() -> TokenTable:
        if reads and broken.pop(0):
            raise ConfigurationError("too many open files")
        reads.append(clock.now)
        return read_tokens(file)

    reads: list[float] = []
    watched = ReloadingFile([file], read, clock)
    token_file(tmp_path, f"bob {BOB}")
    with capture_logs() as lines:
        for expected in (None, None, "bob", "bob"):
            clock.now += CHECK_SECONDS
            assert watched.current().name_of(BOB) == expected
    assert [line["event"] for line in lines] == ["reload_failed", "files_reloaded"]


AUTHORITY = trustme.CA()


def pem_files(path: Path, leaf: trustme.LeafCert, name: str = "server") -> dict[str, str]:
    """Write the certificate and its key below `path`; return the settings that name them."""
    cert, key = path / f"{name}.pem", path / f"{name}.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    key.write_bytes(leaf.private_key_pem.bytes())
    return {"tls_cert_file": str(cert), "tls_key_file": str(key)}


def read(**files: str) -> None:
    read_certificates(SchedulerSettings(listen="127.0.0.1:0", **files))


def test_comments_of_an_authority_need_not_be_ascii(tmp_path: Path) -> None:
    """OpenSSL writes the subject above a certificate, in UTF-8."""
    files = pem_files(tmp_path, AUTHORITY.issue_cert("localhost"))
    (tmp_path / "authority").write_bytes("Subject: O=Käse\n".encode() + AUTHORITY.cert_pem.bytes())
    certificates = ServerCertificates(
        SchedulerSettings(listen="127.0.0.1:0", **files, tls_client_ca_file=str(tmp_path / "authority"))
    )
    assert len(certificates.context().get_ca_certs()) == 1


@pytest.mark.parametrize("authority", [AUTHORITY, AUTHORITY.create_child_ca()], ids=["root", "intermediate"])
def test_certificate_of_an_authority_is_accepted(tmp_path: Path, authority: trustme.CA) -> None:
    read(**pem_files(tmp_path, authority.issue_cert("localhost")))


def test_unusable_certificate_is_rejected_with_file_and_reason(tmp_path: Path) -> None:
    good = pem_files(tmp_path, AUTHORITY.issue_cert("localhost"))
    other = pem_files(tmp_path, AUTHORITY.issue_cert("localhost"), "other")
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    expired = pem_files(tmp_path, AUTHORITY.issue_cert("localhost", not_after=yesterday), "expired")
    chain = Path(good["tls_cert_file"]).read_bytes()
    for name, data in {
        "empty": b"",
        "rubbish": b"rubbish",
        "binary": bytes(range(256)),
        "cut": chain[: len(chain) // 3],
        "damaged": chain.replace(b"MII", b"AAA"),
    }.items():
        (tmp_path / name).write_bytes(data)
        for setting, says in (
            ("tls_cert_file", f"^--tls-cert-file .*/{name} contains no valid certificate in PEM form; write the "),
            (
                "tls_key_file",
                f"^--tls-key-file .*/{name} contains no private key in PEM form for .*; write the key of ",
            ),
            ("tls_client_ca_file", f"^--tls-client-ca-file .*/{name} contains no valid certificate in PEM form; write"),
        ):
            with pytest.raises(ConfigurationError, match=says):
                read(**good | {setting: str(tmp_path / name)})
    for files, says in (
        (
            good | {"tls_key_file": other["tls_key_file"]},
            "other.key is not the key of --tls-cert-file .*; give the key",
        ),
        (good | {"tls_cert_file": good["tls_key_file"]}, "server.key contains no valid certificate"),
        (good | {"tls_key_file": good["tls_cert_file"]}, "server.pem contains no private key"),
        (expired, "expired; give a certificate that is valid now"),
        (good | {"tls_cert_file": str(tmp_path / "absent")}, "absent: No such file"),
        (good | {"tls_key_file": str(tmp_path)}, "Is a directory"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            read(**files)


def test_encrypted_key_is_rejected_without_a_prompt(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    files = pem_files(tmp_path, AUTHORITY.issue_cert("localhost"))
    key = Path(files["tls_key_file"])
    locked = load_pem_private_key(key.read_bytes(), None)
    key.write_bytes(locked.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))
    with pytest.raises(ConfigurationError, match="password"):
        read(**files)


def test_files_replaced_during_the_read_stay_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both files are replaced between the reads of the certificate and the key."""
    files = pem_files(tmp_path, AUTHORITY.issue_cert("localhost"))
    real = Path.read_bytes

    def read_and_exchange(path: Path) -> bytes:
        data = real(path)
        if str(path) == files["tls_cert_file"]:
            pem_files(tmp_path, AUTHORITY.issue_cert("localhost"))
        return data

    monkeypatch.setattr(Path, "read_bytes", read_and_exchange)
    with pytest.raises(ConfigurationError, match="is not the key of"):
        read(**files)
    monkeypatch.undo()
    read(**files)


def test_a_key_in_memory_cannot_be_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with vm.memfd_noexec = 2, which forbids executable files in memory, and on a kernel without the flag."""
    made: list[int] = []
    create = os.memfd_create

    def create_strictly(name: str, flags: int) -> int:
        if not flags & 8:
            raise PermissionError(errno.EACCES, "vm.memfd_noexec is 2")
        descriptor = create(name, flags)
        made.append(os.fstat(descriptor).st_mode)
        return descriptor

    def create_without_flag(name: str, flags: int) -> int:
        if flags & 8:
            raise OSError(errno.EINVAL, "no such flag")
        return create(name, flags)

    settings = SchedulerSettings(**pem_files(tmp_path, AUTHORITY.issue_cert("localhost")))
    monkeypatch.setattr(os, "memfd_create", create_strictly)
    read_certificates(settings)
    assert len(made) == 2
    assert not any(mode & 0o111 for mode in made)
    monkeypatch.setattr(os, "memfd_create", create_without_flag)
    read_certificates(settings)


def test_rotation_waits_for_a_free_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, settings = Clock(), SchedulerSettings(**pem_files(tmp_path, AUTHORITY.issue_cert("localhost")))
    watched = ReloadingFile([Path(settings.tls_cert_file)], lambda: read_certificates(settings), clock)
    before = watched.current()
    pem_files(tmp_path, AUTHORITY.issue_cert("localhost"))

    def no_descriptor(name: str, flags: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", no_descriptor)
    clock.now += CHECK_SECONDS
    with capture_logs() as lines:
        assert watched.current() is before
    assert [(line["event"], "Too many open files" in line["problem"]) for line in lines] == [("reload_failed", True)]
    monkeypatch.undo()
    clock.now += CHECK_SECONDS
    assert watched.current().chain == Path(settings.tls_cert_file).read_bytes() != before.chain


def test_certificate_expiry_is_logged_once_a_day(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    files = pem_files(tmp_path, AUTHORITY.issue_cert("localhost", not_after=now + 20 * day))
    found = ServerCertificates(SchedulerSettings(listen="127.0.0.1:0", **files))
    with capture_logs() as lines:
        for hours in range(0, 24 * 22, 2):
            found.log_expiry(now + hours * day / 24)
    events = [(line["event"], line.get("days_left")) for line in lines]
    assert events[:14] == [("certificate_expires_soon", days) for days in range(13, -1, -1)]
    assert set(events[14:]) == {("certificate_expired", None)}
    assert len(events[14:]) <= 3
    assert abs(found.expires_at - now - 20 * day) < datetime.timedelta(minutes=1)
