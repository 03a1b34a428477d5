"""The payload of a file in exact mode: where the lanes were cut, then their stream.

Documents stand one after the other, each with a BOS as its end; a text without separators is one
document without an end. The sequence is cut into lanes at ends of documents, and inside of
documents after a whole number of contexts, where the network begins anew anyway. A lane begins with
a BOS that is not coded. Layout, little-endian: u8 width of a length, 2 or 4 bytes; the length of
each lane; then exact_streams.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from underpar.codec.exact_streams import decode_streams, encode_streams
from underpar.codec.lanes import OnShare
from underpar.errors import CodecError
from underpar.infer.exact_predictor import ExactPredictor
from underpar.infer.experts import Ints
from underpar.seams import BOS_ID

# A lane has about this many tokens at least, because it takes some three bytes, and inside of a
# document its first token has no context.
CUT_TOKENS = 1024
MAX_LANES = 256
# The most memory of keys and values, and the number of lanes that are used in any case.
MOST_LANE_BYTES, FEW_LANES = 8 << 30, 16


def encode_exact(
    predictor: ExactPredictor, sequences: Sequence[Ints], on_share: OnShare | None = None
) -> tuple[bytes, int]:
    """Sequences of targets, which follow each other, as a payload; and its number of lanes."""
    streams = cut(predictor, sequences)
    lengths = np.array([len(stream) for stream in streams])
    meter = _Meter(on_share, int(lengths.sum()))
    payload, _ = encode_streams(predictor, streams, meter)
    width = 2 if lengths.max() < 1 << 16 else 4
    return bytes([width]) + lengths.astype(f"<u{width}").tobytes() + payload, len(streams)


def decode_exact(
    predictor: ExactPredictor,
    payload: bytes,
    num_lanes: int,
    most_tokens: int,
    on_share: OnShare | None = None,
) -> Ints:
    """The sequences, joined; a payload of more than `most_tokens` targets is refused."""
    width = payload[0] if payload else 0
    size = 1 + width * num_lanes
    if width not in (2, 4) or len(payload) < size or not 1 <= num_lanes <= MAX_LANES:
        raise CodecError("compressed stream is cut short or damaged")
    lengths = np.frombuffer(payload, f"<u{width}", num_lanes, offset=1).astype(np.int64)
    total, longest = int(lengths.sum()), int(lengths.max())
    if total > most_tokens:
        raise CodecError("compressed stream holds more text than its header says: damaged")
    # So that memory is in proportion to the text, as it was for the encoder.
    fits = num_lanes <= _most_lanes(predictor, longest)
    if lengths.min() == 0 or longest > total // num_lanes + _part_tokens(predictor) or not fits:
        raise CodecError("compressed stream has lanes that no encoder cuts: damaged")
    streams = decode_streams(predictor, payload[size:], lengths.tolist(), _Meter(on_share, total))
    return np.concatenate(streams)


def with_ends(documents: Sequence[Ints]) -> list[Ints]:
    """Documents with a BOS as the end of each."""
    return [np.append(document, BOS_ID) for document in documents]


def without_ends(targets: Ints) -> list[Ints]:
    """The documents that `with_ends` was given, from all of its sequences joined."""
    ends = np.flatnonzero(targets == BOS_ID)
    if not len(targets) or targets[-1] != BOS_ID:
        raise CodecError("compressed stream is damaged: its last document has no end")
    return [part[:-1] for part in np.split(targets, ends[:-1] + 1)]


def cut(predictor: ExactPredictor, sequences: Sequence[Ints]) -> list[Ints]:
    """All sequences, joined and cut into lanes of about equal length, none empty."""
    size = _part_tokens(predictor)
    parts = [s[i : i + size] for s in sequences for i in range(0, len(s), size)]
    lengths = np.array([len(part) for part in parts])
    few = max(1, int(lengths.sum()) // CUT_TOKENS)
    num_lanes = min(_most_lanes(predictor, predictor.context), len(parts), few)
    # A part belongs to the lane in whose share of all tokens it begins.
    lanes = (np.cumsum(lengths) - lengths) * num_lanes // int(lengths.sum())
    firsts = np.flatnonzero(np.diff(lanes, prepend=-1))
    ends = np.append(firsts[1:], len(parts))
    return [np.concatenate(parts[a:b]) for a, b in zip(firsts, ends, strict=True)]


def _part_tokens(predictor: ExactPredictor) -> int:
    """The tokens of a part of a document: a whole number of contexts."""
    return -(-CUT_TOKENS // predictor.context) * predictor.context


def _most_lanes(predictor: ExactPredictor, length: int) -> int:
    return min(MAX_LANES, max(FEW_LANES, MOST_LANE_BYTES // predictor.lane_bytes(length)))


class _Meter:
    """Turns numbers of tokens into shares of the whole."""

    def __init__(self, on_share: OnShare | None, total: int) -> None:
        self._on_share, self._total, self._done = on_share, total, 0

    def __call__(self, num_tokens: int) -> None:
        self._done += num_tokens
        if self._on_share:
            self._on_share(self._done / self._total)
