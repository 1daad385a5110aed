"""Views and byte swapping."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.buffer import byte_view, swap_in_place, total_nbytes


def test_byte_view_is_no_copy():
    data = bytearray(b"abcd")
    byte_view(data)[0] = ord("x")
    assert data == b"xbcd"


@pytest.mark.parametrize("view", [memoryview(array("f", [1.0, 2.0])), memoryview(bytes(8))])
def test_byte_view_counts_bytes_whatever_the_format(view):
    assert byte_view(view).format == "B"
    assert len(byte_view(view)) == 8


def test_byte_view_flattens_two_dimensions():
    view = memoryview(bytes(range(8))).cast("B", (2, 4))
    assert byte_view(view).tolist() == list(range(8))


def test_total_nbytes_counts_bytes_not_items():
    assert total_nbytes([b"abc", memoryview(array("d", [1.0]))]) == 11


@given(st.sampled_from([1, 2, 4, 8]), st.binary(min_size=1, max_size=64), st.integers(1, 3000))
def test_swap_reverses_each_element(element_nbytes, seed, num_elements):
    data = bytearray((seed * (element_nbytes * num_elements))[: element_nbytes * num_elements])
    expected = b"".join(
        bytes(reversed(data[start : start + element_nbytes]))
        for start in range(0, len(data), element_nbytes)
    )
    swap_in_place(memoryview(data), element_nbytes)
    assert data == expected


def test_swap_crosses_its_pieces():
    data = bytearray(b"\x01\x02\x03\x04" * 50_000)
    swap_in_place(memoryview(data), 4)
    assert data == b"\x04\x03\x02\x01" * 50_000
