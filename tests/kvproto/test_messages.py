"""Every message: golden frames, round trips, limits, who may send it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto import messages
from kvproto.errors import LocalProtocolError, Malformed, UnexpectedMessage
from kvproto.fields import Blob, Boolean, Choice, PackedUInts, Real, ScalarMap, Text, TextList, UInt
from kvproto.frame import decode_frame, encode_frame
from kvproto.header import ByteOrder, Kind
from kvproto.messages import (
    FIELDS,
    MAX_TOKENS,
    MESSAGES,
    ROLES,
    SENDERS,
    Error,
    Generate,
    Prefill,
    PrefillWorker,
    Tokens,
    decode_fields,
    encode_fields,
)
from kvproto.record import RecordList, field_infos

ASCII = st.characters(min_codepoint=32, max_codepoint=126)
SCALAR = st.integers(-(1 << 63), (1 << 64) - 1) | st.text(ASCII, max_size=9)


def values_of(spec) -> st.SearchStrategy:
    """Values that a spec allows."""
    if isinstance(spec, Text):
        alphabet = ASCII if spec.ascii_only else st.characters(exclude_categories=["Cs"])
        # 4 bytes is the most a character needs.
        size = spec.max_nbytes if spec.ascii_only else spec.max_nbytes // 4
        return st.text(alphabet, min_size=spec.min_nbytes, max_size=min(size, 40))
    if isinstance(spec, Choice):
        return st.sampled_from(spec.values)
    if isinstance(spec, UInt):
        return st.integers(spec.min_value, spec.max_value)
    if isinstance(spec, Real):
        return st.floats(spec.min_value, spec.max_value)
    if isinstance(spec, Boolean):
        return st.booleans()
    if isinstance(spec, Blob):
        return st.binary(min_size=spec.nbytes, max_size=spec.nbytes)
    if isinstance(spec, PackedUInts):
        words = st.integers(0, (1 << spec.bits) - 1)
        return st.lists(words, min_size=spec.min_items, max_size=min(spec.max_items, 20))
    if isinstance(spec, TextList):
        return st.lists(values_of(spec.item), max_size=spec.max_items)
    if isinstance(spec, ScalarMap):
        scalar = SCALAR | st.floats(allow_nan=False, allow_infinity=False)
        keys = st.text(ASCII, min_size=1, max_size=9)
        return st.dictionaries(keys, scalar if spec.allow_float else SCALAR, max_size=5)
    assert isinstance(spec, RecordList)
    return st.lists(record_of(spec.record), max_size=4)


def record_of(record) -> st.SearchStrategy:
    infos = field_infos(record)
    return st.builds(record, **{info.name: values_of(info.spec) for info in infos})


any_message = st.sampled_from(sorted(MESSAGES.values(), key=lambda item: item.kind)).flatmap(
    record_of
)


@given(any_message, st.sampled_from(ByteOrder))
def test_round_trip_through_a_frame(message, order):
    raw = b"".join(encode_frame(message.kind, encode_fields(message, order), order=order))
    frame = decode_frame(raw, max_payload_nbytes=1 << 20)
    assert frame.header.order is order
    assert decode_fields(frame.header.kind, frame.fields, order) == message


def test_every_kind_has_one_message_and_one_set_of_senders():
    assert set(MESSAGES) == set(SENDERS) == set(Kind) - {Kind.KV_FILE, Kind.REGION}
    for kind, message in MESSAGES.items():
        assert message.kind is kind
        assert SENDERS[kind] <= set(ROLES)


def test_kind_numbers_are_append_only():
    numbers = [1, 2, 3, 4, 5, *range(8, 13), *range(16, 28), 32, 33, 34, 35, 48, 49]
    assert sorted(Kind) == numbers


@pytest.mark.parametrize("kind", [Kind.KV_FILE, Kind.REGION])
def test_what_lies_in_files_is_no_message(kind):
    with pytest.raises(UnexpectedMessage, match=f"a {kind.name} frame belongs in a file"):
        decode_fields(kind, {}, ByteOrder.LITTLE)


def test_who_may_write():
    """A client that brings its KV writes as a prefill worker does; nobody else does."""
    for kind in (Kind.STARTED, Kind.WRITE, Kind.PLACED, Kind.COMMIT, Kind.HEARTBEAT, Kind.ATTACHED):
        assert SENDERS[kind] == {"prefill", "client"}
    for kind in (Kind.PREFILL, Kind.PROBE, Kind.OFFER, Kind.COMMIT_ACK, Kind.DESCRIBE):
        assert SENDERS[kind] == {"decode", "client"}


@pytest.mark.parametrize("record", MESSAGES.values())
def test_messages_are_frozen_and_slotted(record):
    assert record.__dataclass_params__.frozen
    assert "__dict__" not in dir(record)


@given(any_message.filter(lambda message: FIELDS[type(message)]), st.data())
def test_each_missing_field_is_named_or_takes_its_default(message, data):
    fields = encode_fields(message, ByteOrder.LITTLE)
    info = data.draw(st.sampled_from(FIELDS[type(message)]))
    del fields[info.name]
    if info.is_required:
        with pytest.raises(Malformed, match=f"^{info.name}: is missing"):
            decode_fields(message.kind, fields, ByteOrder.LITTLE)
    else:
        decode_fields(message.kind, fields, ByteOrder.LITTLE)


def test_a_field_of_the_wrong_type_is_named():
    fields = encode_fields(Prefill("s", 1, [1], 1.0), ByteOrder.LITTLE)
    for name in fields:
        with pytest.raises(Malformed) as excinfo:
            decode_fields(Kind.PREFILL, {**fields, name: None}, ByteOrder.LITTLE)
        assert excinfo.value.field == name


def test_a_local_fault_names_message_and_field():
    with pytest.raises(LocalProtocolError, match=r"PREFILL: sequence_id: has 65 bytes"):
        encode_fields(Prefill("x" * 65, 1, [1], 1.0), ByteOrder.LITTLE)


@pytest.mark.parametrize("num_tokens", [0, MAX_TOKENS + 1])
def test_the_number_of_tokens_is_bounded(num_tokens):
    with pytest.raises(LocalProtocolError, match="tokens: has"):
        encode_fields(Tokens("s", 0, [1] * num_tokens), ByteOrder.LITTLE)


def test_the_longest_prompt_fits_its_frame():
    message = Prefill("s", 1, [7] * MAX_TOKENS, 1.0)
    raw = b"".join(
        encode_frame(Kind.PREFILL, encode_fields(message, ByteOrder.BIG), order=ByteOrder.BIG)
    )
    frame = decode_frame(raw, max_payload_nbytes=5 << 20)
    assert decode_fields(Kind.PREFILL, frame.fields, ByteOrder.BIG) == message


def test_the_sentence_of_an_error_is_cut():
    fields = encode_fields(Error(1, "ä" * 2000), ByteOrder.LITTLE)
    assert fields["message"] == "ä" * 512


def test_the_list_of_prefill_workers_is_bounded():
    message = Generate(
        "s", [1], 1, 1, 0.0, 1.0, 0, 0, [], False, [PrefillWorker("p", "h", 1)] * 17, 1.0
    )
    with pytest.raises(LocalProtocolError, match="prefill_workers: has 17 items"):
        encode_fields(message, ByteOrder.LITTLE)


def test_the_module_says_where_its_tables_are():
    assert "docs/wire.md" in messages.__doc__
