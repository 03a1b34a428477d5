"""Streams of tokens <-> bytes in exact mode: one forward pass encodes, lanes decode side by side.

Every stream is a lane. The lanes are coded by rANS (Duda 2013, arXiv:1311.2540) with frequencies
out of 2^FREQ_BITS. Coders are interleaved in one sequence of words (Giesen 2014, arXiv:1402.3392);
a coder serves up to LANES_PER_CODER lanes in turn, because each costs some six bytes.

Invariants of a coder, before and after every token:
* its state lies in [2^31, 2^63); the encoder starts, and the decoder ends, with exactly 2^31. So
  a state has three bits more than a frequency, and rounding it costs next to nothing;
* a token moves at most one word of 32 bits between the state and the sequence.

Layout, little-endian: u64 states of the coders, then u32 words in the order in which the decoder
needs them: step by step, within a step round by round, within a round by coder. In round r coder c
serves lane r * coders + c. Lanes are in order of length, the longest first, so that those which
have ended come last. Decoding is a fixed number of operations per step on whatever device the
network is on: it never waits for the host, and on CUDA a step is one captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from underpar.codec.lanes import NUM_THREADS
from underpar.compile.cuda_graphs import Recording
from underpar.core.runtime import threads
from underpar.errors import CodecError
from underpar.infer.exact_predictor import FREQ_BITS, TOTAL, ExactPredictor, interval_of
from underpar.infer.experts import Ints
from underpar.model.kv_cache import SPAN
from underpar.seams import BOS_ID

LANES_PER_CODER = 8
WORD_BITS = 32
SPARE_BITS = 3
INITIAL_STATE = 1 << (FREQ_BITS + SPARE_BITS)
_LARGEST_STATE = INITIAL_STATE << WORD_BITS
_WORD_MASK = (1 << WORD_BITS) - 1


def encode_streams(
    predictor: ExactPredictor,
    streams: Sequence[Ints],
    on_tokens: Callable[[int], None] | None = None,
) -> tuple[bytes, float]:
    """Streams of targets, none empty, as bytes; and their price in bits."""
    order = _longest_first([len(stream) for stream in streams])
    lengths = np.array([len(streams[i]) for i in order])
    begins = np.cumsum(lengths) - lengths
    targets = np.concatenate([streams[i] for i in order]).astype(np.int64)
    starts, freqs = predictor.stream_intervals(targets, begins, on_tokens)
    num_lanes = len(order)
    num_coders = -(-num_lanes // LANES_PER_CODER)
    states = np.full(num_coders, INITIAL_STATE, dtype=np.int64)
    words: list[np.ndarray] = []
    for step in range(int(lengths[0]) - 1, -1, -1):
        active = int(np.searchsorted(-lengths, -step, side="left"))
        rows = begins[:active] + step
        start, freq = starts[rows], freqs[rows]
        for first in range((active - 1) // num_coders * num_coders, -1, -num_coders):
            lanes = slice(first, min(first + num_coders, active))
            state, own = states[: lanes.stop - first], freq[lanes]
            is_full = state >= own << (WORD_BITS + SPARE_BITS)
            words.append(state[is_full] & _WORD_MASK)
            state = np.where(is_full, state >> WORD_BITS, state)
            states[: len(state)] = (state // own << FREQ_BITS) + start[lanes] + state % own
    payload = states.astype("<u8").tobytes() + np.concatenate(words[::-1]).astype("<u4").tobytes()
    return payload, float(len(freqs) * FREQ_BITS - np.log2(freqs).sum())


def decode_streams(
    predictor: ExactPredictor,
    payload: bytes,
    lengths: Sequence[int],
    on_tokens: Callable[[int], None] | None = None,
) -> list[Ints]:
    """The streams of these lengths, in the order in which they were given to the encoder."""
    order = _longest_first(lengths)
    sorted_lengths = [lengths[i] for i in order]
    decoder = _Decoder(predictor, payload, sorted_lengths)
    # Steps are small, and threads wait for each other.
    with torch.no_grad(), threads(NUM_THREADS):
        tokens = decoder.run(on_tokens or (lambda _: None))
    streams = dict(
        zip(order, (tokens[:n, lane] for lane, n in enumerate(sorted_lengths)), strict=True)
    )
    return [streams[i] for i in range(len(lengths))]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    assert lengths and min(lengths) > 0
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


class _Decoder:
    """Lanes and coders on the network's device."""

    def __init__(self, predictor: ExactPredictor, payload: bytes, lengths: Sequence[int]) -> None:
        num_lanes, device = len(lengths), predictor.device
        num_coders = -(-num_lanes // LANES_PER_CODER)
        size = 8 * num_coders
        if len(payload) < size or (len(payload) - size) % 4:
            raise CodecError("compressed stream is cut short or damaged")
        states = np.frombuffer(payload, dtype="<u8", count=num_coders)
        if states.min() < INITIAL_STATE or states.max() >= _LARGEST_STATE:
            raise CodecError("compressed stream is damaged: a coder's state is out of range")
        words = np.frombuffer(payload, dtype="<u4", offset=size).astype(np.int64)
        self._predictor = predictor
        self._states = torch.from_numpy(states.astype(np.int64)).to(device)
        # One more, for a stream that ends too early; `finish` finds that out.
        self._words = torch.from_numpy(np.append(words, 0)).to(device)
        self._next_word = torch.zeros((), dtype=torch.long, device=device)
        self._all_lengths = np.array(lengths)
        self._lengths = torch.tensor(lengths, device=device)
        self._step_number = torch.zeros(1, dtype=torch.long, device=device)
        self._out = torch.zeros(lengths[0], num_lanes, dtype=torch.int32, device=device)
        self._tokens = torch.full((num_lanes,), BOS_ID, device=device)
        self._lanes = predictor.lanes(num_lanes)
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def run(self, on_tokens: Callable[[int], None]) -> np.ndarray:
        """All tokens (steps, lanes)."""
        num_steps, step = len(self._out), 0
        while step < num_steps:
            active = int(np.searchsorted(-self._all_lengths, -step, side="left"))
            if active <= len(self._tokens) // 2:
                self._keep(active)
            until = min(step + SPAN, num_steps)
            self._lanes.place(int(self._lanes.positions.max()) + SPAN - 1)
            # The first step prepares what a captured one finds ready.
            self._step()
            if until - step > 1:
                recording = Recording(self._step, self._pool)
                for _ in range(until - step - 1):
                    recording.replay()
            on_tokens(int(np.clip(self._all_lengths - step, 0, until - step).sum()))
            step = until
        self._finish()
        return self._out.cpu().numpy().astype(np.int64)

    def _keep(self, num: int) -> None:
        """Drop all lanes but the first ones."""
        self._lanes.keep(num)
        self._lengths, self._tokens = self._lengths[:num].clone(), self._tokens[:num].clone()

    def _step(self) -> None:
        """One token of every lane."""
        ends = self._predictor.step(self._tokens, self._lanes)
        is_active = self._lengths > self._step_number
        num_coders, tokens = len(self._states), []
        for first in range(0, len(ends), num_coders):
            rows = slice(first, first + num_coders)
            tokens.append(self._decode(ends[rows], is_active[rows]))
        self._tokens.copy_(torch.cat(tokens))
        row = self._tokens.int()[None]
        self._out[:, : len(ends)].index_copy_(0, self._step_number, row)
        self._lanes.advance(self._tokens == BOS_ID)
        self._step_number.add_(1)

    def _decode(self, ends: Tensor, is_active: Tensor) -> Tensor:
        """The next token of some lanes, each from a coder of its own; idle lanes give BOS."""
        coders = self._states[: len(ends)]
        target = coders & (TOTAL - 1)
        token = torch.searchsorted(ends, target.double()[:, None], right=True)
        start, freq = (column[:, 0] for column in interval_of(ends, token))
        state = freq * (coders >> FREQ_BITS) + (target - start)
        is_low = (state < INITIAL_STATE) & is_active
        index = (self._next_word + is_low.cumsum(0) - 1).clamp_(0, len(self._words) - 1)
        state = torch.where(is_low, state << WORD_BITS | self._words.take(index), state)
        coders.copy_(torch.where(is_active, state, coders))
        self._next_word.add_(is_low.sum())
        return torch.where(is_active, token[:, 0], BOS_ID)

    def _finish(self) -> None:
        num_words = len(self._words) - 1
        if int(self._next_word) != num_words:
            raise CodecError(
                f"compressed stream has {num_words} words, {int(self._next_word)} were needed: "
                "damaged"
            )
        if bool((self._states != INITIAL_STATE).any()):
            raise CodecError("compressed stream is damaged: a coder does not end where it began")
