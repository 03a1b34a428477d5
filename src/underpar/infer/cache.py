"""Keys and values of tokens already read, one lane a document, all lanes stepping together.

The shape of every product depends only on the number of lanes and on how far the farthest lane has
come, never on the tokens: whoever repeats the same steps gets the same floats, bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.recipe import ModelSpec

# Keys are read in spans of this many positions, so that early steps do not pay for the whole cache.
SPAN = 64


class LaneCache:
    """A past of lanes; a lane that reaches `context` starts its piece again at position 0."""

    def __init__(self, spec: ModelSpec, num_lanes: int, device: torch.device) -> None:
        self.context = spec.context
        self._lanes = torch.arange(num_lanes, device=device)
        self.positions = torch.zeros(num_lanes, dtype=torch.long, device=device)
        self._sizes = (spec.num_kv_heads, spec.head_dim)
        # Keys and values by slot of the plan, not by layer: a layer visited twice has two pasts.
        self._slots: dict[int, Tensor] = {}
        self._offsets = torch.arange(spec.context, device=device)
        self._span = SPAN
        self._last: dict[str, Tensor] = {}

    def place(self) -> None:
        """Make ready for the next token of each lane, at `positions` (L,)."""
        farthest = int(self.positions.max()) + 1
        self._span = min(self.context, -(-farthest // SPAN) * SPAN)

    def attend(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Store this step's k and v (L, K, D) and read back: q (L, H, D) -> (L, H, D)."""
        cache = self._room(slot, k)
        cache[0, self._lanes, :, self.positions] = k
        cache[1, self._lanes, :, self.positions] = v
        keys, values = cache[:, :, :, : self._span]  # (L, K, span, D)
        back = self.positions[:, None] - self._offsets[: self._span]  # (L, span)
        seen = (back >= 0) & (back <= window) if window else back >= 0
        y = F.scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=seen[:, None, None], enable_gqa=True
        )
        return y[:, :, 0]

    def _room(self, slot: int, like: Tensor) -> Tensor:
        """Keys and values (2, L, K, room, D) of a slot; the room doubles as pieces grow."""
        num_heads, head_dim = self._sizes
        cache = self._slots.get(slot)
        if cache is None:
            cache = like.new_zeros(2, len(self._lanes), num_heads, self._span, head_dim)
        elif cache.size(3) < self._span:
            more = min(max(self._span, 2 * cache.size(3)), self.context) - cache.size(3)
            cache = F.pad(cache, (0, 0, 0, more))
        self._slots[slot] = cache
        return cache

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (L, ...) of the step before; kept until the next step."""
        last = self._last.get(name, torch.zeros_like(x))
        # A copy: the caller may reuse its buffer for the next step.
        self._last[name] = x.clone()
        return last

    def advance(self) -> None:
        """Move every lane on by one token; a full piece begins again."""
        self.positions = (self.positions + 1) % self.context

    def keep(self, lanes: Tensor) -> None:
        """Drop all lanes but these, by index."""
        self.positions = self.positions[lanes]
        self._lanes = self._lanes[: len(lanes)]
        self._slots = {slot: cache[:, lanes] for slot, cache in self._slots.items()}
        self._last = {name: x[lanes] for name, x in self._last.items()}

    def reset(self, lanes: Tensor) -> None:
        """Begin a new document in the lanes where `lanes` (L,) is true."""
        self.positions = torch.where(lanes, 0, self.positions)
