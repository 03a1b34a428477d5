"""The payload of a file in exact mode: where the lanes were cut, then their stream.

Documents stand one after the other, each with a BOS as its end; a text without separators is one
document without an end. The sequence is cut into lanes at ends of documents, and inside of
documents after a whole number of contexts, where the network begins anew anyway. A lane begins with
a BOS that is not coded. Layout, little-endian: u8 width of a length, 2 or 4 bytes; the length of
each lane; then exact_streams.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from underpar.codec.exact_streams import decode_streams, encode_streams
from underpar.codec.lanes import OnShare
from underpar.core.runtime import free_memory_bytes
from underpar.core.words import count_text
from underpar.errors import CodecError
from underpar.infer.exact_predictor import ExactPredictor
from underpar.infer.experts import Ints
from underpar.seams import BOS_ID

# A lane has about this many tokens at least, because it takes some three bytes, and inside of a
# document its first token has no context.
CUT_TOKENS = 1024
MAX_LANES = 512
# The share of free memory that an encoder takes for keys and values, and a decoder.
ENCODER_SHARE, DECODER_SHARE = 0.6, 0.9
# What a decoder may need if nobody says otherwise: a file is to decode on a laptop.
DECODER_BYTES = 8e9


def encode_exact(
    predictor: ExactPredictor,
    sequences: Sequence[Ints],
    on_share: OnShare | None = None,
    decoder_bytes: float = DECODER_BYTES,
) -> tuple[bytes, int]:
    """Sequences of targets, which follow each other, as a payload; and its number of lanes."""
    streams = cut(predictor, sequences, decoder_bytes)
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
    lengths = lengths_of(payload, num_lanes)
    total, longest = int(lengths.sum()), int(lengths.max())
    if total > most_tokens:
        raise CodecError("compressed stream holds more text than its header says: damaged")
    if lengths.min() == 0 or longest > total // num_lanes + _part_tokens(predictor):
        raise CodecError("compressed stream has lanes that no encoder cuts: damaged")
    needed, free = lanes_bytes(predictor, lengths), free_memory_bytes(predictor.device)
    if needed > DECODER_SHARE * free:
        raise CodecError(
            f"the {count_text(num_lanes, 'lane')} of this file may need {needed / 1e9:,.1f} GB of "
            f"memory, {free / 1e9:,.1f} GB are free: decompress where there is more, or compress "
            "the original with this much"
        )
    rest = payload[1 + payload[0] * num_lanes :]
    streams = decode_streams(predictor, rest, lengths.tolist(), _Meter(on_share, total))
    return np.concatenate(streams)


def lengths_of(payload: bytes, num_lanes: int) -> Ints:
    """The lengths of a payload's lanes."""
    width = payload[0] if payload else 0
    size = 1 + width * num_lanes
    if width not in (2, 4) or len(payload) < size or not 1 <= num_lanes <= MAX_LANES:
        raise CodecError("compressed stream is cut short or damaged")
    return np.frombuffer(payload, f"<u{width}", num_lanes, offset=1).astype(np.int64)


def with_ends(documents: Sequence[Ints]) -> list[Ints]:
    """Documents with a BOS as the end of each."""
    return [np.append(document, BOS_ID) for document in documents]


def without_ends(targets: Ints) -> list[Ints]:
    """The documents that `with_ends` was given, from all of its sequences joined."""
    ends = np.flatnonzero(targets == BOS_ID)
    if not len(targets) or targets[-1] != BOS_ID:
        raise CodecError("compressed stream is damaged: its last document has no end")
    return [part[:-1] for part in np.split(targets, ends[:-1] + 1)]


def cut(
    predictor: ExactPredictor, sequences: Sequence[Ints], decoder_bytes: float = DECODER_BYTES
) -> list[Ints]:
    """All sequences, joined and cut into lanes whose longest is as short as can be, none empty.

    The memory of a decoder limits the number of lanes, and the free memory here.
    """
    size = _part_tokens(predictor)
    parts = [s[i : i + size] for s in sequences for i in range(0, len(s), size)]
    lengths = [len(part) for part in parts]
    ends = np.cumsum(lengths)
    room = min(decoder_bytes, ENCODER_SHARE * free_memory_bytes(predictor.device))
    fitting = max(1.0, room // predictor.lane_bytes(predictor.context))
    num_lanes = int(min(MAX_LANES, fitting, max(1, ends[-1] // CUT_TOKENS)))
    # A share of the whole may be too short for a lane of whole parts; with a part more it is not.
    share = -(-int(ends[-1]) // num_lanes)
    too_short, enough = max(share, *lengths) - 1, share + max(lengths)
    while enough - too_short > 1:
        middle = (too_short + enough) // 2
        if len(_filled(ends, middle)) <= num_lanes:
            enough = middle
        else:
            too_short = middle
    bounds = _filled(ends, enough)
    return [np.concatenate(parts[a:b]) for a, b in pairwise([0, *bounds])]


def _filled(ends: Ints, most: int) -> list[int]:
    """Where lanes of at most so many tokens end, as numbers of parts, which end at `ends`."""
    bounds = [0]
    while bounds[-1] < len(ends):
        before = ends[bounds[-1] - 1] if bounds[-1] else 0
        bounds.append(int(np.searchsorted(ends, before + most, side="right")))
    return bounds[1:]


def _part_tokens(predictor: ExactPredictor) -> int:
    """The tokens of a part of a document: a whole number of contexts."""
    return -(-CUT_TOKENS // predictor.context) * predictor.context


def lanes_bytes(predictor: ExactPredictor, lengths: Ints) -> int:
    """The most memory that keys and values of lanes of these lengths take while they decode."""
    return len(lengths) * predictor.lane_bytes(int(lengths.max()))


class _Meter:
    """Turns numbers of tokens into shares of the whole."""

    def __init__(self, on_share: OnShare | None, total: int) -> None:
        self._on_share, self._total, self._done = on_share, total, 0

    def __call__(self, num_tokens: int) -> None:
        self._done += num_tokens
        if self._on_share:
            self._on_share(self._done / self._total)
