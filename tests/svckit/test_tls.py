"""Every way in which the three files can be wrong, found at the start."""

import ssl
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from svckit.errors import ConfigError
from svckit.tls import MAX_CAS, TlsContexts, load_tls
from tests.certificates import Authority, TlsFiles


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    return authority.issue()


def load(files: TlsFiles) -> TlsContexts:
    return load_tls(files.cert, files.key, files.ca)


def refusal(files: TlsFiles) -> str:
    with pytest.raises(ConfigError) as caught:
        load(files)
    return str(caught.value)


def test_without_files_there_is_no_tls() -> None:
    assert load_tls(None, None, None) == TlsContexts(None, None)


def test_both_ends_demand_a_certificate_and_speak_the_newest_version(files: TlsFiles) -> None:
    contexts = load(files)
    for context in (contexts.server, contexts.client):
        assert context is not None
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        # The system's list of CAs is not used: there is ours alone.
        assert context.cert_store_stats()["x509_ca"] == 1


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("cert", "tls_key_file and tls_ca_file are"),
        ("key", "tls_cert_file and tls_ca_file are"),
        ("cert key", "tls_ca_file is"),
        ("cert ca", "tls_key_file is"),
        ("key ca", "tls_cert_file is"),
    ],
)
def test_all_three_or_none(files: TlsFiles, given: str, missing: str) -> None:
    paths = [getattr(files, end) if end in given.split() else None for end in ("cert", "key", "ca")]
    with pytest.raises(ConfigError, match=f"but {missing} not set; give all three, or none"):
        load_tls(*paths)


@pytest.mark.parametrize(
    ("end", "what"), [("cert", "certificate file"), ("key", "key file"), ("ca", "CA file")]
)
def test_a_file_that_is_not_there(files: TlsFiles, tmp_path: Path, end: str, what: str) -> None:
    absent = tmp_path / "absent"
    assert refusal(replace(files, **{end: absent})) == (
        f"Cannot read the TLS {what} {absent}: No such file or directory."
    )


def test_a_key_that_others_can_read(authority: Authority) -> None:
    files = authority.issue("open.example")
    files.key.chmod(0o640)
    assert "(mode 0640); run chmod 600 on it" in refusal(files)


def test_an_encrypted_key_would_wait_for_a_person(files: TlsFiles, tmp_path: Path) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), password=None)
    locked = tmp_path / "locked.key"
    locked.touch(mode=0o600)
    locked.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"passphrase"),
        )
    )
    assert "is encrypted, and nobody is there" in refusal(replace(files, key=locked))


def test_the_key_of_another_certificate(authority: Authority, files: TlsFiles) -> None:
    other = authority.issue("other.example")
    assert refusal(replace(files, key=other.key)) == (
        f"The TLS key file {other.key} is not the key of the certificate {files.cert}; give the "
        "two that were made together."
    )


@pytest.mark.parametrize("content", [b"", b"not a certificate\n"])
def test_files_that_are_not_pem(files: TlsFiles, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o600)
    path.write_bytes(content)
    assert "holds no certificate in PEM form" in refusal(replace(files, ca=path))
    assert "are not both in PEM form" in refusal(replace(files, cert=path))
    assert "are not both in PEM form" in refusal(replace(files, key=path))


@pytest.mark.parametrize(
    ("days", "words"),
    [((-10, -5), "certificate has expired"), ((5, 10), "certificate is not yet valid")],
)
def test_a_certificate_of_another_time(
    authority: Authority, days: tuple[int, int], words: str
) -> None:
    files = authority.issue(days=days)
    assert f"{files.cert} would be refused by every peer: {words}" in refusal(files)


def test_a_certificate_of_another_ca(files: TlsFiles, tmp_path: Path) -> None:
    other = Authority(tmp_path).issue()
    text = refusal(replace(files, ca=other.ca))
    assert "unable to get local issuer certificate" in text
    assert str(other.ca) in text


def test_a_bundle_of_cas_would_let_everybody_in(files: TlsFiles, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.crt"
    cas = [files.ca.read_bytes(), *(trustme.CA().cert_pem.bytes() for _ in range(MAX_CAS))]
    bundle.write_bytes(b"".join(cas))
    assert f"holds {MAX_CAS + 1} certificates" in refusal(replace(files, ca=bundle))
    # An old CA and a new one, side by side while certificates are replaced, are fine.
    bundle.write_bytes(b"".join(cas[:2]))
    load(replace(files, ca=bundle))


def test_a_certificate_for_servers_alone_cannot_dial(authority: Authority) -> None:
    assert "purpose" in refusal(authority.issue_for_servers_alone())
