"""Counts floating-point operations of tensor code, on any device; "meta" needs no arithmetic.

A product of matrices counts two for each multiply-add. Attention counts four for each channel of a
query and each key that it sees, in a pack of full pieces. Any other operation with a floating-point
result counts one for each element of its largest tensor: of the result where it is pointwise, of
the input where it is a reduction. Moving numbers counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Products of matrices, with the place of the left factor among the arguments.
MATMULS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "addmv": 1, "baddbmm": 1}
# What only makes, copies, converts or looks up numbers; views are told by their schema.
MOVES = {
    "_to_copy",
    "_unsafe_view",
    "arange",
    "cat",
    "clone",
    "copy_",
    "embedding",
    "empty",
    "empty_like",
    "fill_",
    "full",
    "full_like",
    "gather",
    "index",
    "index_select",
    "new_empty",
    "new_zeros",
    "ones",
    "ones_like",
    "scalar_tensor",
    "stack",
    "zeros",
    "zeros_like",
}


class FlopCounter(TorchDispatchMode):
    """Adds up what runs inside its `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.num_flops = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_flops += _count(func, args, result)
        return result


def count_flops(work: Callable[[], object]) -> int:
    """Floating-point operations of one call of `work`."""
    with FlopCounter() as counter:
        work()
    return counter.num_flops


def count_keys(num_tokens: int, max_len: int, window: int) -> int:
    """Keys seen by all queries of a pack of pieces of `max_len`, each its own among them."""
    reach = min(window + 1, max_len) if window else max_len
    keys_of_piece = reach * (reach + 1) // 2 + (max_len - reach) * reach
    return num_tokens * keys_of_piece // max_len


def _count(func: OpOverload, args: Sequence[Any], result: Any) -> int:
    name = func.overloadpacket.__name__
    if name == "attend":
        num_tokens, num_heads, head_dim = args[0].shape
        max_len, window = args[4:6]
        return 4 * num_heads * head_dim * count_keys(num_tokens, max_len, window)
    if name in MATMULS:
        place = MATMULS[name]
        # The sum with a first argument is one more an element.
        return int(result.numel() * (2 * args[place].size(-1) + place))
    if name in MOVES or func.is_view or not _float_sizes(result):
        return 0
    return max(_float_sizes((args, result)))


def _float_sizes(tree: Any) -> list[int]:
    leaves = tree_leaves(tree)
    return [x.numel() for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
