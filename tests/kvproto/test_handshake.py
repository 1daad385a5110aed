"""Identity, canary, facts, versions, and the MAC."""

import hashlib
import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.errors import AuthenticationFailed, HandshakeRefused, LocalProtocolError
from kvproto.handshake import (
    CANARY_NBYTES,
    NO_SECRET_MAC,
    AuthInput,
    Identity,
    auth_mac,
    canary_bytes,
    check_canary,
    check_hello,
    check_mac,
    compatibility_hash,
)
from kvproto.header import HOST_ORDER, ByteOrder

SECRET = b"0123456789abcdef"
NONCE = b"n" * 32
OURS = AuthInput(False, "decode", b"c" * 32, b"hello of the client")
THEIRS = AuthInput(True, "prefill", b"s" * 32, b"hello of the server")


def hello(**changes):
    return Identity(**{"role": "prefill", "instance_id": "p", **changes}).hello(b"r" * 32)


def test_the_canary_is_what_each_order_writes(order):
    prefix = "<" if order is ByteOrder.LITTLE else ">"
    expected = struct.pack(
        prefix + "4H2I2Q2f2d8B",
        *(0x0102, 0x0304, 0x0506, 0x0708),
        *(0x01020304, 0xDEADBEAF),
        *(0x0102030405060708, 0xFEDCBA9876543210),
        *(1.0, -2.5),
        *(1.0, -2.5),
        *(0xDE, 0xAD, 0xBE, 0xAF, 0x00, 0x7F, 0x80, 0xFF),
    )
    assert canary_bytes(order) == expected
    assert len(expected) == CANARY_NBYTES
    check_canary(expected, order)


def test_a_host_that_announces_the_wrong_order_is_found(order):
    other = next(item for item in ByteOrder if item is not order)
    with pytest.raises(HandshakeRefused, match="canary") as excinfo:
        check_canary(canary_bytes(other), order)
    assert excinfo.value.field == "byte_order"


@given(st.integers(0, CANARY_NBYTES * 8 - 1))
def test_a_flipped_bit_in_the_canary_is_found(bit):
    raw = bytearray(canary_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(HandshakeRefused):
        check_canary(raw, HOST_ORDER)


def test_an_identity_does_not_print_its_secret():
    assert SECRET.decode() not in repr(Identity("decode", "d", secret=SECRET))


@pytest.mark.parametrize(
    ("fields", "named"),
    [({"role": "boss"}, "role"), ({"secret": b"short"}, "secret has 5 bytes")],
)
def test_an_impossible_identity_is_refused(fields, named):
    with pytest.raises(LocalProtocolError, match=named):
        Identity(**{"role": "decode", "instance_id": "d", **fields})


def test_equal_facts_are_accepted_and_one_sided_facts_are_not_compared():
    identity = Identity("decode", "d", {"dtype": "float32", "only_here": 1})
    remote = hello(facts={"dtype": "float32", "only_there": 2})
    assert check_hello(identity, NONCE, remote) == 1


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [
        ("dtype", "float32", "float16"),
        ("num_layers", 24, 32),
        ("num_kv_heads", 8, 4),
        ("head_dim", 64, 128),
        ("layout", "a", "b"),
        ("weights_digest", "aa", "ab"),
        ("num_layers", 24, "24"),
    ],
)
def test_a_fact_that_differs_is_named_with_both_values(name, ours, theirs):
    identity = Identity("decode", "d", {"a": 1, name: ours})
    with pytest.raises(HandshakeRefused) as excinfo:
        check_hello(identity, NONCE, hello(facts={"a": 1, name: theirs}))
    assert excinfo.value.field == name
    assert (excinfo.value.ours, excinfo.value.theirs) == (str(ours), str(theirs))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(("float16",), ()), ((), ("float32",)), (("int8", "float16"), ("float32",))],
)
def test_a_dtype_that_one_side_converts_may_differ(ours, theirs):
    identity = Identity("decode", "d", {"dtype": "float32"}, dtypes=ours)
    assert check_hello(identity, NONCE, hello(facts={"dtype": "float16"}, dtypes=theirs)) == 1


@pytest.mark.parametrize(
    ("ours", "theirs"), [((), ()), (("float32",), ()), ((), ("float16",)), (("int8",), ("int8",))]
)
def test_a_dtype_that_nobody_converts_is_refused(ours, theirs):
    identity = Identity("decode", "d", {"dtype": "float32"}, dtypes=ours)
    with pytest.raises(HandshakeRefused) as excinfo:
        check_hello(identity, NONCE, hello(facts={"dtype": "float16"}, dtypes=theirs))
    assert excinfo.value.field == "dtype"


def test_converting_helps_the_dtype_alone():
    identity = Identity("decode", "d", {"layout": "a"}, dtypes=("a", "b"))
    with pytest.raises(HandshakeRefused) as excinfo:
        check_hello(identity, NONCE, hello(facts={"layout": "b"}, dtypes=("a", "b")))
    assert excinfo.value.field == "layout"


def test_hello_says_what_the_identity_says():
    identity = Identity(
        "client", "c", carriers=("mapped", "tcp"), dtypes=("int8",), link_id="l", lane=3
    )
    said = identity.hello(NONCE)
    assert (said.carriers, said.dtypes, said.link_id, said.lane) == (
        ["mapped", "tcp"],
        ["int8"],
        "l",
        3,
    )


def test_of_many_facts_the_first_by_name_is_named():
    identity = Identity("decode", "d", {"b": 1, "a": 1})
    with pytest.raises(HandshakeRefused) as excinfo:
        check_hello(identity, NONCE, hello(facts={"b": 2, "a": 2}))
    assert excinfo.value.field == "a"


@pytest.mark.parametrize(
    ("ours", "theirs", "agreed"),
    [((1, 1), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 4), (1, 2), 2), ((1, 9), (9, 9), 9)],
)
def test_the_highest_common_version_is_agreed(ours, theirs, agreed):
    identity = Identity("decode", "d", version_min=ours[0], version_max=ours[1])
    remote = hello(version_min=theirs[0], version_max=theirs[1])
    assert check_hello(identity, NONCE, remote) == agreed


@pytest.mark.parametrize(("ours", "theirs"), [((1, 1), (2, 3)), ((3, 4), (1, 2))])
def test_no_common_version(ours, theirs):
    identity = Identity("decode", "d", version_min=ours[0], version_max=ours[1])
    with pytest.raises(HandshakeRefused) as excinfo:
        check_hello(identity, NONCE, hello(version_min=theirs[0], version_max=theirs[1]))
    assert excinfo.value.field == "version"


def test_no_common_carrier():
    with pytest.raises(HandshakeRefused) as excinfo:
        check_hello(Identity("decode", "d"), NONCE, hello(carriers=("rdma",)))
    assert excinfo.value.field == "carriers"


def test_our_own_hello_reflected():
    with pytest.raises(HandshakeRefused) as excinfo:
        check_hello(Identity("decode", "d"), b"r" * 32, hello())
    assert excinfo.value.field == "nonce"


def test_compatibility_hash_is_of_the_facts_not_of_their_order():
    one = compatibility_hash({"a": 1, "b": "x"})
    assert one == compatibility_hash({"b": "x", "a": 1})
    assert one != compatibility_hash({"a": 1, "b": "y"})
    assert len(one) == 32


def test_the_mac_is_of_exactly_these_bytes():
    items = [
        b"kvproto auth v1",
        b"dial",
        b"decode",
        b"c" * 32,
        hashlib.sha256(b"hello of the client").digest(),
        b"accept",
        b"prefill",
        b"s" * 32,
        hashlib.sha256(b"hello of the server").digest(),
    ]
    message = b"".join(bytes([len(item)]) + item for item in items)
    expected = hmac.new(SECRET, message, hashlib.sha256).digest()
    assert auth_mac(SECRET, OURS, THEIRS) == expected


def test_the_mac_depends_on_everything():
    macs = {auth_mac(SECRET, OURS, THEIRS), auth_mac(SECRET, THEIRS, OURS)}
    macs.add(auth_mac(SECRET + b"x", OURS, THEIRS))
    for field, value in [
        ("is_server", True),
        ("role", "router"),
        ("nonce", b"x" * 32),
        ("hello_payload", b"facts changed on the way"),
    ]:
        changed = {
            "is_server": OURS.is_server,
            "role": OURS.role,
            "nonce": OURS.nonce,
            "hello_payload": OURS.hello_payload,
            field: value,
        }
        macs.add(auth_mac(SECRET, AuthInput(**changed), THEIRS))
        macs.add(auth_mac(SECRET, THEIRS, AuthInput(**changed)))
    assert len(macs) == 11


def test_without_a_secret_the_mac_is_zero():
    assert auth_mac(None, OURS, THEIRS) == NO_SECRET_MAC == bytes(32)
    check_mac(None, bytes(32), bytes(32))


@pytest.mark.parametrize(
    ("secret", "mac", "reason"),
    [
        (None, b"x" * 32, "this side has none"),
        (SECRET, bytes(32), "the peer has none"),
        (SECRET, b"x" * 32, "another secret"),
    ],
)
def test_a_wrong_mac_says_which_side_to_look_at(secret, mac, reason):
    with pytest.raises(AuthenticationFailed, match=reason):
        check_mac(secret, mac, auth_mac(secret, OURS, THEIRS))
