"""The shape word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvproto.errors import LocalProtocolError
from kvproto.shape import MAX_HEAD_DIM, MAX_KV_HEADS, MAX_LAYERS, MAX_SEQ_LEN, Shape

counts = st.tuples(
    st.integers(0, MAX_LAYERS),
    st.integers(0, MAX_KV_HEADS),
    st.integers(0, MAX_HEAD_DIM),
    st.integers(0, MAX_SEQ_LEN),
)


@given(counts)
def test_round_trip(values):
    assert Shape.decode(Shape(*values).encode()) == values


@given(st.integers(0, (1 << 64) - 1))
def test_every_word_is_a_shape(word):
    assert Shape.decode(word).encode() == word


def test_layers_are_the_most_significant_bits():
    assert Shape(1, 0, 0, 0).encode() == 1 << 52
    assert Shape(0, 1, 0, 0).encode() == 1 << 40
    assert Shape(0, 0, 1, 0).encode() == 1 << 28
    assert Shape(0, 0, 0, 1).encode() == 1


@pytest.mark.parametrize("field", Shape._fields)
@pytest.mark.parametrize("value", [-1, 1 << 28])
def test_a_count_that_does_not_fit_is_named(field, value):
    with pytest.raises(LocalProtocolError, match=field):
        Shape(1, 1, 1, 1)._replace(**{field: value}).encode()
