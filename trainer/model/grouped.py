"""Products of mixture-of-experts layers on the meta device, in precisions for which PyTorch has them on real devices alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class GroupedShapes(TorchDispatchMode):
    """Within the block, `grouped_mm` of tensors without memory has the shapes of real ones in every precision.

    PyTorch 2.13 refuses all but bfloat16 there ("Expected inputs of BF16 type").
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            left, right, *rest = args
            ends = rest[0] if rest else (kwargs or {}).get("offs")
            # (rows, in) by (groups, in, out), or for a gradient (in, rows) by (rows, out), whose groups `ends` counts.
            groups = () if left.ndim + right.ndim > 4 or ends is None else (ends.shape[0],)
            return left.new_empty(*groups, *left.shape[:-1], right.shape[-1])
        return function(*args, **(kwargs or {}))
