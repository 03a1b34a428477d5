"""What the model reads: a flat pack of tokens, and the segments into which it is cut.

Training, scoring and the codec share these types. They stand apart from the training loader
(loader.py) because the counted script needs them and does not need the loader.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, eq=False)
class Segments:
    """How a flat pack of N tokens is cut into segments. Attention never crosses a cut.

    Segment i holds tokens cu[i] to cu[i + 1] - 1, as in the variable-length interface of
    FlashAttention. A token sees itself and the earlier tokens of its own segment. Example: two
    documents of 3 and 5 tokens at a context of 4 give cu = [0, 3, 7, 8] and
    positions = [0, 1, 2, 0, 1, 2, 3, 0].

    The last entries of `cu` may repeat N. These segments are empty: they only pad the length of
    `cu`, so that a compiler meets few shapes. `max_len` is an upper bound and not the length of the
    longest segment. It is therefore equal for all batches of one size and context, and a kernel
    that is compiled for its value is compiled once.
    """

    cu: torch.Tensor  # (S + 1,) int32, first token of each segment, then N
    max_len: int  # tokens; no segment is longer: min(largest context, N)
    positions: torch.Tensor  # (N,) int64, index of each token in its segment
    context: int  # tokens; longer documents were cut at this length

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Segments":
        """The same segments on a device."""
        cu, positions = (t.to(device, non_blocking=non_blocking) for t in (self.cu, self.positions))
        return Segments(cu, self.max_len, positions, self.context)

    def pin(self) -> "Segments":
        """The same segments in pinned host memory, from which a GPU copies without waiting."""
        cu, positions = self.cu.pin_memory(), self.positions.pin_memory()
        return Segments(cu, self.max_len, positions, self.context)


@dataclass(frozen=True, eq=False)
class Batch:
    """A flat pack of N tokens: targets[i] is predicted from inputs[i] and what precedes it.

    Only inputs of the same segment are seen.
    """

    inputs: torch.Tensor  # (N,) int64
    targets: torch.Tensor  # (N,) int64
    segments: Segments

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """The same batch on a device; with `non_blocking`, a pinned batch is copied in parallel."""
        inputs, targets = (
            t.to(device, non_blocking=non_blocking) for t in (self.inputs, self.targets)
        )
        return Batch(inputs, targets, self.segments.to(device, non_blocking))

    def pin(self) -> "Batch":
        """The same batch in pinned host memory, from which a GPU copies without waiting."""
        return Batch(self.inputs.pin_memory(), self.targets.pin_memory(), self.segments.pin())


def segments_from_starts(
    starts: npt.NDArray[Any], num_tokens: int, context: int, cu_bucket: int = 0, longest: int = 0
) -> Segments:
    """Cut at 0, at every document start, and every `context` tokens after each of these cuts.

    `starts` is a mask of shape (num_tokens,) or an array of positions. A `cu_bucket` above 1 pads
    the boundaries to a multiple of it. `longest` is the largest context of a schedule; it keeps
    `max_len` constant over the run. The rules are those of the document-packing loader of Parameter
    Golf PR 2014.
    """
    assert num_tokens > 0 and context > 0 and cu_bucket >= 0
    positions = np.flatnonzero(starts) if starts.dtype == bool else starts
    cuts = np.unique(np.append(positions.astype(np.int64), 0))
    assert 0 <= cuts[0] <= cuts[-1] < num_tokens
    lengths = np.diff(cuts, append=num_tokens)
    num_pieces = -(-lengths // context)
    piece = count_up(num_pieces)
    bounds = np.append(np.repeat(cuts, num_pieces) + piece * context, num_tokens)
    padding = -len(bounds) % max(1, cu_bucket)
    cu = np.pad(bounds, (0, padding), constant_values=num_tokens)
    return Segments(
        cu=torch.from_numpy(cu.astype(np.int32)),
        max_len=min(max(context, longest), num_tokens),
        positions=torch.from_numpy(count_up(np.diff(bounds))),
        context=context,
    )


def count_up(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0..c-1 for each count c, concatenated."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) - np.repeat(ends - counts, counts)


def pack_documents(
    docs: Sequence[npt.NDArray[Any]], bos_id: int, context: int
) -> tuple[Batch, npt.NDArray[np.int64]]:
    """Pack whole documents for scoring; also returns the index of each target's document (N,).

    A document is its tokens with BOS first. Its targets are the tokens after the BOS, and then a
    BOS that says that the document ends.
    """
    assert docs and all(len(doc) and doc[0] == bos_id for doc in docs)
    lengths = np.array([len(doc) for doc in docs])
    inputs = np.concatenate(docs).astype(np.int64)
    # The BOS of the next document follows each document; the last document gets one here.
    targets = np.append(inputs[1:], bos_id)
    starts = np.cumsum(lengths) - lengths
    batch = Batch(
        inputs=torch.from_numpy(inputs),
        targets=torch.from_numpy(targets),
        segments=segments_from_starts(starts, len(inputs), context),
    )
    return batch, np.repeat(np.arange(len(docs)), lengths)
