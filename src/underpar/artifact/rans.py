"""Entropy coder for quantised weights: interleaved rANS, integer arithmetic on numpy lanes.

The coder is rANS (Duda 2013, arXiv:1311.2540), interleaved over lanes (Giesen 2014,
arXiv:1402.3392). Symbol i belongs to lane i mod num_lanes.

Invariants of a lane, before and after every symbol:
* the state lies in [2^16, 2^32) and starts, for the encoder, at exactly 2^16;
* a symbol moves at most one 16-bit word between the state and the stream;
* 2^PROB_BITS divides 2^16, so decoding undoes encoding step by step and every stream that decodes
  without an error is the one stream that encoding its symbols gives.

Byte layout of a stream: num_lanes little-endian u32 states as the encoder left them, then
little-endian u16 words in the order the decoder needs them (symbols ascending).
Neither the lane count nor the frequencies are stored.
"""

import heapq

import numpy as np

from underpar.errors import ArtifactError

PROB_BITS = 14
_TOTAL = 1 << PROB_BITS
_WORD_BITS = 16
_INITIAL_STATE = 1 << 16
# A state of at least freq << this shift would leave 32 bits if the symbol were coded into it.
_FULL_SHIFT = 32 - PROB_BITS

# A lane costs about three bytes: 0.1 % of a stream at this length.
_SYMBOLS_PER_LANE = 8192
_MAX_LANES = 1024
# Small arrays, a few bytes of any artifact, would take as long as large ones at that rate.
_SMALL_SYMBOLS = 1 << 16
_SYMBOLS_PER_SMALL_LANE = 512


def choose_num_lanes(num_symbols: int) -> int:
    """The lane count both sides use for an array of this length: a power of two in 1..1024."""
    small = num_symbols < _SMALL_SYMBOLS
    symbols_per_lane = _SYMBOLS_PER_SMALL_LANE if small else _SYMBOLS_PER_LANE
    wanted = min(max(num_symbols // symbols_per_lane, 1), _MAX_LANES)
    return 1 << (wanted.bit_length() - 1)


def quantize_counts(counts: np.ndarray) -> np.ndarray:
    """Frequencies (uint32, sum 2^PROB_BITS, at least 1 where a count is positive) for counts.

    All-zero counts give everything to symbol 0.
    """
    counts = np.asarray(counts)
    if counts.ndim != 1 or counts.size == 0 or counts.dtype.kind not in "iu":
        raise ArtifactError(
            f"counts of shape {counts.shape} and type {counts.dtype}: expected a 1-D integer array"
        )
    num_used = int(np.count_nonzero(counts))
    if counts.min() < 0 or num_used > _TOTAL:
        raise ArtifactError(
            f"counts with minimum {counts.min()} and {num_used} used symbols: "
            f"expected none below 0 and at most {_TOTAL} used"
        )
    # Python integers: exact for any count, and the same on every machine.
    exact: list[int] = counts.tolist()
    if num_used == 0:
        exact[0] = num_used = 1
    return np.array(_share_total(exact, num_used), dtype=np.uint32)


def _share_total(counts: list[int], num_used: int) -> list[int]:
    """Splits 2^PROB_BITS by counts with the least code length, up to the logarithm's rounding."""
    num_symbols = sum(counts)
    # One unit per used symbol is held back, so the shares never exceed the total.
    freqs = [max(1, c * (_TOTAL - num_used) // num_symbols) if c else 0 for c in counts]

    def gain(symbol: int) -> int:
        # One more unit saves count * ln((f + 1) / f) nats, and ln((f + 1) / f) ~ 2 / (2f + 1).
        return (counts[symbol] << 32) // (2 * freqs[symbol] + 1)

    heap = [(-gain(symbol), symbol) for symbol, count in enumerate(counts) if count]
    heapq.heapify(heap)
    for _ in range(_TOTAL - sum(freqs)):
        symbol = heap[0][1]
        freqs[symbol] += 1
        heapq.heapreplace(heap, (-gain(symbol), symbol))
    assert sum(freqs) == _TOTAL
    return freqs


def encode(symbols: np.ndarray, freqs: np.ndarray, *, num_lanes: int | None = None) -> bytes:
    """The stream of a 1-D array of symbols 0..len(freqs)-1; layout in the module docstring."""
    table = _check_freqs(freqs)
    symbols = np.asarray(symbols)
    _count_symbols(symbols, table)
    starts = np.cumsum(table, dtype=np.uint32) - table
    lanes = choose_num_lanes(symbols.size) if num_lanes is None else num_lanes
    states = np.full(lanes, _INITIAL_STATE, dtype=np.uint32)
    rows: list[np.ndarray] = []
    for begin in reversed(range(0, symbols.size, lanes)):
        row = symbols[begin : begin + lanes]
        state = states[: row.size]
        freq = table[row]
        full = np.flatnonzero(state >> _FULL_SHIFT >= freq)
        rows.append(state[full].astype("<u2"))
        state[full] >>= _WORD_BITS
        quotient, remainder = np.divmod(state, freq)
        state[:] = (quotient << PROB_BITS) + remainder + starts[row]
    words = b"".join(row.tobytes() for row in reversed(rows))
    return states.astype("<u4").tobytes() + words


def decode(
    data: bytes, freqs: np.ndarray, num_symbols: int, *, num_lanes: int | None = None
) -> np.ndarray:
    """The int32 symbols of a stream; anything but an exact stream of that length is refused."""
    table = _check_freqs(freqs)
    if num_symbols < 0:
        raise ArtifactError(f"weight stream of {num_symbols} symbols: expected 0 or more")
    lanes = choose_num_lanes(num_symbols) if num_lanes is None else num_lanes
    states, words = _split_stream(data, lanes)
    symbol_of, freq_of, rank_of = _build_slots(table)
    symbols = np.empty(num_symbols, dtype=np.int32)
    position = 0
    for begin in range(0, num_symbols, lanes):
        row = symbols[begin : begin + lanes]
        state = states[: row.size]
        slot = state & (_TOTAL - 1)
        row[:] = symbol_of[slot]
        state[:] = freq_of[slot] * (state >> PROB_BITS) + rank_of[slot]
        low = np.flatnonzero(state < _INITIAL_STATE)
        end = position + low.size
        if end > words.size:
            raise ArtifactError(f"weight stream of {len(data)} bytes ends before its last symbol")
        state[low] = (state[low] << _WORD_BITS) | words[position:end]
        position = end
    if position != words.size:
        raise ArtifactError(
            f"weight stream has {2 * (words.size - position)} bytes after its last symbol"
        )
    if np.any(states != _INITIAL_STATE):
        raise ArtifactError(
            "weight stream is damaged: a lane does not end in the state it began with"
        )
    return symbols


def code_length_bits(symbols: np.ndarray, freqs: np.ndarray) -> float:
    """Ideal length in bits of the symbols under the frequencies, without states."""
    table = _check_freqs(freqs)
    counts = _count_symbols(np.asarray(symbols), table)
    used = counts > 0
    return float(np.sum(counts[used] * (PROB_BITS - np.log2(table[used]))))


def _build_slots(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Symbol, its frequency and the rank within its interval, for every slot (2^PROB_BITS,)."""
    symbol_of = np.repeat(np.arange(table.size, dtype=np.int32), table)
    starts = np.cumsum(table, dtype=np.uint32) - table
    rank_of = np.arange(_TOTAL, dtype=np.uint32) - starts[symbol_of]
    return symbol_of, table[symbol_of], rank_of


def _split_stream(data: bytes, num_lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """States (num_lanes,) and words of a stream, checked for size and range."""
    num_state_bytes = 4 * num_lanes
    if len(data) < num_state_bytes or len(data) % 2:
        raise ArtifactError(
            f"weight stream of {len(data)} bytes: expected an even number, "
            f"at least {num_state_bytes}"
        )
    states = np.frombuffer(data, dtype="<u4", count=num_lanes).astype(np.uint32)
    if states.min() < _INITIAL_STATE:
        raise ArtifactError(
            f"weight stream is damaged: a lane state is {states.min()}, "
            f"expected {_INITIAL_STATE} or more"
        )
    return states, np.frombuffer(data, dtype="<u2", offset=num_state_bytes)


def _check_freqs(freqs: np.ndarray) -> np.ndarray:
    """The frequencies as uint32, refused unless they are a table of this coder."""
    freqs = np.asarray(freqs)
    if freqs.ndim != 1 or freqs.size == 0 or freqs.dtype.kind not in "iu":
        raise ArtifactError(
            f"frequencies of shape {freqs.shape} and type {freqs.dtype}: "
            "expected a 1-D integer array"
        )
    # The range first: it keeps the sum from wrapping around.
    if freqs.min() < 0 or freqs.max() > _TOTAL or int(freqs.sum(dtype=np.int64)) != _TOTAL:
        raise ArtifactError(f"frequencies do not lie in 0..{_TOTAL} with the sum {_TOTAL}")
    return freqs.astype(np.uint32)


def _count_symbols(symbols: np.ndarray, table: np.ndarray) -> np.ndarray:
    """How often each symbol occurs; refuses symbols the table cannot code."""
    if symbols.ndim != 1 or symbols.dtype.kind not in "iu":
        raise ArtifactError(
            f"symbols of shape {symbols.shape} and type {symbols.dtype}: "
            "expected a 1-D integer array"
        )
    if symbols.size and (symbols.min() < 0 or symbols.max() >= table.size):
        raise ArtifactError(
            f"symbols {symbols.min()}..{symbols.max()}: expected 0..{table.size - 1}"
        )
    counts = np.bincount(symbols.astype(np.int64, copy=False), minlength=table.size)
    missing = np.flatnonzero((counts > 0) & (table == 0))
    if missing.size:
        raise ArtifactError(f"symbol {missing[0]} occurs but has frequency 0 in the table")
    return counts
