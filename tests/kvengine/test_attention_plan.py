import torch

from kvengine.attention_plan import AttentionPlan, make_plan
from kvengine.forward_batch import Span
from kvproto.geometry import KvGeometry, PoolLayout

LAYOUT = PoolLayout(KvGeometry.uniform(1, 2, 4, "float32", ("a",)), num_blocks=100, block_size=4)


def plan(spans: list[Span], window: int | None = None, dtype: torch.dtype = torch.float32):  # type: ignore[no-untyped-def]
    made = make_plan(spans, LAYOUT, num_query_heads=4, sliding_window=window, dtype=dtype)
    assert isinstance(made, AttentionPlan)
    return made


def decode(num_context: int, first_block: int = 0) -> Span:
    num_blocks = -(-num_context // 4)
    return Span([1], num_context - 1, range(first_block, first_block + num_blocks))


def test_decode_pairs_name_every_key_of_every_query_head() -> None:
    (group,) = plan([Span([1], 4, [7, 2]), Span([1], 4, [5, 9])]).decode_groups
    slots = ([28, 29, 30, 31, 8], [20, 21, 22, 23, 36])
    heads = [[2 * slot + kv_head for slot in row] for row in slots for kv_head in (0, 0, 1, 1)]
    assert group.pairs.view(8, 5).tolist() == heads
    assert group.offsets.tolist() == list(range(0, 40, 5))
    assert group.padding is None
    assert group.scores.shape == (8, 800)


def test_a_sequence_that_decodes_alone_reads_its_keys_as_a_view() -> None:
    alone = plan([Span([1], 4, [2, 3])])
    assert alone.decode_groups == []
    (group,) = alone.prefill_groups
    assert (group.num_rows, group.runs, group.mask) == (1, [(8, 5)], None)
    (group,) = plan([decode(100)], window=6).prefill_groups
    assert sum(length for _, length in group.runs) == 6


def test_shorter_rows_are_padded_and_masked() -> None:
    (group,) = plan([decode(8), decode(7, 10)]).decode_groups
    assert group.padding is not None
    assert group.padding.isinf().int().view(2, 8).tolist() == [[0] * 8, [0] * 7 + [1]]


def test_much_shorter_rows_start_a_new_group() -> None:
    groups = plan([decode(100), decode(80), decode(74), decode(20), decode(3)]).decode_groups
    assert [(g.first_row, g.num_rows, g.num_keys) for g in groups] == [
        (0, 2, 100),
        (2, 1, 74),
        (3, 1, 20),
        (4, 1, 3),
    ]


def test_a_sliding_window_limits_the_keys() -> None:
    (group,) = plan([decode(100), decode(100)], window=6).decode_groups
    assert (group.pairs.view(8, 6)[0] // 2).tolist() == [94, 95, 96, 97, 98, 99]


def test_fresh_spans_of_equal_length_share_a_group() -> None:
    spans = [Span([1] * n, 0, range(10)) for n in (9, 5, 5, 5, 3)]
    groups = plan(spans).prefill_groups
    assert [(g.first_row, g.num_spans, g.num_rows) for g in groups] == [
        (0, 1, 9),
        (9, 3, 5),
        (24, 1, 3),
    ]
    assert all(g.is_fresh and g.is_causal and g.mask is None for g in groups)


def test_a_chunk_after_a_context_reads_the_pool_under_a_mask() -> None:
    (group,) = plan([Span([1] * 2, 5, [3, 4])]).prefill_groups
    assert (group.is_fresh, group.is_causal) == (False, False)
    assert group.runs == [(12, 7)]
    assert group.mask is not None
    assert group.mask.isinf().int().tolist() == [[0, 0, 0, 0, 0, 0, 1], [0] * 7]


def test_a_window_inside_a_fresh_span_is_masked() -> None:
    (group,) = plan([Span([1] * 4, 0, [0])], window=2).prefill_groups
    assert (group.is_fresh, group.is_causal) == (True, False)
    assert group.mask is not None
    seen = (~group.mask.isinf()).int().tolist()
    assert seen == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_a_window_drops_context_that_no_row_sees() -> None:
    (group,) = plan([Span([1] * 2, 20, range(6))], window=3).prefill_groups
    assert group.runs == [(18, 4)]


def test_dtypes_without_the_sampled_product_attend_span_by_span() -> None:
    made = plan([decode(9)], dtype=torch.bfloat16)
    assert made.decode_groups == []
    assert [(g.num_rows, g.is_causal, g.mask) for g in made.prefill_groups] == [(1, False, None)]
