"""Linear layers whose weight was laid out once for oneDNN's matrix kernels.

`torch.nn.functional.linear` repacks the weight inside every call; with 2 to 64 rows that costs
more than the arithmetic. Packing at load time removes it, and the same kernels can add another
tensor while their result is still in cache.
"""

from __future__ import annotations

import torch
from torch import nn

# The layout is chosen for a row count but serves every row count; 512 was the best compromise.
_PACKED_FOR_ROWS = 512
# A transposed weight is as fast as a packed one and faster for a single row, unless its rows lie a
# multiple of this many elements apart: then they fall on the same few cache sets.
_ALIASING_ELEMENTS = 256


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this build and dtype have the packed kernels."""
    return dtype == torch.float32 and torch.backends.mkldnn.is_available()


def needs_row_copy(out_features: int) -> bool:
    """Return whether one layout cannot be the best for one row and for many."""
    return out_features % _ALIASING_ELEMENTS == 0


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.t().contiguous().t()


def _lay_out(weight: torch.Tensor) -> torch.Tensor:
    if not needs_row_copy(weight.shape[0]):
        return _transposed(weight)
    return torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` for x of [..., rows, in_features], with an optional fused addition.

    Args:
        weight: float32 [out_features, in_features]; copied into the faster of the packed and the
            transposed layout, not kept.
        bias: float32 [out_features] or None.
        has_row_copy: where the two layouts differ much, keep the transposed one as well and use it
            for a single row: about a quarter faster, twice the memory of this matrix.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        has_row_copy: bool = False,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        detached = weight.detach()
        # Plain attributes, not buffers: a packed tensor has no storage that could be saved.
        self._weight = _lay_out(detached)
        self._row_weight = self._weight
        if has_row_copy and needs_row_copy(self.out_features):
            self._row_weight = _transposed(detached)
        self._bias = None if bias is None else bias.detach().clone()
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def _weight_for(self, x: torch.Tensor) -> torch.Tensor:
        return self._row_weight if x.shape[-2] == 1 else self._weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the linear map of x: [..., rows, in_features] -> [..., rows, out_features]."""
        return self._unary(x, self._weight_for(x), self._bias, "none", [], "")

    def plus(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Return ``linear(x) + other``."""
        return self._binary(x, other, self._weight_for(x), self._bias, "add")
