"""Counts floating-point operations of tensor code, on any device; on "meta" nothing is computed.

A matrix product counts two per multiply-add. Attention counts four per channel of a query and
per key that the query sees, in a pack of full pieces. Any other operation with a floating-point
result counts one per element of its largest tensor, which is the result of a pointwise operation
and the input of a reduction. Moving numbers counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Matrix products -> index of the left factor among the arguments.
MATMULS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "addmv": 1, "baddbmm": 1}
# Operations that only create, copy, convert or look up numbers. Views are known by their schema.
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
    """Counts the operations inside its `with` block."""

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
    """Pairs of a query and a key that it sees, in a pack of full pieces of `max_len` tokens."""
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
        # The operations with a summand ("addmm") count one more per element.
        return int(result.numel() * (2 * args[place].size(-1) + place))
    if name in MOVES or func.is_view or not _float_sizes(result):
        return 0
    return max(_float_sizes((args, result)))


def _float_sizes(tree: Any) -> list[int]:
    leaves = tree_leaves(tree)
    return [x.numel() for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
