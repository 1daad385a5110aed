import torch

from kvengine.forward_batch import ForwardBatch, Span
from kvengine.kv_pool import KvPool
from kvproto.geometry import KvGeometry, PoolLayout

SPANS = [
    Span([10, 11, 12], 4, [5, 6]),
    Span([20], 1, [1]),
    Span([30], 6, [3, 8], needs_logits=False),
    Span([40, 41], 0, [9]),
]


def make_batch(spans: list[Span] = SPANS) -> ForwardBatch:
    geometry = KvGeometry.uniform(1, 2, 4, "float32", ("a",))
    return ForwardBatch(spans, KvPool(PoolLayout(geometry, num_blocks=10, block_size=4)))


def test_decode_rows_come_first_by_falling_context() -> None:
    batch = make_batch()
    assert batch.input_ids.tolist() == [[30, 20, 10, 11, 12, 40, 41]]
    assert batch.position_ids.tolist() == [[6, 1, 4, 5, 6, 0, 1]]
    assert batch.num_rows == 7


def test_logits_rows_follow_the_callers_order() -> None:
    assert make_batch().logits_rows.tolist() == [4, 1, 6]


def test_write_puts_each_row_into_its_slot() -> None:
    # With these spans the rows go to slots 34, 5, 24, 25, 26, 36, 37: few runs, then many.
    for spans in (SPANS, [*SPANS, Span([50], 0, [0])]):
        batch = make_batch(spans)
        rows = torch.arange(1, batch.num_rows + 1.0).view(-1, 1, 1).expand(-1, 2, 4)
        batch.write(0, rows, -rows)
        keys, values = batch.pool.keys[0], batch.pool.values[0]
        slots = [34, 5, 24, 25, 26, 36, 37]
        if len(spans) > len(SPANS):
            slots.insert(2, 0)
        assert keys[slots, 1, 3].tolist() == list(range(1, batch.num_rows + 1))
        assert torch.equal(values, -keys)
        assert int((keys[:, 0, 0] != 0).sum()) == batch.num_rows


def test_the_tail_is_the_last_token_of_each_span_that_needs_logits() -> None:
    batch = make_batch()
    tail, rows = batch.tail()
    assert tail.input_ids.tolist() == [[12, 20, 41]]
    assert tail.position_ids.tolist() == [[6, 1, 1]]
    assert rows.tolist() == [4, 1, 6]
    assert [batch.input_ids[0, row].item() for row in rows] == tail.input_ids[0].tolist()
    assert tail.logits_rows.tolist() == [0, 1, 2]


def test_the_tail_keeps_track_of_a_changed_order() -> None:
    spans = [Span([1, 2], 0, [0]), Span([3, 4], 5, [1, 2])]
    batch = make_batch(spans)
    tail, rows = batch.tail()
    assert tail.input_ids.tolist() == [[4, 2]]
    assert [batch.input_ids[0, row].item() for row in rows] == [4, 2]
    assert tail.logits_rows.tolist() == [1, 0]


def test_the_tail_writes_nothing() -> None:
    tail, _ = make_batch().tail()
    ones = torch.ones(3, 2, 4)
    tail.write(0, ones, ones)
    assert float(tail.pool.keys[0].abs().sum()) == 0
