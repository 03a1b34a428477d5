"""The text coder: exact, within a byte or two of the ideal length, and safe on damaged streams."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from underpar.codec import range_coder
from underpar.codec.range_coder import TOTAL, Decoder, Encoder
from underpar.errors import CodecError

Interval = tuple[int, int]


def intervals_of(freqs: np.ndarray, symbols: np.ndarray) -> list[Interval]:
    """The interval of each symbol (L,) under its row of frequencies (L, V)."""
    return [range_coder.interval(row, int(s)) for row, s in zip(freqs, symbols, strict=True)]


def encode_all(intervals: list[Interval]) -> bytes:
    encoder = Encoder()
    for start, freq in intervals:
        encoder.encode(start, freq)
    return encoder.finish()


def decode_all(data: bytes, tables: list[np.ndarray]) -> list[int]:
    decoder = Decoder(data)
    symbols = []
    for freqs in tables:
        symbol, start, freq = range_coder.locate(freqs, decoder.target())
        decoder.advance(start, freq)
        symbols.append(symbol)
    decoder.finish()
    return symbols


def draw_probs(seed: int, length: int, vocab: int, spread: float) -> np.ndarray:
    logits = spread * np.random.default_rng(seed).standard_normal((length, vocab))
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    return probs / probs.sum(axis=1, keepdims=True)


def ideal_bits(intervals: list[Interval]) -> float:
    return sum(32 - float(np.log2(freq)) for _, freq in intervals)


# Intervals at both ends of the scale and next to them, one unit wide and almost all of it.
@st.composite
def any_interval(draw: st.DrawFn) -> Interval:
    freq = draw(st.one_of(st.sampled_from([1, 2, TOTAL - 1, TOTAL]), st.integers(1, TOTAL)))
    start = draw(st.one_of(st.sampled_from([0, TOTAL - freq]), st.integers(0, TOTAL - freq)))
    return start, freq


@settings(deadline=None, max_examples=300)
@given(st.lists(any_interval(), max_size=60))
def test_every_target_falls_in_its_interval(intervals: list[Interval]) -> None:
    data = encode_all(intervals)
    decoder = Decoder(data)
    for start, freq in intervals:
        assert start <= decoder.target() < start + freq
        decoder.advance(start, freq)
    decoder.finish()
    assert 8 * len(data) <= 1.0001 * ideal_bits(intervals) + 16
    for extra in (b"\0", b"\x01", bytes(9), b"\xff" * 9):
        with pytest.raises(CodecError):
            longer = Decoder(data + extra)
            for start, freq in intervals:
                if not start <= longer.target() < start + freq:
                    raise CodecError("other symbols")
                longer.advance(start, freq)
            longer.finish()


@settings(deadline=None, max_examples=80)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(0, 60),
    vocab=st.sampled_from([1, 2, 3, 256, 1000]),
    spread=st.sampled_from([0.0, 1.0, 5.0, 60.0]),
)
def test_round_trip_over_distributions(seed: int, length: int, vocab: int, spread: float) -> None:
    freqs = range_coder.quantize(draw_probs(seed, length, vocab, spread))
    symbols = np.random.default_rng(seed).integers(vocab, size=length)
    data = encode_all(intervals_of(freqs, symbols))
    assert decode_all(data, list(freqs)) == symbols.tolist()


@pytest.mark.parametrize("above", [False, True])
def test_carry_runs_through_the_whole_stream(above: bool) -> None:
    # Intervals around the code 0x80 00 00 ... leave 0x7f ff ff ... in the encoder until the last
    # symbol says on which side of that code the stream ends.
    guide = Decoder(b"\x80" + bytes(3000))
    intervals: list[Interval] = []
    for _ in range(700):
        target = guide.target()
        intervals.append((target - 1, 3))
        guide.advance(target - 1, 3)
    target = guide.target()
    intervals.append((target + 1, 1) if above else (target - 1, 1))
    data = encode_all(intervals)
    assert data[:2500] == (b"\x80" + bytes(2499) if above else b"\x7f" + b"\xff" * 2499)
    decoder = Decoder(data)
    for start, freq in intervals:
        assert start <= decoder.target() < start + freq
        decoder.advance(start, freq)
    decoder.finish()


def test_length_of_twenty_thousand_symbols() -> None:
    rng = np.random.default_rng(7)
    intervals: list[Interval] = []
    num_expected_bits = 0.0
    for seed in range(20):
        probs = draw_probs(seed, 1000, 64, 1.0 + seed / 4)
        uniforms = rng.random((1000, 1))
        symbols = np.minimum((probs.cumsum(axis=1) < uniforms).sum(axis=1), 63)
        intervals += intervals_of(range_coder.quantize(probs), symbols)
        num_expected_bits -= float(np.log2(probs[np.arange(1000), symbols]).sum())
    num_bits = 8 * len(encode_all(intervals))
    assert abs(num_bits - ideal_bits(intervals)) <= 1e-4 * ideal_bits(intervals) + 16
    # The audit's bound: 0.001 bits a target and 64 bits.
    assert abs(num_bits - num_expected_bits) <= 0.001 * 20_000 + 64


def test_certain_symbols_cost_nothing() -> None:
    assert encode_all([]) == b""
    assert encode_all([(0, TOTAL)] * 10_000) == b""
    assert len(encode_all([(1, TOTAL - 1)] * 10_000)) <= 1


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 80),
    cut=st.integers(0, 2**32 - 1),
    flip=st.booleans(),
)
def test_damaged_stream_is_refused_or_gives_other_symbols(
    seed: int, length: int, cut: int, flip: bool
) -> None:
    freqs = range_coder.quantize(draw_probs(seed, length, 50, 2.0))
    symbols = np.random.default_rng(seed).integers(50, size=length)
    data = bytearray(encode_all(intervals_of(freqs, symbols)))
    # A lone first symbol costs no byte.
    assume(data)
    if flip:
        place = cut % (8 * len(data))
        data[place // 8] ^= 1 << place % 8
    else:
        del data[cut % len(data) :]
    try:
        decoded = decode_all(bytes(data), list(freqs))
    except CodecError:
        return
    assert decoded != symbols.tolist()


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=12), length=st.integers(0, 40), seed=st.integers(0, 99))
def test_accepted_bytes_are_the_stream_of_their_symbols(
    data: bytes, length: int, seed: int
) -> None:
    freqs = range_coder.quantize(draw_probs(seed, length, 5, 1.0))
    try:
        symbols = decode_all(data, list(freqs))
    except CodecError:
        return
    assert encode_all(intervals_of(freqs, np.array(symbols, dtype=int))) == data


def test_empty_stream_ends_early() -> None:
    decoder = Decoder(b"")
    with pytest.raises(CodecError, match="ends early"):
        for _ in range(20):
            decoder.advance(decoder.target(), 1)


def test_code_outside_every_symbol_is_refused() -> None:
    # The rounding of span / 2^32 leaves a few codes at the top that no symbol owns.
    with pytest.raises(CodecError, match="no symbol fits"):
        Decoder(b"\xff" * 8).target()


def test_trailing_bytes_are_counted() -> None:
    data = encode_all([(0, 5), (77, 10_000)])
    decoder = Decoder(data + b"abc")
    decoder.advance(0, 5)
    decoder.advance(77, 10_000)
    with pytest.raises(CodecError, match="3 bytes after its last symbol"):
        decoder.finish()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.integers(1, 2000),
    spread=st.sampled_from([0.0, 1.0, 30.0, 1000.0]),
    error=st.sampled_from([0.0, 1e-6, -1e-6, 4e-4, -9e-4]),
)
def test_quantized_rows_are_complete(seed: int, vocab: int, spread: float, error: float) -> None:
    probs = draw_probs(seed, 5, vocab, spread) * (1 + error)
    freqs = range_coder.quantize(probs)
    assert freqs.dtype == np.int64
    assert np.array_equal(freqs.sum(axis=1), np.full(5, TOTAL))
    assert freqs.min() >= 1
    others = np.ones_like(freqs, dtype=bool)
    others[np.arange(5), probs.argmax(axis=1)] = False
    assert np.array_equal(freqs[others], 1 + np.floor(probs * (TOTAL - vocab))[others])


def test_remainder_goes_to_the_first_largest() -> None:
    freqs = range_coder.quantize(np.array([[0.2, 0.4 - 1e-4, 0.4 - 1e-4]]))[0]
    assert freqs[1] - freqs[2] == TOTAL - 3 - sum(
        int(p * (TOTAL - 3)) for p in (0.2, 0.4 - 1e-4, 0.4 - 1e-4)
    )


@pytest.mark.parametrize(
    "probs",
    [
        np.array([[0.5, 0.5], [np.nan, 0.5]]),
        np.array([[0.5, 0.5], [np.inf, 0.0]]),
        np.array([[0.5, 0.502]]),
        np.array([[0.5, 0.498]]),
        np.array([[1.0001, -0.0001]]),
        np.full((1, 8192), 1.0009 / 8192),
        np.array([0.5, 0.5]),
        np.array([[0.5, 0.5]], dtype=np.float32),
        np.empty((3, 0)),
    ],
)
def test_what_is_no_distribution_is_refused(probs: np.ndarray) -> None:
    with pytest.raises(CodecError, match="probabilities"):
        range_coder.quantize(probs)


def test_locate_agrees_with_intervals() -> None:
    freqs = range_coder.quantize(draw_probs(11, 1, 300, 3.0))[0]
    symbols = np.arange(300)
    intervals = intervals_of(np.tile(freqs, (300, 1)), symbols)
    for symbol, (start, freq) in zip(symbols.tolist(), intervals, strict=True):
        assert range_coder.locate(freqs, start) == (symbol, start, freq)
        assert range_coder.locate(freqs, start + freq - 1) == (symbol, start, freq)
    assert intervals[0][0] == 0
    assert sum(intervals[-1]) == TOTAL


def test_misuse_trips_the_invariants() -> None:
    encoder = Encoder()
    for start, freq in ((0, 0), (-1, 5), (TOTAL, 1), (1, TOTAL)):
        with pytest.raises(AssertionError):
            encoder.encode(start, freq)
    with pytest.raises(AssertionError):
        Decoder(b"\x80").advance(0, 5)
    encoder.finish()
    with pytest.raises(AssertionError):
        encoder.encode(0, 1)


def test_numpy_integers_code_like_plain_ones() -> None:
    pairs = [(TOTAL - 5, 3), (7, TOTAL - 9)]
    encoder = Encoder()
    for start, freq in pairs:
        encoder.encode(np.int64(start), np.int64(freq))
    assert encoder.finish() == encode_all(pairs)
