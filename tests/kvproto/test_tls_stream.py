"""TLS without a socket: two streams that pass bytes to each other by hand."""

import ssl

import pytest

from kvproto.errors import (
    AuthenticationFailed,
    BadMagic,
    ConnectionLost,
    HandshakeRefused,
    LocalProtocolError,
)
from kvproto.header import MAGIC
from kvproto.tls_stream import PIECE_NBYTES, TlsStream, check_context


class Ends:
    """The dialling and the accepting end."""

    def __init__(self, client: ssl.SSLContext, server: ssl.SSLContext, host: str = "") -> None:
        self.client = TlsStream(client, is_server=False, host=host)
        self.server = TlsStream(server, is_server=True)
        self.client.advance()

    def pass_on(self) -> bool:
        """Give each what the other has to send; False if that was nothing."""
        moved = False
        for source, target in ((self.client, self.server), (self.server, self.client)):
            if data := source.data_to_send():
                target.received(data)
                target.advance()
                moved = True
        return moved

    def connect(self) -> "Ends":
        while self.pass_on():
            pass
        assert self.client.is_established
        assert self.server.is_established
        return self


def send(source, target, pieces):
    for data in source.encrypt(pieces):
        target.received(data)


def read(stream, nbytes=1 << 16):
    buffer = memoryview(bytearray(nbytes))
    data = b""
    while count := stream.read_into(buffer):
        data += buffer[:count]
    return data


@pytest.fixture
def ends(tls) -> Ends:
    return Ends(tls.client, tls.server).connect()


def test_small_pieces_share_a_record_and_large_ones_are_cut(ends):
    pieces = [b"header", b"x" * 100, memoryview(b"y" * (2 * PIECE_NBYTES + 5)), b"", b"end"]
    expected = b"".join(pieces)
    encrypted = list(ends.client.encrypt(pieces))
    assert max(map(len, encrypted)) < PIECE_NBYTES * 1.01
    assert b"yyyy" not in b"".join(encrypted)
    for data in encrypted:
        ends.server.received(data)
    assert read(ends.server) == expected
    assert [len(data) for data in ends.client.encrypt([b"a", b"b"])] == [2 + 22]
    assert list(ends.client.encrypt([])) == []


def test_a_record_may_come_byte_by_byte(ends):
    buffer = memoryview(bytearray(10))
    for data in ends.server.encrypt([b"hello"]):
        for byte in data[:-1]:
            ends.client.received(bytes([byte]))
            assert ends.client.read_into(buffer) == 0
        ends.client.received(data[-1:])
    assert ends.client.read_into(buffer) == 5
    assert buffer[:5] == b"hello"


def test_the_end_is_said_and_known(ends):
    send(ends.client, ends.server, [b"last words"])
    ends.client.end()
    ends.client.end()
    ends.server.received(ends.client.data_to_send())
    assert not ends.server.is_ended_by_peer
    assert read(ends.server) == b"last words"
    assert ends.server.is_ended_by_peer
    assert read(ends.server) == b""
    # The other direction goes on, but the one who ended does not read it.
    send(ends.server, ends.client, [b"too late"])
    assert read(ends.client) == b""


def test_the_end_is_said_even_while_bytes_arrive(ends):
    send(ends.server, ends.client, [b"on its way"])
    ends.client.end()
    ends.server.received(ends.client.data_to_send())
    assert read(ends.server) == b""
    assert ends.server.is_ended_by_peer


def test_an_end_before_the_handshake_says_nothing(tls):
    stream = TlsStream(tls.server, is_server=True)
    stream.end()
    assert stream.data_to_send() == b""
    assert stream.is_ended


def test_what_came_before_a_fault_is_delivered_before_it(ends):
    send(ends.client, ends.server, [b"good"])
    damaged = bytearray(b"".join(ends.client.encrypt([b"bad"])))
    damaged[-1] ^= 1
    ends.server.received(damaged)
    buffer = memoryview(bytearray(100))
    assert ends.server.read_into(buffer) == 4
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="bad record mac"):
            ends.server.read_into(buffer)
    assert ends.server.is_ended


def test_a_fault_without_anything_before_it(ends):
    damaged = bytearray(b"".join(ends.client.encrypt([b"bad"])))
    damaged[-1] ^= 1
    ends.server.received(damaged)
    with pytest.raises(ConnectionLost, match="bad record mac"):
        read(ends.server)


def fail(client, server, host=""):
    """Connect until either end fails; who failed first, and what each end says."""
    ends = Ends(client, server, host)
    errors = {}
    for _ in range(6):
        for name, source, target in (
            ("server", ends.client, ends.server),
            ("client", ends.server, ends.client),
        ):
            target.received(source.data_to_send())
            try:
                read(target)
            except Exception as exc:
                errors.setdefault(name, exc)
    return errors


def test_without_a_certificate(tls):
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(tls.files.ca)
    errors = fail(bare, tls.server)
    assert list(errors) == ["server", "client"]
    assert "the peer sent no certificate" in str(errors["server"])
    assert "does not accept this side's certificate (certificate required)" in str(errors["client"])
    assert all(type(error) is AuthenticationFailed for error in errors.values())


@pytest.mark.parametrize(
    ("wrong", "words", "alert"),
    [
        ("alien", "unable to get local issuer certificate", "unknown ca"),
        ("expired", "certificate has expired", "certificate expired"),
        ("future", "certificate is not yet valid", "bad certificate"),
    ],
)
def test_a_certificate_that_is_not_accepted(tls, wrong_tls, wrong, words, alert):
    client, server = wrong_tls(wrong)
    errors = fail(client, tls.server)
    assert f"the peer's certificate is not accepted: {words}" in str(errors["server"])
    assert f"({alert})" in str(errors["client"])
    errors = fail(tls.client, server)
    assert list(errors) == ["client", "server"]
    assert words in str(errors["client"])
    assert f"({alert})" in str(errors["server"])
    assert all(type(error) is AuthenticationFailed for error in errors.values())


def test_an_old_version(tls):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.load_verify_locations(tls.files.ca)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    errors = fail(old, tls.server)
    for error in errors.values():
        assert type(error) is HandshakeRefused
        assert error.field == "tls"
        assert "no TLS version in common" in str(error)
    assert len(errors) == 2


def test_a_plain_peer_is_known_by_its_magic(tls):
    stream = TlsStream(tls.server, is_server=True)
    stream.received(MAGIC[:3])
    stream.advance()
    assert not stream.peer_is_plain
    stream.received(MAGIC[3:] + b"\x01")
    with pytest.raises(HandshakeRefused, match="this side uses TLS and the peer does not") as info:
        stream.advance()
    assert stream.peer_is_plain
    assert info.value.field == "tls"


def test_a_stranger_is_told_apart(tls):
    stream = TlsStream(tls.server, is_server=True)
    stream.received(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(BadMagic, match=r"starts with 47 45 54 20: .* neither TLS nor kvproto"):
        stream.advance()


def test_garbage_that_looks_like_tls(tls):
    stream = TlsStream(tls.server, is_server=True)
    stream.received(b"\x16\x03\x01\xff\xff" + bytes(100))
    with pytest.raises(ConnectionLost, match="TLS failed: packet length too long"):
        stream.advance()
    assert stream.data_to_send()[:1] == b"\x15"


def test_a_host_name_is_checked_if_the_context_says_so(tls):
    strict = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    strict.load_verify_locations(tls.files.ca)
    strict.load_cert_chain(tls.files.cert, tls.files.key)
    Ends(strict, tls.server, host="worker.example").connect()
    errors = fail(strict, tls.server, host="other.example")
    assert "Hostname mismatch" in str(errors["client"])


def test_a_context_must_demand_a_certificate(tls):
    check_context(tls.client)
    check_context(tls.server)
    with pytest.raises(LocalProtocolError, match="does not demand a certificate"):
        check_context(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
