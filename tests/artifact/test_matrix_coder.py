"""The coder of weight matrices: exact, as short as its tables allow, safe on damaged streams."""

import lzma
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri

from trellis_paths import nearest_path
from underpar.artifact import array_decoder, matrix_decoder, matrix_encoder, width_fit, width_tables
from underpar.artifact.frequencies import PROB_BITS, TOTAL
from underpar.errors import ArtifactError
from underpar.quant.trellis import LARGEST_CODE, next_state

HEAD_BYTES = 13
SHAPES = [(1, 1), (1, 70), (70, 1), (3, 5), (40, 33), (2, 3000)]


def draw_codes(seed: int, shape: tuple[int, int], width: float, num_far: int = 0) -> np.ndarray:
    """Gaussians of uneven rows and columns, with a few integers anywhere."""
    rng = np.random.default_rng(seed)
    spread = rng.normal(size=(shape[0], 1)) + rng.normal(size=shape[1])
    codes = np.rint(rng.normal(size=shape) * width * np.exp(0.3 * spread))
    codes = codes.clip(-LARGEST_CODE, LARGEST_CODE).astype(np.int32)
    places = rng.integers(codes.size, size=num_far)
    codes.flat[places] = rng.integers(-LARGEST_CODE, LARGEST_CODE + 1, size=num_far)
    return codes


def walk_trellis(codes: np.ndarray, transitions: np.ndarray | None) -> np.ndarray:
    """The codes moved, by 1 at most, onto paths of the trellis."""
    if transitions is None:
        return codes
    path, state = np.empty_like(codes), np.zeros(len(codes), dtype=np.int64)
    for column, code in enumerate(codes.T):
        path[:, column] = code - (code + state & 1) * np.where(code > 0, 1, -1)
        state = transitions[state, path[:, column] >> 1 & 1]
    return path


def draw_gaussian(shape: tuple[int, int], step: float, columns: np.ndarray | float) -> np.ndarray:
    weights = np.random.default_rng(2).standard_normal(shape) * columns
    return np.rint(weights / step).astype(np.int16)


def spread_columns(num_columns: int, spread: float) -> np.ndarray:
    """Lognormal widths of mean square 1, at the quantiles, in random order."""
    quantiles = ndtri((np.arange(num_columns) + 0.5) / num_columns)
    widths = np.exp(spread * np.random.default_rng(0).permutation(quantiles))
    return widths / np.sqrt(np.mean(widths**2))


def fit(codes: np.ndarray, stride: int) -> tuple[width_tables.Scales, float]:
    """The coder's scales for codes whose log steps are not known."""
    shifts = np.zeros(codes.shape[0], dtype=np.int64), np.zeros(codes.shape[1], dtype=np.int64)
    return width_fit.fit(codes, stride, shifts)


def measure_bits(codes: np.ndarray, transitions: np.ndarray | None = None) -> float:
    """About the length of the codes' stream in bits, without its header and its coders' states."""
    return fit(codes.astype(np.int16), 1 if transitions is None else 2)[1]


def look_up(codes: np.ndarray, stride: int) -> tuple[width_tables.Book, np.ndarray, np.ndarray]:
    """The coder's tables for the codes, the numbers (R, C) of theirs, their places (R, C)."""
    scales, _ = fit(codes, stride)
    book = width_tables.Book([scales], stride)
    tables = book.find_tables(scales)
    return book, tables, book.find_symbols(codes, tables)


def bits_per_code(codes: np.ndarray) -> float:
    return 8 * len(matrix_encoder.encode(codes)) / codes.size


trellises = st.sampled_from([None, *map(next_state, (1, 4, 8, 16, 64))])
cases = st.builds(
    lambda seed, shape, width, far, trellis: (
        walk_trellis(
            draw_codes(seed, shape, width, far), matrix_decoder.check_transitions(trellis)
        ),
        trellis,
    ),
    seed=st.integers(0, 2**32 - 1),
    shape=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    width=st.sampled_from([0.0, 0.05, 0.4, 2.5, 20.0, 120.0, 3000.0]),
    far=st.sampled_from([0, 0, 1, 10]),
    trellis=trellises,
)


@settings(deadline=None, max_examples=100)
@given(cases)
def test_round_trip(case: tuple[np.ndarray, np.ndarray | None]) -> None:
    codes, trellis = case
    data = matrix_encoder.encode(codes, trellis)
    decoded = matrix_decoder.decode(data, codes.shape, trellis)
    assert decoded.dtype == np.int16
    assert np.array_equal(decoded, codes)
    assert matrix_encoder.encode(codes.astype(np.int64), trellis) == data


@pytest.mark.parametrize("num_states", [1, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value", [0, 2, -6, 300, LARGEST_CODE])
def test_constant_matrices(shape: tuple[int, int], value: int, num_states: int) -> None:
    codes = walk_trellis(np.full(shape, value), next_state(num_states) if num_states > 1 else None)
    data = matrix_encoder.encode(codes, next_state(num_states))
    assert np.array_equal(matrix_decoder.decode(data, shape, next_state(num_states)), codes)
    if value == 0:
        # An even state always leads to another one if all codes are 0.
        states_bytes = 4 * matrix_decoder.choose_num_coders(shape)
        assert len(data) <= HEAD_BYTES + 6 + codes.size / 8000 + states_bytes + 4


def test_zero_rows_and_columns_cost_little() -> None:
    codes = draw_codes(3, (512, 128), 2.5)
    bits = measure_bits(codes)
    codes[100:200] = 0
    codes[:, 30:60] = 0
    assert measure_bits(codes) < 0.65 * bits
    assert np.array_equal(matrix_decoder.decode(matrix_encoder.encode(codes), codes.shape), codes)


@pytest.mark.parametrize("num_states", [1, 4, 64])
@pytest.mark.parametrize("num_coders", [1, 2, 7, 50, 90])
def test_any_coder_count_gives_the_same_codes(num_coders: int, num_states: int) -> None:
    transitions = matrix_decoder.check_transitions(next_state(num_states))
    codes = walk_trellis(draw_codes(4, (50, 40), 3.0), transitions)
    (data,) = matrix_encoder.encode_many([codes], transitions, num_coders=num_coders)
    (decoded,) = matrix_decoder.decode_many(
        [data], [codes.shape], transitions, num_coders=num_coders
    )
    assert np.array_equal(decoded, codes)
    (single,) = matrix_encoder.encode_many([codes], transitions, num_coders=1)
    assert len(data) <= len(single) + 4 * num_coders


@pytest.mark.parametrize(
    ("shape", "num_coders"),
    [
        ((1, 1), 1),
        ((8, 512), 2),
        ((256, 512), 16),
        ((512, 512), 16),
        ((512, 2048), 64),
        ((8192, 512), 256),
        ((3, 1 << 20), 3),
    ],
)
def test_coder_count_follows_the_shape(shape: tuple[int, int], num_coders: int) -> None:
    assert matrix_decoder.choose_num_coders(shape) == num_coders


@pytest.mark.parametrize("num_states", [1, 8])
def test_many_matrices_give_the_streams_of_each(num_states: int) -> None:
    transitions = matrix_decoder.check_transitions(next_state(num_states))
    shapes = [(40, 100), (90, 70), (7, 100), (1, 70), (200, 100), (3, 3)]
    matrices = [
        walk_trellis(draw_codes(i, shape, 0.5 + 2 * i, i), transitions)
        for i, shape in enumerate(shapes)
    ]
    streams = matrix_encoder.encode_many(matrices, transitions)
    assert streams == [matrix_encoder.encode(codes, transitions) for codes in matrices]
    decoded = matrix_decoder.decode_many(streams, shapes, transitions)
    assert all(np.array_equal(a, b) for a, b in zip(decoded, matrices, strict=True))
    assert matrix_encoder.encode_many([]) == matrix_decoder.decode_many([], []) == []
    for damaged in range(len(shapes)):
        cut = [s[:-2] if i == damaged else s for i, s in enumerate(streams)]
        with pytest.raises(ArtifactError):
            matrix_decoder.decode_many(cut, shapes, transitions)


@pytest.mark.parametrize("num_states", [1, 8])
def test_log_steps_shorten_the_scales(num_states: int) -> None:
    rng = np.random.default_rng(11)
    rows, columns = (
        np.rint(rng.normal(size=n) * 8).astype(np.int16) - 70 * (n == 300) for n in (300, 200)
    )
    widths = 2.0 ** (-(rows[:, None] + columns) / 16) * 0.2
    codes = np.rint(rng.standard_normal(widths.shape) * widths).astype(np.int32)
    transitions = matrix_decoder.check_transitions(next_state(num_states))
    codes = walk_trellis(codes, transitions)
    plain = matrix_encoder.encode(codes, transitions)
    data = matrix_encoder.encode(codes, transitions, (rows, columns))
    # About four bits each without, and not one with them.
    assert len(plain) - len(data) >= 0.35 * codes.shape[0] + 0.35 * codes.shape[1]
    assert np.array_equal(
        matrix_decoder.decode(data, codes.shape, transitions, (rows, columns)), codes
    )
    assert max(data[HEAD_BYTES], plain[HEAD_BYTES]) >= 128 > plain[HEAD_BYTES]
    with pytest.raises(ArtifactError):
        matrix_decoder.decode(data, codes.shape, transitions)
    with pytest.raises(ArtifactError):
        matrix_decoder.decode(data, codes.shape, transitions, (rows[::-1].copy(), columns))


def test_log_steps_that_say_nothing_cost_nothing() -> None:
    codes = draw_codes(12, (300, 64), 2.5)
    steps = np.random.default_rng(12).integers(-200, 200, size=300).astype(np.int16)
    plain = matrix_encoder.encode(codes)
    assert matrix_encoder.encode(codes, None, (steps, None)) == plain
    assert np.array_equal(matrix_decoder.decode(plain, codes.shape, None, (steps, None)), codes)


def test_stream_layout() -> None:
    codes = np.array([[0, 1], [400, 0]])
    scales, _ = fit(codes, 1)
    data = matrix_encoder.encode(codes)
    exponent, row_bytes, column_bytes, num_escapes = struct.unpack_from("<BIII", data)
    assert (exponent, column_bytes) == (scales.exponent, 0)
    spread = width_tables.Spread(*data[HEAD_BYTES : HEAD_BYTES + 2])
    rows = data[HEAD_BYTES + 2 : HEAD_BYTES + row_bytes]
    assert np.array_equal(array_decoder.decode(rows, spread.freqs(), 2), scales.rows)
    escapes = data[HEAD_BYTES + row_bytes :][: 2 * num_escapes]
    assert escapes in (b"", struct.pack("<h", 400))
    assert len(data) >= HEAD_BYTES + row_bytes + 2 * num_escapes + 4


def test_gaussian_cost() -> None:
    codes = draw_gaussian((2048, 512), 0.4145, 1.0)
    assert 3.328 <= bits_per_code(codes) <= 3.335
    assert not fit(codes, 1)[0].columns.any()


def test_uneven_columns_cost() -> None:
    codes = draw_gaussian((2048, 512), 0.371, spread_columns(512, 0.2))
    assert bits_per_code(codes) <= 3.435
    assert fit(codes, 1)[0].columns.any()


@pytest.mark.parametrize(("width", "num_states"), [(0.3, 1), (2.4, 1), (40.0, 1), (4.4, 8)])
def test_length_is_that_of_its_tables(width: float, num_states: int) -> None:
    transitions = matrix_decoder.check_transitions(next_state(num_states))
    codes = walk_trellis(draw_codes(5, (1024, 512), width), transitions)
    book, _, places = look_up(codes, 1 if transitions is None else 2)
    data = matrix_encoder.encode(codes, transitions)
    _, row_bytes, column_bytes, num_escapes = struct.unpack_from("<BIII", data)
    ideal_bits = np.sum(PROB_BITS - np.log2(book.freqs[places]))
    code_bytes = len(data) - HEAD_BYTES - row_bytes - column_bytes - 2 * num_escapes
    coder_bytes = 4 * matrix_decoder.choose_num_coders(codes.shape)
    assert code_bytes <= ideal_bits / 8 * 1.001 + coder_bytes * (width < 1)
    measured_bytes = measure_bits(codes, transitions) / 8
    assert abs(len(data) - coder_bytes - measured_bytes) <= 1e-3 * measured_bytes


def test_rival_coders() -> None:
    constriction = pytest.importorskip("constriction")
    codes = draw_gaussian((1024, 512), 0.371, spread_columns(512, 0.2))
    book, tables, places = look_up(codes, 1)
    ideal_bits = np.sum(PROB_BITS - np.log2(book.freqs[places]))
    coder = constriction.stream.stack.AnsCoder()
    for number in np.unique(tables):
        mine = places[tables == number]
        first = np.flatnonzero(book.starts == 0)[number]
        size = np.searchsorted(np.cumsum(book.freqs[first:]), TOTAL) + 1
        model = constriction.stream.model.Categorical(
            book.freqs[first : first + size] / TOTAL, perfect=False
        )
        coder.encode_reverse((mine - first).astype(np.int32), model)
    assert abs(coder.num_valid_bits() - ideal_bits) <= 5e-4 * ideal_bits

    data = matrix_encoder.encode(codes)
    rivals = [codes.astype(np.int8).tobytes(), codes.T.astype(np.int8).tobytes()]
    assert all(len(data) <= len(lzma.compress(raw, preset=9)) for raw in rivals)


def test_never_longer_than_brotli() -> None:
    brotli = pytest.importorskip("brotli")
    codes = draw_gaussian((1024, 512), 0.371, spread_columns(512, 0.2))
    raw = codes.T.astype(np.int8).tobytes()
    assert len(matrix_encoder.encode(codes)) <= len(brotli.compress(raw, quality=11))


@pytest.mark.parametrize("num_states", [4, 64])
def test_trellis_costs_the_entropy_given_parity(num_states: int) -> None:
    samples = torch.randn((256, 256), generator=torch.Generator().manual_seed(0)) / 0.234
    codes = nearest_path(samples, num_states).numpy()
    entropy_bits = 0.0
    for parity in range(2):
        _, counts = np.unique(codes[codes & 1 == parity], return_counts=True)
        entropy_bits += np.sum(counts * np.log2(counts.sum() / counts))
    assert measure_bits(codes, next_state(num_states)) <= 1.002 * entropy_bits


def recode(data: bytes, codes: np.ndarray, transitions: np.ndarray | None) -> bytes:
    """The stream of the codes with the scales of a given one."""
    stride = 1 if transitions is None else 2
    num_coders = matrix_decoder.choose_num_coders(codes.shape)
    parts = matrix_decoder.split_stream(data, num_coders, stride)
    (scales,) = matrix_decoder.read_scales([parts], [codes.shape], [(None, None)])
    book = width_tables.Book([scales], stride)
    places = book.find_symbols(codes, book.find_tables(scales))
    escapes = codes[book.values[places] < -LARGEST_CODE]
    assert np.array_equal(escapes, parts.escapes)
    before = data[: len(data) - len(parts.codes)]
    return before + matrix_encoder.write_codes([places], book, [num_coders])[0]


@settings(deadline=None, max_examples=60)
@given(cases, st.integers(0, 2**32 - 1))
def test_damaged_stream_is_refused_or_is_exact(
    case: tuple[np.ndarray, np.ndarray | None], place: int
) -> None:
    codes, trellis = case
    transitions = matrix_decoder.check_transitions(trellis)
    data = matrix_encoder.encode(codes, transitions)
    for wrong in (data[: place % len(data)], data + b"\0", data + b"\0\0"):
        with pytest.raises(ArtifactError):
            matrix_decoder.decode(wrong, codes.shape, transitions)
    damaged = bytearray(data)
    damaged[place // 8 % len(data)] ^= 1 << place % 8
    try:
        decoded = matrix_decoder.decode(bytes(damaged), codes.shape, transitions)
    except ArtifactError:
        return
    assert recode(bytes(damaged), decoded, transitions) == damaged


def test_flipped_bits_are_noticed() -> None:
    codes = draw_codes(6, (32, 32), 2.5).clip(-8, 8)
    data = matrix_encoder.encode(codes)
    for bit in np.random.default_rng(7).choice(8 * len(data), size=50, replace=False):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ArtifactError):
            matrix_decoder.decode(bytes(damaged), codes.shape)


@settings(deadline=None, max_examples=150)
@given(
    kind=st.integers(0, 8),
    sizes=st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 3)),
    tail=st.binary(max_size=120),
    shape=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    trellis=trellises,
)
def test_foreign_bytes_are_refused_or_are_an_exact_stream(
    kind: int,
    sizes: tuple[int, int, int],
    tail: bytes,
    shape: tuple[int, int],
    trellis: np.ndarray | None,
) -> None:
    data = struct.pack("<BIII", kind, *sizes) + tail
    transitions = matrix_decoder.check_transitions(trellis)
    try:
        decoded = matrix_decoder.decode(data, shape, transitions)
    except ArtifactError:
        return
    assert recode(data, decoded, transitions) == data


def test_other_shape_or_trellis_is_refused() -> None:
    codes = walk_trellis(draw_codes(8, (64, 64), 5.0), next_state(8))
    data = matrix_encoder.encode(codes, next_state(8))
    for shape in [(64, 63), (63, 64), (65, 64), (32, 128), (4096, 1), (1, 4096)]:
        with pytest.raises(ArtifactError):
            matrix_decoder.decode(data, shape, next_state(8))
    for other in (None, next_state(4), next_state(64)):
        with pytest.raises(ArtifactError):
            matrix_decoder.decode(data, (64, 64), other)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((6, 0, 0), (1 << 14, 1 << 14)),
        ((6, 0, 0), (1 << 28, 1)),
        ((1 << 31, 0, 0), (8, 8)),
        ((6, 1 << 31, 0), (8, 8)),
        ((6, 0, 1 << 31), (8, 8)),
        ((6, 0, 0), (1 << 15, 1 << 14)),
        ((6, 0, 0), (0, 8)),
        ((6, 0, 0), (-8, -8)),
        ((6, 0, 0), (8, 8, 8)),
    ],
)
def test_hostile_sizes_are_refused_before_memory_is_taken(
    sizes: tuple[int, int, int], shape: tuple[int, int]
) -> None:
    data = struct.pack("<BIII", 0, *sizes) + bytes([40, 10, 0, 0, 1, 0]) * 4
    tracemalloc.start()
    with pytest.raises(ArtifactError):
        matrix_decoder.decode(data, shape)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


def test_escape_that_its_table_holds_is_refused() -> None:
    codes = draw_codes(9, (16, 16), 2.0)
    codes[3, 4] = 1000
    data = matrix_encoder.encode(codes)
    at = data.index(struct.pack("<h", 1000))
    for value in (1, 0, LARGEST_CODE + 1, -(1 << 15)):
        with pytest.raises(ArtifactError, match="escape"):
            matrix_decoder.decode(data[:at] + struct.pack("<h", value) + data[at + 2 :], (16, 16))
    other = data[:at] + struct.pack("<h", -999) + data[at + 2 :]
    assert matrix_decoder.decode(other, (16, 16))[3, 4] == -999


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (np.zeros(4, dtype=int), "2-D"),
        (np.zeros((2, 2)), "2-D"),
        (np.zeros((0, 4), dtype=int), "shape"),
        (np.array([[LARGEST_CODE + 1]]), "beyond"),
        (np.array([[-LARGEST_CODE - 1]]), "beyond"),
        (np.array([[0, 2], [0, 1]]), None),
    ],
)
def test_codes_that_cannot_be_coded_are_refused(codes: np.ndarray, message: str | None) -> None:
    if message:
        with pytest.raises(ArtifactError, match=message):
            matrix_encoder.encode(codes)
    with pytest.raises(ArtifactError, match=message or "trellis in column 1"):
        matrix_encoder.encode(codes, next_state(4))


@pytest.mark.parametrize(
    "transitions", [np.zeros((4, 3), dtype=int), np.full((4, 2), 4), np.full((4, 2), 0.5)]
)
def test_transitions_that_are_no_machine_are_refused(transitions: np.ndarray) -> None:
    with pytest.raises(ArtifactError, match="transitions"):
        matrix_encoder.encode(np.zeros((2, 2), dtype=int), transitions)


@pytest.mark.slow
@pytest.mark.parametrize("num_states", [1, 8])
@pytest.mark.parametrize("width", [0.1, 0.6, 2.4, 30.0, 150.0])
def test_ten_million_codes(width: float, num_states: int) -> None:
    transitions = matrix_decoder.check_transitions(next_state(num_states))
    shape = (5000, 2000)
    codes = walk_trellis(draw_codes(10, shape, width, 1000), transitions)
    data = matrix_encoder.encode(codes, transitions)
    assert np.array_equal(matrix_decoder.decode(data, shape, transitions), codes)
    # These walks are far from random where codes are small, and rANS states with them.
    slack = 1.001 if transitions is None else 1.005
    measured_bytes = measure_bits(codes, transitions) / 8
    assert len(data) <= slack * measured_bytes + 4 * matrix_decoder.choose_num_coders(shape) + 30
