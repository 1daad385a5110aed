"""Who we are, who they are, and whether the two can work together.

Both sides send HELLO at once. Each checks the other's HELLO (canary, nonce, version range, facts,
carriers) and then sends AUTH, which proves the shared secret over both HELLOs. A refusal names
the field. Source: docs/wire.md section 5.

The canary is a pattern of numbers that each host writes as its memory holds them and that the
other side reads in the byte order that the frame announces. A host that announces the wrong order
is found here, before any tensor is believed.
"""

import hashlib
import hmac
import json
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import xxhash

from kvproto.errors import AuthenticationFailed, HandshakeRefused, LocalProtocolError
from kvproto.header import HOST_ORDER, VERSION, ByteOrder
from kvproto.messages import MAC_NBYTES, ROLES, Hello

CANARY_NBYTES: Final = 64
MIN_SECRET_NBYTES: Final = 16
DEFAULT_MAX_PAYLOAD_NBYTES: Final = 64 * 1024 * 1024
NO_SECRET_MAC: Final = bytes(MAC_NBYTES)
_MAC_LABEL: Final = b"kvproto auth v1"

# (array typecode, struct format, values): 4 * 2 + 2 * 4 + 2 * 8 + 2 * 4 + 2 * 8 + 8 = 64 bytes.
_CANARY: Final = (
    ("H", "H", (0x0102, 0x0304, 0x0506, 0x0708)),
    ("I", "I", (0x01020304, 0xDEADBEAF)),
    ("Q", "Q", (0x0102030405060708, 0xFEDCBA9876543210)),
    ("f", "f", (1.0, -2.5)),
    ("d", "d", (1.0, -2.5)),
    ("B", "B", (0xDE, 0xAD, 0xBE, 0xAF, 0x00, 0x7F, 0x80, 0xFF)),
)
_CANARY_FORMAT: Final = {
    order: struct.Struct(prefix + "".join(f"{len(values)}{code}" for _, code, values in _CANARY))
    for order, prefix in ((ByteOrder.LITTLE, "<"), (ByteOrder.BIG, ">"))
}
_CANARY_VALUES: Final = tuple(value for _, _, values in _CANARY for value in values)


@dataclass(frozen=True, slots=True)
class Identity:
    """What one side says about itself in HELLO, and the secret it proves.

    Args:
        role: "prefill", "decode", "router" or "client".
        instance_id: 1..64 printable ASCII characters, new for each process.
        facts: what must be equal on both sides where both declare it.
        secret: shared secret of at least 16 bytes, or None; never printed.
        carriers: names of the carriers this side can use, best first.
        version_min, version_max: wire versions this side speaks.
        max_payload_nbytes: largest payload this side accepts.
        byte_order: order of what this side sends; another than the host's is for tests.
        dtypes: element types that this side can convert its KV to when the peer's fact differs.
        link_id, lane: which connection of several between the same two this is; see ``tcp_link``.

    LocalProtocolError if the role is unknown or the secret is too short.
    """

    role: str
    instance_id: str
    facts: Mapping[str, str | int] = field(default_factory=dict)
    secret: bytes | None = field(default=None, repr=False)
    carriers: tuple[str, ...] = ("tcp",)
    version_min: int = VERSION
    version_max: int = VERSION
    max_payload_nbytes: int = DEFAULT_MAX_PAYLOAD_NBYTES
    byte_order: ByteOrder = HOST_ORDER
    dtypes: tuple[str, ...] = ()
    link_id: str = ""
    lane: int = 0

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise LocalProtocolError(f"identity: role {self.role!r} is not one of {ROLES}")
        if self.secret is not None and len(self.secret) < MIN_SECRET_NBYTES:
            raise LocalProtocolError(
                f"identity: the secret has {len(self.secret)} bytes; use at least "
                f"{MIN_SECRET_NBYTES} random bytes"
            )

    def hello(self, nonce: bytes) -> Hello:
        """This side's HELLO. ``nonce``: 32 random bytes, never used before."""
        return Hello(
            role=self.role,
            instance_id=self.instance_id,
            version_min=self.version_min,
            version_max=self.version_max,
            nonce=nonce,
            facts=dict(self.facts),
            carriers=list(self.carriers),
            max_payload_nbytes=self.max_payload_nbytes,
            dtypes=list(self.dtypes),
            link_id=self.link_id,
            lane=self.lane,
        )


def canary_bytes(order: ByteOrder = HOST_ORDER) -> bytes:
    """The 64 bytes a host of this byte order sends; for our own, as our memory holds them."""
    parts = []
    for typecode, _, values in _CANARY:
        numbers = array(typecode, values)
        if order != HOST_ORDER:
            numbers.byteswap()
        parts.append(numbers.tobytes())
    return b"".join(parts)


def check_canary(raw: bytes | bytearray | memoryview, order: ByteOrder) -> None:
    """HandshakeRefused("byte_order") unless ``raw``, 64 bytes, reads right in ``order``."""
    if _CANARY_FORMAT[order].unpack(raw) != _CANARY_VALUES:
        raise HandshakeRefused(
            "byte_order",
            order.name.lower(),
            "something else",
            f"handshake refused: the peer announces {order.name.lower()}-endian frames, but its "
            "canary does not read so; its byte_order is wrong or the path changes bytes",
        )


def check_hello(identity: Identity, nonce: bytes, remote: Hello) -> int:
    """The agreed wire version, or HandshakeRefused naming the first field that does not fit.

    Checked in this order: ``nonce`` (our own, reflected), ``version``, each fact that both sides
    declare (in the order of their names; another ``dtype`` is no hindrance if one side can
    convert to it), ``carriers``.
    """
    if hmac.compare_digest(nonce, remote.nonce):
        raise HandshakeRefused("nonce", "ours", "ours", "handshake refused: nonce reflected")
    version = min(identity.version_max, remote.version_max)
    if version < max(identity.version_min, remote.version_min):
        raise HandshakeRefused(
            "version",
            f"{identity.version_min}..{identity.version_max}",
            f"{remote.version_min}..{remote.version_max}",
        )
    for name in sorted(identity.facts.keys() & remote.facts.keys()):
        if identity.facts[name] != remote.facts[name] and not (
            name == "dtype" and _can_convert(identity, remote)
        ):
            raise HandshakeRefused(name, str(identity.facts[name]), str(remote.facts[name]))
    if not set(identity.carriers) & set(remote.carriers):
        raise HandshakeRefused("carriers", ",".join(identity.carriers), ",".join(remote.carriers))
    return version


def _can_convert(identity: Identity, remote: Hello) -> bool:
    return remote.facts["dtype"] in identity.dtypes or identity.facts["dtype"] in remote.dtypes


def compatibility_hash(facts: Mapping[str, str | int]) -> str:
    """32 hex digits that are equal for equal facts; for logs and for grouping workers."""
    text = json.dumps(dict(facts), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(text.encode("ascii"))


@dataclass(frozen=True, slots=True)
class AuthInput:
    """What one side contributes to a MAC.

    Args:
        is_server: True for the side that accepted the connection.
        role: the side's role.
        nonce: the side's nonce, 32 bytes.
        hello_payload: the whole payload of the side's HELLO frame, canary included.
    """

    is_server: bool
    role: str
    nonce: bytes
    hello_payload: bytes


def auth_mac(secret: bytes | None, sender: AuthInput, receiver: AuthInput) -> bytes:
    """The 32 bytes ``sender`` puts in AUTH; all zero without a secret.

    HMAC-SHA256 over: the label, then for the sender and then for the receiver: side ("accept" or
    "dial"), role, nonce, SHA-256 of the HELLO payload; each item after its length as one byte.
    Both sides' HELLOs are covered, so nobody on the path can change a fact, and the side keeps a
    MAC from being sent back to its maker. Source: docs/wire.md section 5.3.
    """
    if secret is None:
        return NO_SECRET_MAC
    items = [_MAC_LABEL]
    for side in (sender, receiver):
        items.append(b"accept" if side.is_server else b"dial")
        items.append(side.role.encode("ascii"))
        items.append(side.nonce)
        items.append(hashlib.sha256(side.hello_payload).digest())
    transcript = b"".join(bytes([len(item)]) + item for item in items)
    return hmac.digest(secret, transcript, "sha256")


def check_mac(secret: bytes | None, mac: bytes, expected: bytes) -> None:
    """AuthenticationFailed unless the MACs agree; compared in constant time."""
    if hmac.compare_digest(mac, expected):
        return
    if secret is None:
        reason = "the peer has a secret and this side has none; give both the same secret"
    elif mac == NO_SECRET_MAC:
        reason = "this side has a secret and the peer has none; give both the same secret"
    else:
        reason = "the peer has another secret; give both the same secret"
    raise AuthenticationFailed(f"authentication failed: {reason}")
