"""TLS between the protocol and the socket, without either: encrypted bytes in and out.

    driver                        TlsStream
    advance()               ->    the handshake goes on; call it once at the start
    received(bytes)         ->    encrypted bytes from the socket
    read_into(buffer)       <-    what they say; advances the handshake by itself
    encrypt(pieces)         <-    encrypted bytes for the socket
    end()                   <-    close_notify: this side sends no more
    data_to_send()          <-    bytes of the handshake and alerts, after every call

The transports of asyncio cannot end one direction of a TLS connection. A side that closes must
keep reading until the peer has ended too, or the kernel answers late bytes with RST and the peer
may lose our last words. So the driver keeps the plain TCP transport and encrypts by this.

TLS is never part of what the protocol believes: HELLO, canary, AUTH and every check are the same
above it. Source: docs/wire.md section 12.
"""

import contextlib
import ssl
from collections.abc import Iterable, Iterator
from typing import Final

from kvproto.buffer import Buffer, byte_view
from kvproto.errors import (
    AuthenticationFailed,
    BadMagic,
    ConnectionLost,
    HandshakeRefused,
    KvProtoError,
    LocalProtocolError,
)
from kvproto.header import MAGIC

# Encrypted bytes leave in pieces of this size, so that a large body is never held twice.
PIECE_NBYTES: Final = 256 * 1024
# A record costs a header, a tag and two calls: what is smaller than this is joined first.
_MIN_RECORD_NBYTES: Final = 16 * 1024
_ALERT_RECORD: Final = 0x15
_HANDSHAKE_RECORD: Final = 0x16

# What OpenSSL names these; without OpenSSL's "reason" there is nothing to go by but its text.
_ALERTS_ABOUT_OUR_CERTIFICATE: Final = frozenset(
    {
        "TLSV1_ALERT_UNKNOWN_CA",
        "TLSV13_ALERT_CERTIFICATE_REQUIRED",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_CERTIFICATE_REVOKED",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
        "TLSV1_ALERT_ACCESS_DENIED",
    }
)
_NO_COMMON_VERSION: Final = frozenset(
    {"UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE"}
)


def check_context(context: ssl.SSLContext) -> None:
    """LocalProtocolError unless ``context`` demands a certificate of the peer."""
    if context.verify_mode is not ssl.CERT_REQUIRED:
        raise LocalProtocolError(
            "the TLS context does not demand a certificate of the peer; set its verify_mode to "
            "ssl.CERT_REQUIRED and load the CA that signed the certificates of all services"
        )


class TlsStream:
    """TLS of one connection. Not thread-safe.

    Args:
        context: for the accepting or the dialling side; see ``check_context``.
        is_server: True for the side that accepted.
        host: what was dialled; used only if the context checks host names.
    """

    def __init__(self, context: ssl.SSLContext, *, is_server: bool, host: str = "") -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._object = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=is_server,
            server_hostname=host if context.check_hostname else None,
        )
        self._first = b""
        self._deferred: KvProtoError | None = None
        # The handshake is done as far as this side can tell. In TLS 1.3 the side that dials is
        # done before the other has judged its certificate.
        self.is_established = False
        # Nothing more is sent, or read, by this side.
        self.is_ended = False
        # The peer has said that it sends no more.
        self.is_ended_by_peer = False

    @property
    def peer_is_plain(self) -> bool:
        """The first bytes were those of a kvproto peer without TLS."""
        return self._first == MAGIC

    def received(self, data: Buffer) -> None:
        """Take encrypted bytes; ``read_into`` says what they mean."""
        if len(self._first) < len(MAGIC):
            self._first += bytes(memoryview(data)[: len(MAGIC) - len(self._first)])
        self._incoming.write(data)

    def advance(self) -> None:
        """Do the next part of the handshake, if there is one to do.

        Raises, checked in this order: HandshakeRefused (field ``tls``: the peer does not use TLS,
        or no version in common), BadMagic (something else than TLS), AuthenticationFailed (either
        side does not accept the other's certificate), ConnectionLost. ``data_to_send`` then holds
        the alert for the peer.
        """
        if self.is_established:
            return
        if self.peer_is_plain:
            self.is_ended = True
            raise HandshakeRefused(
                "tls",
                "on",
                "off",
                "handshake refused: this side uses TLS and the peer does not; "
                "start both sides with TLS, or both without",
            )
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as exc:
            self.is_ended = True
            raise self._explained(exc) from exc
        self.is_established = True

    def read_into(self, buffer: memoryview) -> int:
        """Decrypted bytes into ``buffer``; how many: 0 when more must be received first.

        After the peer's close_notify it is 0 and ``is_ended_by_peer`` is True. Errors as
        ``advance``; a damaged record is ConnectionLost.
        """
        self.advance()
        if self._deferred is not None:
            raise self._deferred
        num_read = 0
        if not self.is_established or self.is_ended or self.is_ended_by_peer:
            return 0
        try:
            while num_read < buffer.nbytes:  # a record has at most 16 KiB
                count = self._object.read(buffer.nbytes - num_read, buffer[num_read:])
                if not count:
                    self.is_ended_by_peer = True
                    break
                num_read += int(count)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as exc:
            self.is_ended = True
            self._deferred = self._explained(exc)
            if not num_read:
                raise self._deferred from exc
        return num_read  # what came before a fault is delivered before it

    def encrypt(self, pieces: Iterable[Buffer]) -> Iterator[bytes]:
        """``pieces`` encrypted, in order; only while established and not ended."""
        small = bytearray()
        for piece in map(byte_view, pieces):
            if len(small) + piece.nbytes < _MIN_RECORD_NBYTES:
                small += piece
                continue
            yield from self._encrypt(memoryview(bytes(small)))
            small.clear()
            for start in range(0, piece.nbytes, PIECE_NBYTES):
                yield from self._encrypt(piece[start : start + PIECE_NBYTES])
        yield from self._encrypt(memoryview(bytes(small)))

    def end(self) -> None:
        """Say that this side sends no more; what still arrives is not read. Idempotent."""
        if self.is_established and not self.is_ended:
            # Sends close_notify, then wants that of the peer, which the driver waits for as the
            # end of the stream. What the peer had on its way is an error here.
            with contextlib.suppress(ssl.SSLError):
                self._object.unwrap()
        self.is_ended = True

    def data_to_send(self) -> bytes:
        """Bytes of the handshake, of close_notify, or of an alert; b"" if there are none."""
        return self._outgoing.read()

    def _encrypt(self, view: memoryview) -> Iterator[bytes]:
        while view:
            # One record at a time; OpenSSL says how much it took.
            view = view[self._object.write(view) :]
        if data := self._outgoing.read():
            yield data

    def _explained(self, exc: ssl.SSLError) -> KvProtoError:
        """The error of ours for one of OpenSSL's."""
        reason = exc.reason or ""
        if isinstance(exc, ssl.SSLCertVerificationError):
            return AuthenticationFailed(
                f"TLS failed: the peer's certificate is not accepted: {exc.verify_message}; "
                "it must be valid today and signed by the CA that this side trusts"
            )
        if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
            return AuthenticationFailed(
                "TLS failed: the peer sent no certificate; give it one that is signed by the CA "
                "that this side trusts"
            )
        if reason in _ALERTS_ABOUT_OUR_CERTIFICATE:
            words = reason.partition("ALERT_")[2].lower().replace("_", " ")
            return AuthenticationFailed(
                f"TLS failed: the peer does not accept this side's certificate ({words}); both "
                "sides must have certificates that are valid today and signed by the same CA"
            )
        if reason in _NO_COMMON_VERSION:
            return HandshakeRefused(
                "tls", "", "", "handshake refused: no TLS version in common with the peer"
            )
        if not self.is_established and self._first[:1] not in (
            bytes([_HANDSHAKE_RECORD]),
            bytes([_ALERT_RECORD]),
        ):
            return BadMagic(
                f"a connection starts with {self._first.hex(' ')}: the peer speaks neither TLS nor "
                "kvproto"
            )
        return ConnectionLost(f"TLS failed: {reason.lower().replace('_', ' ') or exc}")
