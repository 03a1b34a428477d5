"""Where earlier tokens live: a flat pack of documents, or lanes that step one token at a time.

Lanes that read chunks of tokens are in `chunk_cache.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.data.batch import Segments
from underpar.kernels.attention import attend
from underpar.recipe import ModelSpec

if TYPE_CHECKING:
    from underpar.model.chunks import LaneChunks

# Memory grows in spans of this many positions.
SPAN = 64


class PackedCache:
    """The cache of a flat pack: attention within each segment, and the token before each token."""

    def __init__(self, segments: Segments) -> None:
        self.cu, self.max_len = segments.cu, segments.max_len
        self.context = segments.context
        self.positions = segments.positions

    def attend(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Causal attention within each segment."""
        return attend(q, k, v, self.cu, self.max_len, window)

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (N, ...) one token earlier; zeros before the first."""
        return torch.cat((torch.zeros_like(x[:1]), x[:-1]))


class LaneCache:
    """Keys and values of lanes that step together, one document per lane.

    A lane that reaches `context` begins a new segment at position 0. Shapes depend only on the
    number of lanes and on the farthest position, never on the tokens. Repeating the same steps
    therefore gives the same floats, bit for bit, which the codec relies on.
    """

    def __init__(self, spec: ModelSpec, num_lanes: int, device: torch.device) -> None:
        self.context = spec.context
        self.spec = spec
        self.chunks: LaneChunks | None = None
        """The cache of the chunks of these tokens, if a network reads chunks (model/chunks.py)."""
        self._lanes = torch.arange(num_lanes, device=device)
        self.positions = torch.zeros(num_lanes, dtype=torch.long, device=device)
        # By slot of the plan, not by layer: a layer that is visited twice has two caches.
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
        """Keys and values (2, L, K, room, D) of a slot; the room doubles as segments grow."""
        num_heads, head_dim = like.shape[1:]
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
        """Move every lane on by one token; a full segment begins again at position 0."""
        self.positions = (self.positions + 1) % self.context

    def keep(self, lanes: Tensor) -> None:
        """Drop all lanes but these, by index."""
        self.positions = self.positions[lanes]
        self._lanes = self._lanes[: len(lanes)]
        self._slots = {slot: cache[:, lanes] for slot, cache in self._slots.items()}
        self._last = {name: x[lanes] for name, x in self._last.items()}
        if self.chunks is not None:
            self.chunks.keep(lanes)

    def reset(self, lanes: Tensor) -> None:
        """Begin a new document in the lanes where `lanes` (L,) is true."""
        self.positions = torch.where(lanes, 0, self.positions)
