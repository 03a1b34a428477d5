"""Packs of tokens for the model: where documents are cut, what is predicted from what.

Training and scoring share these types. The training loader (loader.py) stays out of the counted
script.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, eq=False)
class Segments:
    """Where a flat pack of tokens is cut: attention never crosses a cut.

    The last boundaries may repeat N: empty segments, which only round up their number. `max_len`
    bounds the segments and does not follow the longest one, so that it is the same for every
    batch of one size and context, as a kernel compiled for its value wants it.
    """

    cu: torch.Tensor  # (S + 1,) int32, 0 = first cut, N = end
    max_len: int  # tokens, min(largest context, N)
    positions: torch.Tensor  # (N,) int64, position inside the segment
    context: int  # tokens at which longer documents were cut

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Segments":
        """The same segments on a device."""
        cu, positions = (t.to(device, non_blocking=non_blocking) for t in (self.cu, self.positions))
        return Segments(cu, self.max_len, positions, self.context)

    def pin(self) -> "Segments":
        """The same segments in host memory that a GPU reads by itself."""
        cu, positions = self.cu.pin_memory(), self.positions.pin_memory()
        return Segments(cu, self.max_len, positions, self.context)


@dataclass(frozen=True, eq=False)
class Batch:
    """A flat pack: predict targets[i] from the inputs of its segment up to i."""

    inputs: torch.Tensor  # (N,) int64
    targets: torch.Tensor  # (N,) int64
    segments: Segments

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on a device; a pinned one need not be waited for (`non_blocking`)."""
        inputs, targets = (
            t.to(device, non_blocking=non_blocking) for t in (self.inputs, self.targets)
        )
        return Batch(inputs, targets, self.segments.to(device, non_blocking))

    def pin(self) -> "Batch":
        """The same batch in host memory that a GPU reads by itself."""
        return Batch(self.inputs.pin_memory(), self.targets.pin_memory(), self.segments.pin())


def segments_from_starts(
    starts: npt.NDArray[Any], num_tokens: int, context: int, cu_bucket: int = 0, longest: int = 0
) -> Segments:
    """Cut at 0, at every document start, and every `context` tokens after each of these cuts.

    `starts` is a mask of shape (num_tokens,) or positions. A `cu_bucket` above 1 pads the
    boundaries to a multiple of it. `longest` is the largest context of a schedule, where there is
    one: the bound on segments is then the same throughout. The rules are those of the
    document-packing loader of Parameter Golf PR 2014.
    """
    assert num_tokens > 0 and context > 0 and cu_bucket >= 0
    positions = np.flatnonzero(starts) if starts.dtype == bool else starts
    cuts = np.unique(np.append(positions.astype(np.int64), 0))
    assert 0 <= cuts[0] <= cuts[-1] < num_tokens
    lengths = np.diff(cuts, append=num_tokens)
    num_pieces = -(-lengths // context)
    piece = _count_up(num_pieces)
    bounds = np.append(np.repeat(cuts, num_pieces) + piece * context, num_tokens)
    padding = -len(bounds) % max(1, cu_bucket)
    cu = np.pad(bounds, (0, padding), constant_values=num_tokens)
    return Segments(
        cu=torch.from_numpy(cu.astype(np.int32)),
        max_len=min(max(context, longest), num_tokens),
        positions=torch.from_numpy(_count_up(np.diff(bounds))),
        context=context,
    )


def _count_up(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0..c-1 for each count c, one after another."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)


def pack_documents(
    docs: Sequence[npt.NDArray[Any]], bos_id: int, context: int
) -> tuple[Batch, npt.NDArray[np.int64]]:
    """Pack whole documents for scoring, and name the document that owns each target.

    A document is its tokens with BOS first; its targets are the tokens after the BOS and then a
    BOS, which says that the document ends here.
    """
    assert docs and all(len(doc) and doc[0] == bos_id for doc in docs)
    lengths = np.array([len(doc) for doc in docs])
    inputs = np.concatenate(docs).astype(np.int64)
    # Each document is followed by the BOS of the next one, and the last by one added here.
    targets = np.append(inputs[1:], bos_id)
    starts = np.cumsum(lengths) - lengths
    batch = Batch(
        inputs=torch.from_numpy(inputs),
        targets=torch.from_numpy(targets),
        segments=segments_from_starts(starts, len(inputs), context),
    )
    return batch, np.repeat(np.arange(len(docs)), lengths)
