"""Integer range coder for text symbols, and the integer frequencies it codes with.

The coder is Martin's range coder (1979) with the carry added to the bytes already written, as in
Subbotin's and LZMA's coders. Probabilities are frequencies out of 2^FREQ_BITS.

Invariants, asserted at every step:
* 0 <= low < 2^64 and 2^56 <= span < 2^64 between symbols, so one unit of frequency is at least
  2^24 wide and rounding costs less than 2^-23 bits a symbol;
* 0 <= start, 0 < freq, start + freq <= 2^FREQ_BITS for every symbol;
* the decoder's offset, code minus low, is in [0, span).

The encoder ends with at most one byte after those it has shifted out: the shortest one for which
the stream, continued by zero bytes, lies in the last interval. The decoder demands exactly that
ending, so a stream that passes `Decoder.finish` is the one stream that encoding its symbols gives.
"""

import numpy as np

from underpar.errors import CodecError

FREQ_BITS = 32
TOTAL = 1 << FREQ_BITS

_STATE_BITS = 64
_TOP = 1 << _STATE_BITS
_MASK = _TOP - 1
_BOTTOM = 1 << (_STATE_BITS - 8)
_WINDOW_BYTES = _STATE_BITS // 8
# How far the sum of a row of probabilities may be from one.
_SUM_TOLERANCE = 1e-3


class Encoder:
    """Turns a sequence of frequency intervals into bytes."""

    def __init__(self) -> None:
        self._low = 0
        self._span = _MASK
        self._out = bytearray()

    def encode(self, start: int, freq: int) -> None:
        """Codes the symbol that owns [start, start + freq) of [0, 2^FREQ_BITS)."""
        assert 0 <= start < start + freq <= TOTAL
        unit = self._span >> FREQ_BITS
        # int(): a numpy integer would wrap around at 64 bits.
        low = self._low + unit * int(start)
        span = unit * int(freq)
        if low > _MASK:
            self._carry()
            low &= _MASK
        num_bytes = (_STATE_BITS - span.bit_length()) >> 3
        if num_bytes:
            shift = 8 * num_bytes
            self._out += (low >> (_STATE_BITS - shift)).to_bytes(num_bytes, "big")
            low = (low << shift) & _MASK
            span <<= shift
        assert _BOTTOM <= span < _TOP
        self._low = low
        self._span = span

    def finish(self) -> bytes:
        """The whole stream; the encoder takes no symbol after this."""
        assert self._span
        if self._low and self._low + self._span > _TOP:
            self._carry()
        self._out += _last_bytes(self._low, self._span)
        self._span = 0
        return bytes(self._out)

    def _carry(self) -> None:
        out = self._out
        last = len(out) - 1
        while out[last] == 0xFF:
            out[last] = 0
            last -= 1
        # Every interval lies below the end of the first one, so the carry stops inside the stream.
        assert last >= 0
        out[last] += 1


class Decoder:
    """Recovers the intervals of a stream: `target`, look the symbol up, `advance`, repeat."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._span = _MASK
        self._offset = int.from_bytes(data[:_WINDOW_BYTES].ljust(_WINDOW_BYTES, b"\0"), "big")
        self._position = _WINDOW_BYTES

    def target(self) -> int:
        """A value in [0, 2^FREQ_BITS) that lies in the interval of the next symbol."""
        target = self._offset // (self._span >> FREQ_BITS)
        if target >= TOTAL:
            raise CodecError(
                f"compressed stream is damaged near byte {self._position}: no symbol fits"
            )
        return target

    def advance(self, start: int, freq: int) -> None:
        """Steps past the symbol that owns [start, start + freq) and holds the target."""
        assert 0 <= start < start + freq <= TOTAL
        unit = self._span >> FREQ_BITS
        offset = self._offset - unit * int(start)
        span = unit * int(freq)
        assert 0 <= offset < span
        num_bytes = (_STATE_BITS - span.bit_length()) >> 3
        if num_bytes:
            shift = 8 * num_bytes
            offset = (offset << shift) | self._read(num_bytes)
            span <<= shift
        assert _BOTTOM <= span < _TOP
        self._offset = offset
        self._span = span

    @property
    def share(self) -> float:
        """The share of the stream that was read."""
        return min(1.0, self._position / max(1, len(self._data)))

    def finish(self) -> None:
        """Checks that the stream ends exactly where its last symbol does."""
        begin = self._position - _WINDOW_BYTES
        tail = self._data[begin:]
        window = int.from_bytes(tail[:_WINDOW_BYTES].ljust(_WINDOW_BYTES, b"\0"), "big")
        expected = _last_bytes((window - self._offset) & _MASK, self._span)
        if len(tail) > len(expected):
            raise CodecError(
                f"compressed stream has {len(tail) - len(expected)} bytes after its last symbol"
            )
        if tail != expected:
            raise CodecError(f"compressed stream is damaged at byte {begin}: wrong last byte")

    def _read(self, num_bytes: int) -> int:
        chunk = self._data[self._position : self._position + num_bytes]
        self._position += num_bytes
        # An exact stream is read at most one window of zero bytes past its end.
        if self._position > len(self._data) + _WINDOW_BYTES:
            raise CodecError(
                f"compressed stream ends early: {len(self._data)} bytes are not enough "
                "for the symbols expected"
            )
        return int.from_bytes(chunk.ljust(num_bytes, b"\0"), "big")


def _last_bytes(low: int, span: int) -> bytes:
    """What must follow the bytes shifted out to land in [low, low + span): nothing or one byte."""
    # Zero is in the interval, directly or after a carry into the bytes before.
    if low == 0 or low + span > _TOP:
        return b""
    return bytes([-(-low // _BOTTOM)])


def quantize(probs: np.ndarray) -> np.ndarray:
    """Frequencies (L, V) int64, each at least 1 and each row summing to 2^FREQ_BITS.

    f = 1 + floor(p * (2^FREQ_BITS - V)); the remainder goes to the first largest probability.
    """
    if probs.ndim != 2 or probs.dtype != np.float64 or not 0 < probs.shape[1] < TOTAL:
        raise CodecError(
            f"probabilities of shape {probs.shape} and type {probs.dtype}: expected (L, V) float64"
        )
    sums = probs.sum(axis=1)
    # Written so that NaN fails it.
    good = (np.abs(sums - 1.0) <= _SUM_TOLERANCE) & (probs.min(axis=1) >= 0.0)
    if not good.all():
        row = int(np.argmin(good))
        raise CodecError(
            f"probabilities of row {row} sum to {sums[row]:.6g} with minimum "
            f"{probs[row].min():.6g}: expected a sum of 1 and none below 0"
        )
    freqs = (probs * float(TOTAL - probs.shape[1])).astype(np.int64) + 1  # (L, V)
    rows = np.arange(probs.shape[0])
    best = np.argmax(probs, axis=1)
    freqs[rows, best] += TOTAL - freqs.sum(axis=1)
    short = np.flatnonzero(freqs[rows, best] < 1)
    if short.size:
        raise CodecError(
            f"probabilities of row {short[0]} sum to {sums[short[0]]:.6g}, more than the largest "
            "can give back: normalise them in float64"
        )
    return freqs


def interval(freqs: np.ndarray, symbol: int) -> tuple[int, int]:
    """(start, freq) of a symbol under frequencies (V,), for `Encoder.encode`."""
    return int(freqs[:symbol].sum()), int(freqs[symbol])


def locate(freqs: np.ndarray, target: int) -> tuple[int, int, int]:
    """(symbol, start, freq) of the interval that holds the target, for frequencies (V,)."""
    ends = np.cumsum(freqs)  # (V,)
    symbol = int(np.searchsorted(ends, target, side="right"))
    freq = int(freqs[symbol])
    return symbol, int(ends[symbol]) - freq, freq
