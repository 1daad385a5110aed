"""Large targets are filled directly, small ones through the inbox."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.intake import DIRECT_MIN_NBYTES, INBOX_NBYTES, Intake


def view(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


def deliver(intake: Intake, data: bytes) -> int:
    """One read; the number of bytes it took."""
    buffer = intake.next_buffer()
    nbytes = min(len(buffer), len(data))
    buffer[:nbytes] = data[:nbytes]
    intake.received(nbytes)
    while intake.take() is not None:
        pass
    return nbytes


def test_without_a_target_nothing_is_taken():
    intake = Intake()
    assert intake.missing_nbytes == 0
    intake.received(5)
    assert intake.take() is None


def test_a_large_target_is_the_buffer_itself():
    intake = Intake()
    target = view(DIRECT_MIN_NBYTES + 10)
    intake.expect([target])
    assert intake.next_buffer().obj is target.obj
    assert deliver(intake, b"x" * 20) == 20
    # The rest is small now: through the inbox.
    assert intake.next_buffer().obj is not target.obj
    deliver(intake, b"y" * (DIRECT_MIN_NBYTES - 10))
    assert bytes(target) == b"x" * 20 + b"y" * (DIRECT_MIN_NBYTES - 10)
    assert intake.missing_nbytes == 0


def test_bytes_in_the_middle_of_a_large_target_are_taken_in_one_step():
    intake = Intake()
    target = view(2 * DIRECT_MIN_NBYTES)
    intake.expect([target])
    intake.next_buffer()[:3] = b"abc"
    assert bytes(intake.take_middle(3)) == b"abc"
    assert intake.missing_nbytes == target.nbytes - 3
    # Nothing is unread, and one buffer is good for one read.
    assert intake.take() is None
    assert intake.take_middle(3) is None


def test_the_last_bytes_of_a_target_and_bytes_in_the_inbox_are_not_in_the_middle():
    intake = Intake()
    target = view(DIRECT_MIN_NBYTES)
    intake.expect([target])
    intake.next_buffer()
    assert intake.take_middle(DIRECT_MIN_NBYTES) is None
    intake.received(DIRECT_MIN_NBYTES)
    assert intake.take().nbytes == DIRECT_MIN_NBYTES
    intake.expect([view(DIRECT_MIN_NBYTES - 1)])
    intake.next_buffer()
    assert intake.take_middle(3) is None


def test_a_small_target_is_not():
    intake = Intake()
    target = view(DIRECT_MIN_NBYTES - 1)
    intake.expect([target])
    assert intake.next_buffer().nbytes == INBOX_NBYTES


def test_one_read_fills_many_targets_and_waits_for_the_next():
    intake = Intake()
    first, second, third = view(3), view(2), view(4)
    intake.expect([first, second])
    buffer = intake.next_buffer()
    buffer[:7] = b"aaabbcc"
    intake.received(7)
    assert bytes(intake.take()) == b"aaa"
    assert bytes(intake.take()) == b"bb"
    assert intake.take() is None
    intake.expect([third])
    assert bytes(intake.take()) == b"cc"
    assert intake.missing_nbytes == 2


def test_empty_targets_are_skipped():
    intake = Intake()
    target = view(2)
    intake.expect([view(0), target, view(0)])
    deliver(intake, b"ab")
    assert bytes(target) == b"ab"
    assert intake.missing_nbytes == 0


@pytest.mark.parametrize("large", [True, False])
def test_a_read_that_ends_a_direct_target_goes_on_with_the_next(large):
    intake = Intake()
    first = view(DIRECT_MIN_NBYTES)
    second = view(DIRECT_MIN_NBYTES if large else 5)
    intake.expect([first, second])
    data = bytes(i % 251 for i in range(first.nbytes + second.nbytes))
    while data:
        data = data[deliver(intake, data) :]
    assert bytes(first) + bytes(second) == bytes(
        i % 251 for i in range(first.nbytes + second.nbytes)
    )


@given(
    st.lists(st.sampled_from([0, 1, 7, 4096, DIRECT_MIN_NBYTES, 100_000]), max_size=6),
    st.lists(st.sampled_from([1, 3, 4096, INBOX_NBYTES, 1 << 20]), min_size=1, max_size=20),
)
def test_bytes_arrive_in_order_whatever_the_sizes(target_sizes, read_sizes):
    intake = Intake()
    targets = [view(size) for size in target_sizes]
    intake.expect(targets)
    data = bytes(i % 253 for i in range(sum(target_sizes)))
    rest, turn = data, 0
    while rest:
        size = read_sizes[turn % len(read_sizes)] if turn < 100 else 1 << 20
        rest = rest[deliver(intake, rest[:size]) :]
        turn += 1
    assert b"".join(targets) == data
    assert intake.missing_nbytes == 0
