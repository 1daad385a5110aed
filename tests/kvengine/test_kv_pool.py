import pytest
import torch

from kvengine.errors import PoolTooSmall
from kvengine.kv_pool import KvPool, torch_dtype
from kvproto.geometry import KvGeometry, PoolLayout


def make_pool(dtype: str = "float32") -> KvPool:
    geometry = KvGeometry.uniform(3, 2, 4, dtype, ("a", "b", "c"))
    return KvPool(PoolLayout(geometry, num_blocks=6, block_size=4))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_and_bytes_are_the_same_memory(dtype: str) -> None:
    pool = make_pool(dtype)
    layout = pool.layout
    assert len(pool.region) == layout.nbytes
    assert not pool.region.readonly
    assert pool.keys[1].shape == pool.values[1].shape == (24, 2, 4)
    for layer in range(3):
        for region, tensors in enumerate((pool.keys, pool.values)):
            tensors[layer][7] = torch.arange(8).view(2, 4) + 100 * region + 10 * layer
            [(begin, nbytes)] = layout.pieces(layer, [1], 3, 1)[region]
            raw = bytearray(pool.region[begin : begin + nbytes])
            seen = torch.frombuffer(raw, dtype=torch_dtype(dtype)).view(2, 4)
            assert torch.equal(seen, tensors[layer][7])


def test_writing_bytes_changes_the_tensors() -> None:
    pool = make_pool()
    [(begin, _)] = pool.layout.pieces(2, [1], 1, 1)[1]
    pool.region[begin : begin + 32] = torch.ones(8).numpy().tobytes()
    assert torch.equal(pool.values[2][5], torch.ones(2, 4))
    assert float(pool.values[2].sum()) == 8
    assert float(pool.keys[2].sum()) == 0


def test_buffers_are_the_runs_of_k_then_v() -> None:
    pool = make_pool()
    for slot in range(24):
        pool.keys[1][slot] = slot
        pool.values[1][slot] = 100 + slot
    # Tokens 2..10 of blocks 3, 4, 0: slots 14..19 in one run, then 0..2.
    buffers = pool.buffers(1, [3, 4, 0], 2, 9)
    slots = [torch.frombuffer(bytearray(b), dtype=torch.float32)[::8].tolist() for b in buffers]
    assert slots == [
        [14, 15, 16, 17, 18, 19],
        [0, 1, 2],
        [114, 115, 116, 117, 118, 119],
        [100, 101, 102],
    ]
    buffers[0][:4] = torch.tensor([5.5]).numpy().tobytes()
    assert float(pool.keys[1][14, 0, 0]) == 5.5


def test_a_pool_beyond_the_address_space_is_refused() -> None:
    geometry = KvGeometry.uniform(3, 2, 4, "float32", ("a", "b", "c"))
    with pytest.raises(PoolTooSmall, match="give a smaller pool size"):
        KvPool(PoolLayout(geometry, num_blocks=1 << 50, block_size=16))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match="not a torch dtype"):
        torch_dtype("nn")
