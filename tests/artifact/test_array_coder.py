"""The weight coder: exact, as short as its tables allow, and safe on damaged streams."""

import lzma

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.artifact.array_decoder import choose_num_coders, decode, decode_many
from underpar.artifact.array_encoder import encode, encode_many
from underpar.artifact.frequencies import PROB_BITS, TOTAL, normalize_counts
from underpar.errors import ArtifactError


def draw_symbols(seed: int, alphabet: int, length: int, skew: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    weights = np.arange(1, alphabet + 1, dtype=np.float64) ** -skew
    return rng.choice(alphabet, size=length, p=rng.permutation(weights / weights.sum()))


def draw_gaussian(num_symbols: int) -> np.ndarray:
    weights = np.random.default_rng(1).standard_normal(num_symbols)
    return np.clip(np.rint(weights * 31 / 12.85), -31, 31).astype(np.int64) + 31


def tabulate(symbols: np.ndarray, alphabet: int) -> np.ndarray:
    return normalize_counts(np.bincount(symbols, minlength=alphabet))


def code_length_bits(symbols: np.ndarray, freqs: np.ndarray) -> float:
    """Ideal length in bits of the symbols under the frequencies, without states."""
    counts = np.bincount(symbols, minlength=len(freqs))
    used = counts > 0
    return float(np.sum(counts[used] * (PROB_BITS - np.log2(freqs[used]))))


arrays = st.builds(
    lambda seed, alphabet, length, skew: (draw_symbols(seed, alphabet, length, skew), alphabet),
    seed=st.integers(0, 2**32 - 1),
    alphabet=st.sampled_from([1, 2, 3, 15, 63, 127, 300, 5000]),
    length=st.one_of(st.integers(0, 40), st.integers(0, 9000), st.just(4096)),
    skew=st.sampled_from([0.0, 0.7, 2.0, 8.0]),
)


@settings(deadline=None, max_examples=120)
@given(arrays)
def test_round_trip_and_length(case: tuple[np.ndarray, int]) -> None:
    symbols, alphabet = case
    freqs = tabulate(symbols, alphabet)
    data = encode(symbols, freqs)
    decoded = decode(data, freqs, symbols.size)
    assert np.array_equal(decoded, symbols)
    ideal_bytes = code_length_bits(symbols, freqs) / 8
    # States end on a whole word: 4 bytes a coder, and one word over all.
    assert len(data) <= 1.001 * ideal_bytes + 4 * choose_num_coders(symbols.size) + 2


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.uint64])
def test_every_integer_type_gives_the_same_stream(dtype: type) -> None:
    symbols = draw_symbols(2, 63, 5000, 1.0)
    freqs = tabulate(symbols, 63)
    assert encode(symbols.astype(dtype), freqs) == encode(symbols, freqs)


@pytest.mark.parametrize("alphabet", [1, 63])
@pytest.mark.parametrize("length", [0, 1, 2047, 4096, 100_001])
def test_constant_array_costs_its_states_only(alphabet: int, length: int) -> None:
    symbols = np.full(length, alphabet - 1)
    freqs = tabulate(symbols, alphabet)
    data = encode(symbols, freqs)
    assert freqs.max() == TOTAL
    assert len(data) == 4 * choose_num_coders(length)
    assert np.array_equal(decode(data, freqs, length), symbols)


@pytest.mark.parametrize("freqs", [[TOTAL - 1, 1], [1, TOTAL - 1], [5, 6, TOTAL - 11], [1] * TOTAL])
def test_ten_million_symbols(freqs: list[int]) -> None:
    table = np.array(freqs)
    slots = np.random.default_rng(3).integers(TOTAL, size=10_000_000, dtype=np.int32)
    symbols = np.repeat(np.arange(table.size, dtype=np.int32), table)[slots]
    data = encode(symbols, table)
    assert np.array_equal(decode(data, table, symbols.size), symbols)
    assert len(data) <= 1.001 * code_length_bits(symbols, table) / 8 + 4 * 1024


@pytest.mark.parametrize(
    ("num_symbols", "num_coders"),
    [(0, 1), (1023, 1), (1024, 2), (65_535, 64), (65_536, 8), (1 << 20, 128), (10**8, 1024)],
)
def test_coder_count_follows_the_length(num_symbols: int, num_coders: int) -> None:
    assert choose_num_coders(num_symbols) == num_coders


@pytest.mark.parametrize("num_coders", [1, 2, 3, 64, 1000, 20_000])
def test_any_coder_count_gives_the_same_symbols(num_coders: int) -> None:
    symbols = draw_symbols(4, 63, 10_001, 1.0)
    freqs = tabulate(symbols, 63)
    data = encode(symbols, freqs, num_coders=num_coders)
    assert np.array_equal(decode(data, freqs, symbols.size, num_coders=num_coders), symbols)
    ideal_bytes = code_length_bits(symbols, freqs) / 8
    assert len(data) <= 1.001 * ideal_bytes + 4 * num_coders


def test_many_arrays_give_the_streams_of_each() -> None:
    sizes = [0, 1, 3, 700, 1024, 5000, 65_536, 65_536, 70_001]
    alphabets = [3, 1, 5, 63, 63, 300, 63, 15, 5000]
    arrays = [
        draw_symbols(i, k, n, 1.0) for i, (n, k) in enumerate(zip(sizes, alphabets, strict=True))
    ]
    tables = [tabulate(a, k) for a, k in zip(arrays, alphabets, strict=True)]
    streams = encode_many(arrays, tables)
    assert streams == [encode(a, f) for a, f in zip(arrays, tables, strict=True)]
    decoded = decode_many(streams, tables, sizes)
    assert all(map(np.array_equal, decoded, arrays))
    assert all(array.dtype == np.int16 for array in decoded)
    assert encode_many([], []) == decode_many([], [], []) == []
    for damaged in range(1, len(sizes)):
        cut = [s[:-2] if i == damaged else s for i, s in enumerate(streams)]
        with pytest.raises(ArtifactError):
            decode_many(cut, tables, sizes)


def test_more_streams_than_are_decoded_at_once() -> None:
    arrays = [draw_symbols(i, 4, i % 7, 1.0) for i in range(600)]
    tables = [tabulate(a, 4) for a in arrays]
    decoded = decode_many(encode_many(arrays, tables), tables, [a.size for a in arrays])
    assert all(map(np.array_equal, decoded, arrays))


def test_stream_layout() -> None:
    # Two equal halves: a state doubles for every symbol, so the sixteenth of a coder moves a word.
    freqs = np.array([TOTAL // 2, TOTAL // 2])
    assert encode(np.array([], dtype=np.int8), freqs) == bytes([0, 0, 1, 0])
    assert encode(np.array([0]), freqs) == bytes([0, 0, 2, 0])
    assert encode(np.array([1]), freqs) == bytes([0, 0x20, 2, 0])
    symbols = np.zeros((16, 2), dtype=int)
    symbols[1, 1] = 1
    states, words = bytes([0, 0, 1, 0, 0, 0, 1, 0]), bytes([0, 0, 0, 0x20])
    assert encode(symbols.ravel(), freqs, num_coders=2) == states + words


@settings(deadline=None, max_examples=60)
@given(arrays, st.integers(0, 2**32 - 1))
def test_truncated_or_longer_stream_is_refused(case: tuple[np.ndarray, int], cut: int) -> None:
    symbols, alphabet = case
    freqs = tabulate(symbols, alphabet)
    data = encode(symbols, freqs)
    with pytest.raises(ArtifactError):
        decode(data[: cut % len(data)], freqs, symbols.size)
    with pytest.raises(ArtifactError):
        decode(data + b"\0", freqs, symbols.size)
    with pytest.raises(ArtifactError, match=r"bytes after|end in"):
        decode(data + b"\0\0", freqs, symbols.size)


@settings(deadline=None, max_examples=150)
@given(arrays, st.integers(0, 2**32 - 1))
def test_flipped_bit_never_passes_as_the_same_symbols(
    case: tuple[np.ndarray, int], place: int
) -> None:
    symbols, alphabet = case
    freqs = tabulate(symbols, alphabet)
    damaged = bytearray(encode(symbols, freqs))
    place %= 8 * len(damaged)
    damaged[place // 8] ^= 1 << place % 8
    try:
        decoded = decode(bytes(damaged), freqs, symbols.size)
    except ArtifactError:
        return
    assert not np.array_equal(decoded, symbols)


@settings(deadline=None, max_examples=150)
@given(data=st.binary(max_size=200), num_symbols=st.integers(0, 5000), seed=st.integers(0, 99))
def test_foreign_bytes_are_refused_or_are_an_exact_stream(
    data: bytes, num_symbols: int, seed: int
) -> None:
    freqs = normalize_counts(np.random.default_rng(seed).integers(0, 1000, size=30))
    try:
        decoded = decode(data, freqs, num_symbols)
    except ArtifactError:
        return
    assert encode(decoded, freqs) == data


def test_wrong_length_is_refused() -> None:
    symbols = draw_symbols(5, 63, 6000, 1.0)
    freqs = tabulate(symbols, 63)
    data = encode(symbols, freqs)
    for num_symbols in (-1, 0, 5999, 6001, 10**6):
        with pytest.raises(ArtifactError):
            decode(data, freqs, num_symbols)


@pytest.mark.parametrize(
    "freqs",
    [
        np.array([TOTAL - 1]),
        np.array([TOTAL, 1]),
        np.array([-1, TOTAL + 1]),
        np.array([2**63, 2**63, TOTAL], dtype=np.uint64),
        np.array([float(TOTAL)]),
        np.array([], dtype=np.uint32),
        np.array([[TOTAL]]),
    ],
)
def test_bad_frequencies_are_refused(freqs: np.ndarray) -> None:
    with pytest.raises(ArtifactError, match="frequencies"):
        decode(bytes([0, 0, 1, 0]), freqs, 0)
    with pytest.raises(ArtifactError, match="frequencies"):
        encode(np.zeros(3, dtype=int), freqs)


@pytest.mark.parametrize(
    "symbols", [np.array([2]), np.array([-1]), np.array([1]), np.array([0.0]), np.array([[0]])]
)
def test_symbols_the_table_cannot_code_are_refused(symbols: np.ndarray) -> None:
    freqs = np.array([TOTAL, 0])
    with pytest.raises(ArtifactError, match="symbol"):
        encode(symbols, freqs)


counts_lists = st.lists(
    st.one_of(st.just(0), st.integers(0, 50), st.integers(0, 2**45)), min_size=1, max_size=300
)


@settings(deadline=None, max_examples=150)
@given(counts_lists)
def test_quantized_counts_leave_no_better_exchange(counts: list[int]) -> None:
    freqs = normalize_counts(np.array(counts)).astype(np.int64)
    assert freqs.sum() == TOTAL
    used = np.array(counts) > 0
    if not used.any():
        assert freqs[0] == TOTAL
        return
    assert np.array_equal(freqs > 0, used)
    count, freq = np.array(counts, dtype=np.float64)[used], freqs[used]
    gain = count * np.log1p(1 / freq)
    loss = np.where(freq > 1, -count * np.log1p(-1 / np.maximum(freq, 2)), np.inf)
    # The rule of normalize_counts replaces the logarithm by a fraction at most 4 % smaller.
    assert gain.max() <= 1.05 * loss.min()


def test_full_alphabet_gets_one_unit_each() -> None:
    counts = np.arange(1, TOTAL + 1)
    assert np.array_equal(normalize_counts(counts), np.ones(TOTAL))
    with pytest.raises(ArtifactError, match="used"):
        normalize_counts(np.ones(TOTAL + 1, dtype=int))


@pytest.mark.parametrize("counts", [[], [0.5, 0.5], [[1]], [3, -1]])
def test_bad_counts_are_refused(counts: list) -> None:
    with pytest.raises(ArtifactError, match="counts"):
        normalize_counts(np.array(counts))


def test_gaussian_int6_cost_and_rival_coders() -> None:
    constriction = pytest.importorskip("constriction")
    symbols = draw_gaussian(1_000_000)
    freqs = tabulate(symbols, 63)
    num_bytes = len(encode(symbols, freqs))
    assert abs(8 * num_bytes / symbols.size - 3.328) <= 0.01
    assert num_bytes <= len(lzma.compress(symbols.astype(np.uint8).tobytes(), preset=6))

    model = constriction.stream.model.Categorical(freqs / TOTAL, perfect=False)
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(symbols.astype(np.int32), model)
    rival_bytes = 4 * len(coder.get_compressed())
    assert abs(num_bytes - rival_bytes) <= 0.005 * rival_bytes
