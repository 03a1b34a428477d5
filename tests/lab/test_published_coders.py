"""Published containers: layouts that can be undone, the row sort, programs, bytes by part."""

import lzma
import stat
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.artifact.format import HEAD_BYTES, squeeze
from underpar.errors import BenchError
from underpar.lab import published_coders
from underpar.lab.published_coders import (
    GROUPS,
    SMALL_WEIGHTS,
    Compressor,
    GroupBytes,
    find_compressor,
    group_of,
    lay_out,
    lzma_bytes,
    per_group_bytes,
    restore,
    shrink,
    side_bytes,
    sort_rows,
    split,
)
from underpar.quant.lowrank import Factor, LowRank
from underpar.quant.schemes import QuantizedTensor, Scheme, parse_scheme

CPU = torch.device("cpu")
NAMES = [
    "embedding.weight",
    *(f"blocks.{i}.attn.{letter}.weight" for letter in "qkvo" for i in (0, 2, 10)),
    *(f"blocks.{i}.mlp.{letter}.weight" for letter in ("up", "down") for i in (0, 2, 10)),
    "levers.bigram.table",
]
XZ = "import lzma, sys\ndata = {read}\npacked = lzma.compress(data, preset=6)\n{write}\n"


def write_program(path: Path, text: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def write_filter(path: Path) -> Path:
    """A program that compresses its standard input."""
    read, write = "sys.stdin.buffer.read()", "sys.stdout.buffer.write(packed)"
    return write_program(path, XZ.format(read=read, write=write))


def draw(seed: int, rows: int, columns: int, width: float = 5.0) -> np.ndarray:
    numbers = np.random.default_rng(seed).normal(0, width, (rows, columns))
    return np.clip(np.rint(numbers), -127, 127).astype(np.int8)


def sort_slowly(codes: np.ndarray) -> list[int]:
    order, left = [0], set(range(1, len(codes)))
    while left:
        last = codes[order[-1]].astype(int)
        order.append(min(left, key=lambda row: (np.abs(codes[row] - last).sum(), row)))
        left.remove(order[-1])
    return order


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 6), st.sampled_from([1, 3, 1024]))
def test_rows_are_sorted_greedily(seed: int, rows: int, columns: int, block: int) -> None:
    codes = draw(seed, rows, columns, width=2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published_coders, "BLOCK_ROWS", block)
        assert sort_rows(codes, CPU).tolist() == sort_slowly(codes)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.sets(st.sampled_from(NAMES), min_size=1), st.booleans())
def test_a_layout_can_be_undone(seed: int, names: set[str], is_sorted: bool) -> None:
    rng = np.random.default_rng(seed)
    codes = {n: draw(seed + i, *rng.integers(1, 9, 2)) for i, n in enumerate(sorted(names))}
    orders = {n: rng.permutation(len(c)) for n, c in codes.items()} if is_sorted else {}
    streams = lay_out(codes, orders)
    restored = restore(streams, orders, {name: c.shape for name, c in codes.items()})
    assert restored.keys() == codes.keys()
    for name, original in codes.items():
        np.testing.assert_array_equal(restored[name], original)


def test_streams_run_down_columns_in_layer_order() -> None:
    key = "blocks.{}.attn.k.weight"
    codes = {key.format(10): np.array([[5, 6]]), key.format(2): np.array([[1, 2], [3, -4]])}
    assert lay_out(codes, {}) == {"key": bytes([1, 3, 2, 252, 5, 6])}
    turned = lay_out(codes, {key.format(2): np.array([1, 0])})
    assert turned == {"key": bytes([3, 1, 252, 2, 5, 6])}


def test_groups() -> None:
    groups = {name: group_of(name) for name in NAMES}
    assert set(groups.values()) == set(GROUPS)
    assert groups["blocks.10.mlp.down.weight"] == "down"
    assert groups["levers.bigram.table"] == "other"


def make_model() -> dict[str, QuantizedTensor]:
    steps = np.full(64, 0.01, dtype=np.float16)
    scheme = Scheme(6, 12.0, "gptq")
    names = ("embedding.weight", "blocks.0.attn.q.weight", "blocks.0.mlp.down.weight")
    model = {
        n: QuantizedTensor((64, 32), scheme, steps, draw(i, 64, 32)) for i, n in enumerate(names)
    }
    model["blocks.0.attn_scale"] = QuantizedTensor((32,), Scheme(), np.ones(32, dtype=np.float16))
    gate = QuantizedTensor((8, 12), Scheme(8), np.ones(8, dtype=np.float16), draw(9, 8, 12))
    return {**model, "levers.gate": gate}


def test_small_tensors_are_controls() -> None:
    model = make_model()
    codes, others = split(model)
    assert set(others) == {"blocks.0.attn_scale", "levers.gate"}
    assert set(codes) == set(model) - set(others)
    large = draw(0, 2, SMALL_WEIGHTS // 2 + 1)
    model["levers.gate"] = QuantizedTensor(large.shape, Scheme(8), np.ones(2, np.float16), large)
    assert set(split(model)[1]) == {"blocks.0.attn_scale"}


def test_lzma_is_one_stream() -> None:
    codes = {"b": draw(0, 30, 20), "a": draw(1, 5, 6)}
    assert lzma_bytes(codes) == len(
        lzma.compress(codes["a"].tobytes() + codes["b"].tobytes(), preset=9)
    )


def test_groups_are_compressed_with_and_without_sort(tmp_path: Path) -> None:
    codes, _ = split(make_model())
    # Few kinds of rows: sorted, they repeat.
    codes["embedding.weight"] = draw(3, 4, 32)[np.random.default_rng(0).integers(0, 4, 64)]
    program = Compressor("xz", (str(write_filter(tmp_path / "pack")),))
    with ThreadPoolExecutor(2) as pool:
        counted = per_group_bytes(codes, program, pool, CPU)
    expected = sum(len(lzma.compress(c.T.tobytes(), preset=6)) for c in codes.values())
    assert counted.unsorted_bytes == expected
    turned = {n: c if n.endswith("down.weight") else c[sort_slowly(c)] for n, c in codes.items()}
    expected = sum(len(lzma.compress(c.T.tobytes(), preset=6)) for c in turned.values())
    assert counted.sorted_bytes == expected
    # Two sorted matrices of 64 rows: six bits a row at least.
    assert counted.permutation_bytes > 2 * 64 * 6 / 8


@pytest.mark.parametrize(("permutations", "pays"), [(19, True), (20, False), (21, False)])
def test_the_smaller_variant_counts(permutations: int, pays: bool) -> None:
    counted = GroupBytes(100, 80, permutations)
    assert counted.sort_pays is pays
    symbols = {"symbols": 80, "permutations": permutations} if pays else {"symbols": 100}
    assert counted.parts() == symbols


def with_correction(model: Mapping[str, QuantizedTensor]) -> dict[str, QuantizedTensor]:
    left = Factor(draw(0, 64, 4, 1.0), np.zeros(1, dtype=np.int16), 256)
    right = Factor(draw(1, 4, 32, 3.0), np.zeros(2, dtype=np.int16), 64)
    old = model["embedding.weight"]
    corrected = QuantizedTensor(
        old.shape, old.scheme, old.steps, old.codes, None, LowRank(left, right)
    )
    return {**model, "embedding.weight": corrected}


def test_side_bytes_by_part() -> None:
    model = make_model()
    plain = side_bytes(model)
    assert plain["corrections"] == 0
    steps = np.concatenate([t.steps for t in model.values() if t.codes is not None][:3])
    pairs = steps.view(np.uint8).reshape(-1, 2)
    assert plain["steps"] == len(squeeze(pairs[:, 1].tobytes() + pairs[:, 0].tobytes()))
    assert plain["framing"] > HEAD_BYTES
    # Gaussian factors of widths 1 and 3, 2.1 and 3.6 bits, and little else.
    corrected = side_bytes(with_correction(model))
    assert 0 < corrected.pop("corrections") - (64 * 4 * 2.1 + 4 * 32 * 3.6) / 8 < 90
    assert corrected == {part: size for part, size in plain.items() if part != "corrections"}


def test_log_steps_and_columns_are_steps() -> None:
    rng = np.random.default_rng(0)
    rows, columns = (rng.integers(-512, 512, n, dtype=np.int16) for n in (64, 32))
    scheme = parse_scheme("grid1+columns")
    tensor = QuantizedTensor((64, 32), scheme, rows, draw(0, 64, 32), columns)
    with_columns = side_bytes({"embedding.weight": tensor})["steps"]
    assert with_columns >= (64 + 32) * 10 / 8
    bare = QuantizedTensor((64, 32), parse_scheme("grid1"), rows, draw(0, 64, 32))
    assert side_bytes({"embedding.weight": bare})["steps"] < with_columns


def test_brotli_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "brotli", None)
    assert shrink(b"abc" * 99) == squeeze(b"abc" * 99)
    asked = []
    fake = SimpleNamespace(compress=lambda data, **options: asked.append(options) or b"packed")
    monkeypatch.setitem(sys.modules, "brotli", fake)
    assert shrink(b"abc") == b"packed"
    assert asked == [{"quality": 11, "lgwin": 24}]


def test_a_program_that_reads_standard_input(tmp_path: Path) -> None:
    program = find_compressor(write_filter(tmp_path / "pack"))
    assert program.name == "pack"
    assert lzma.decompress(program(b"some bytes")) == b"some bytes"


@pytest.mark.parametrize("name", ["lrzip", "zpaq"])
def test_programs_on_the_path(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = "open([w for w in sys.argv if w.endswith('in.bin')][0], 'rb').read()"
    write = "open([w for w in sys.argv if w.endswith('out.zpaq')][0], 'wb').write(packed)"
    write_program(tmp_path / name, XZ.format(read=read, write=write))
    monkeypatch.setenv("PATH", str(tmp_path))
    program = find_compressor()
    assert program.name.startswith(name)
    assert lzma.decompress(program(b"other bytes")) == b"other bytes"


def test_lrzip_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("zpaq", "lrzip"):
        write_filter(tmp_path / name)
    monkeypatch.setenv("PATH", str(tmp_path))
    program, *words = find_compressor().words
    assert program == str(tmp_path / "lrzip")
    assert " ".join(words) == "-q -z -L 9 -p 1 -o OUT IN"


def test_without_any_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BenchError, match=r"neither lrzip nor zpaq .* --zpaq"):
        find_compressor()
    with pytest.raises(BenchError, match="is not a program"):
        find_compressor(tmp_path / "none")


def test_a_program_that_fails(tmp_path: Path) -> None:
    text = "import sys\nprint('first\\nno memory', file=sys.stderr)\nsys.exit(3)\n"
    with pytest.raises(BenchError, match="bad: exit code 3, no memory"):
        find_compressor(write_program(tmp_path / "bad", text))(b"data")
    silent = write_program(tmp_path / "silent", "import sys\nsys.exit(1)\n")
    with pytest.raises(BenchError, match="exit code 1, no message"):
        find_compressor(silent)(b"data")
    with pytest.raises(BenchError, match="cannot run"):
        Compressor("gone", (str(tmp_path / "gone"),))(b"data")
