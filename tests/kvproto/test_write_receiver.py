"""One WRITE at a time: opened, completed or abandoned."""

import pytest

from kvproto.errors import LeaseError, Malformed, UnexpectedMessage
from kvproto.header import HOST_ORDER, ByteOrder, Header, Kind
from kvproto.messages import Placed, Write
from kvproto.write_receiver import WriteReceiver

OTHER_ORDER = next(order for order in ByteOrder if order is not HOST_ORDER)


def header_of(geometry, num_tokens: int, order: ByteOrder = HOST_ORDER) -> Header:
    return Header(Kind.WRITE, 1, 0, geometry.shape_word(0, num_tokens), order)


def write_of(sequence_id: str = "s", num_tokens: int = 2) -> Write:
    return Write(sequence_id, 1, "layers.0", 0, num_tokens)


def test_the_body_goes_to_the_landing(geometry, memory_landing):
    landing = memory_landing()
    receiver = WriteReceiver(landing)
    header = header_of(geometry, 2)
    pieces = list(receiver.open(header, write_of(), 128, "p"))
    assert [piece.nbytes for piece in pieces] == [64, 64]
    assert pieces[0].obj is landing.memory.obj
    assert receiver.complete(header) is None
    assert landing.names() == ["destination", "landed"]
    receiver.abandon()
    assert landing.names() == ["destination", "landed"]


def test_pieces_and_order_are_handed_on(geometry, memory_landing):
    landing = memory_landing()
    receiver = WriteReceiver(landing)
    header = header_of(geometry, 2, OTHER_ORDER)
    first, second = receiver.open(header, write_of(), 128, "p")
    first[:], second[:] = b"a" * 64, b"b" * 64
    for piece in (first[:10], first[10:], second):
        receiver.received(piece)
    receiver.complete(header)
    assert landing.arrived == b"a" * 64 + b"b" * 64
    assert landing.order is OTHER_ORDER


def test_pieces_of_a_refused_body_are_not_handed_on(geometry, memory_landing):
    landing = memory_landing()
    receiver = WriteReceiver(landing)
    for piece in receiver.open(header_of(geometry, 2), write_of("refused"), 128, "p"):
        receiver.received(piece)
    assert receiver.complete(header_of(geometry, 2)) is not None
    assert not landing.arrived


def test_placed_is_counted_or_refused(memory_landing):
    landing = memory_landing()
    receiver = WriteReceiver(landing)
    assert receiver.placed(Placed("s", 1, "layers.0", 0, 2), "p") is None
    assert isinstance(receiver.placed(Placed("refused", 1, "layers.0", 0, 2), "p"), LeaseError)
    assert landing.names() == ["placed"]


def test_without_a_landing(geometry):
    with pytest.raises(UnexpectedMessage, match="no lease"):
        WriteReceiver(None).open(header_of(geometry, 2), write_of(), 128, "p")
    with pytest.raises(UnexpectedMessage, match="unexpected PLACED"):
        WriteReceiver(None).placed(Placed("s", 1, "layers.0", 0, 2), "p")


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_shape_word_that_does_not_fit_is_no_refusal(geometry, memory_landing, num_tokens):
    landing = memory_landing()
    header = header_of(geometry, num_tokens)
    with pytest.raises(Malformed) as excinfo:
        WriteReceiver(landing).open(header, write_of(), 128, "p")
    assert excinfo.value.field == "shape_word"
    assert landing.log == []


@pytest.mark.parametrize("nbytes", [0, 1, 64 * 1024, 200_000])
def test_a_refused_body_is_drained_into_bounded_memory(geometry, memory_landing, nbytes):
    landing = memory_landing()
    receiver = WriteReceiver(landing)
    header = header_of(geometry, 2)
    pieces = list(receiver.open(header, write_of("refused"), nbytes, "p"))
    assert sum(piece.nbytes for piece in pieces) == nbytes
    assert all(piece.nbytes <= 64 * 1024 for piece in pieces)
    refusal = receiver.complete(header)
    assert isinstance(refusal, LeaseError)
    assert landing.log == []
    # The refusal is of that write alone.
    list(receiver.open(header, write_of(), 128, "p"))
    assert receiver.complete(header) is None


def test_abandon_tells_the_landing_once(geometry, memory_landing):
    landing = memory_landing()
    receiver = WriteReceiver(landing)
    receiver.open(header_of(geometry, 2), write_of(), 128, "p")
    receiver.abandon()
    receiver.abandon()
    assert landing.names() == ["destination", "abandoned"]


def test_abandon_without_a_write_or_a_landing(memory_landing):
    landing = memory_landing()
    WriteReceiver(landing).abandon()
    WriteReceiver(None).abandon()
    assert landing.log == []
