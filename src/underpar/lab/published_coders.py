"""How published records store rounded matrices, for a comparison with our coder.

PR 1855 and PR 2014 split the symbols into seven groups by role, sort the rows of some groups so
that similar rows are neighbors, transpose every matrix, and compress each group with
`lrzip -z -L 9`, which is ZPAQ with its largest model. Steps and control tensors are compressed
with brotli. Earlier records compressed all symbols with lzma. What is counted here can be decoded.
"""

from __future__ import annotations

import fnmatch
import json
import lzma
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from underpar.artifact.array_encoder import encode
from underpar.artifact.format import HEAD_BYTES, squeeze
from underpar.artifact.frequencies import normalize_counts
from underpar.errors import BenchError
from underpar.quant.schemes import QuantizedModel

# Groups in the order of the published file, with the names of their matrices.
GROUPS = {
    "embedding": "embedding.weight",
    "key": "blocks.*.attn.k.weight",
    "query": "blocks.*.attn.q.weight",
    "value": "blocks.*.attn.v.weight",
    "output": "blocks.*.attn.o.weight",
    "up": "blocks.*.mlp.up.weight",
    "down": "blocks.*.mlp.down.weight",
    "other": "*",
}
SORTED = ("embedding", "query", "up")
# Other tensors with at most this many weights are stored as control tensors (PR 1394).
SMALL_WEIGHTS = 65_536
# Distances are computed for this many rows at a time.
BLOCK_ROWS = 1024

Codes = Mapping[str, np.ndarray]
"""Integers (R, C) of matrices by name."""


@dataclass(frozen=True)
class Compressor:
    """A program that compresses standard input, or the file IN into the file OUT."""

    name: str
    words: tuple[str, ...]

    def __call__(self, data: bytes) -> bytes:
        """`data`, compressed."""
        if "OUT" not in self.words:
            return self._run(self.words, data)
        with tempfile.TemporaryDirectory() as folder:
            places = {"IN": str(Path(folder) / "in.bin"), "OUT": str(Path(folder) / "out.zpaq")}
            Path(places["IN"]).write_bytes(data)
            self._run([places.get(word, word) for word in self.words], b"")
            return Path(places["OUT"]).read_bytes()

    def _run(self, words: Sequence[str], data: bytes) -> bytes:
        try:
            return subprocess.run(words, input=data, capture_output=True, check=True).stdout
        except OSError as error:
            raise BenchError(f"cannot run {words[0]}: {error.strerror}") from error
        except subprocess.CalledProcessError as error:
            why = error.stderr.decode(errors="replace").strip().splitlines()
            last = why[-1] if why else "no message"
            raise BenchError(f"{words[0]}: exit code {error.returncode}, {last}") from error


def find_compressor(path: Path | None = None) -> Compressor:
    """The program at `path`; without a path lrzip as published, or else zpaq."""
    if path is not None:
        if not (program := shutil.which(path)):
            raise BenchError(f"{path} is not a program; --zpaq names one that reads standard input")
        return Compressor(path.name, (program,))
    if program := shutil.which("lrzip"):
        # One thread: with more, the file would depend on the number of cores.
        words = (program, "-q", "-z", "-L", "9", "-p", "1", "-o", "OUT", "IN")
        return Compressor("lrzip -z -L 9", words)
    if program := shutil.which("zpaq"):
        return Compressor("zpaq -method 5", (program, "add", "OUT", "IN", "-method", "5"))
    raise BenchError(
        "neither lrzip nor zpaq is on the PATH; install one, or name a program that compresses its "
        "standard input with --zpaq"
    )


def split(tensors: QuantizedModel) -> tuple[dict[str, np.ndarray], QuantizedModel]:
    """Codes of the matrices whose symbols are coded in groups, and all other tensors."""
    codes = {}
    for name, tensor in tensors.items():
        known = tensor.codes is not None and group_of(name) != "other"
        if tensor.codes is not None and (known or tensor.codes.size > SMALL_WEIGHTS):
            codes[name] = tensor.codes
    return codes, {name: t for name, t in tensors.items() if name not in codes}


def group_of(name: str) -> str:
    """The published group of a matrix."""
    return next(group for group, pattern in GROUPS.items() if fnmatch.fnmatchcase(name, pattern))


def lzma_bytes(codes: Codes) -> int:
    """All symbols in one lzma stream of preset 9."""
    data = b"".join(_as_bytes(codes[name]) for name in _in_layers(codes))
    return len(lzma.compress(data, preset=9))


@dataclass(frozen=True)
class GroupBytes:
    """Bytes of all groups with unsorted and with sorted rows, and bytes that undo the sort."""

    unsorted_bytes: int
    sorted_bytes: int
    permutation_bytes: int

    @property
    def sort_pays(self) -> bool:
        """Whether the file is smaller with sorted rows."""
        return self.sorted_bytes + self.permutation_bytes < self.unsorted_bytes

    def parts(self) -> dict[str, int]:
        """Bytes by part of the smaller variant."""
        if not self.sort_pays:
            return {"symbols": self.unsorted_bytes}
        return {"symbols": self.sorted_bytes, "permutations": self.permutation_bytes}


def per_group_bytes(
    codes: Codes, compress: Compressor, pool: Executor, device: torch.device
) -> GroupBytes:
    """Bytes of the published layout with sorted and unsorted rows; programs run in parallel."""
    orders = {n: sort_rows(c, device) for n, c in codes.items() if group_of(n) in SORTED}
    plain, in_order = _checked_layout(codes, {}), _checked_layout(codes, orders)
    jobs = {(False, group): data for group, data in plain.items()}
    jobs |= {(True, group): data for group, data in in_order.items() if group in SORTED}
    # The largest job first, so that it is not the last one to finish.
    names = sorted(jobs, key=lambda job: -len(jobs[job]))
    lengths = pool.map(lambda job: len(compress(jobs[job])), names)
    sizes = dict(zip(names, lengths, strict=True))
    permutations = [orders[name] for name in _in_layers(orders)]
    return GroupBytes(
        sum(sizes[False, group] for group in plain),
        sum(sizes[group in SORTED, group] for group in plain),
        len(shrink(_planes(permutations, "<u4"))),
    )


def _checked_layout(codes: Codes, orders: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    streams = lay_out(codes, orders)
    restored = restore(streams, orders, {name: matrix.shape for name, matrix in codes.items()})
    assert all(np.array_equal(restored[name], matrix) for name, matrix in codes.items())
    return streams


def lay_out(codes: Codes, orders: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Bytes per group: matrices in the order of layers, each column by column."""
    streams: dict[str, bytes] = {}
    for group in GROUPS:
        names = [name for name in _in_layers(codes) if group_of(name) == group]
        sorted_codes = (codes[n][orders[n]] if n in orders else codes[n] for n in names)
        if data := b"".join(_as_bytes(matrix.T) for matrix in sorted_codes):
            streams[group] = data
    return streams


def restore(
    streams: Mapping[str, bytes],
    orders: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, np.ndarray]:
    """The codes that `lay_out` got, in int8."""
    codes = {}
    taken = dict.fromkeys(streams, 0)
    for name in _in_layers(shapes):
        group, (rows, columns) = group_of(name), shapes[name]
        first = taken[group]
        taken[group] += rows * columns
        flat = np.frombuffer(streams[group][first : taken[group]], dtype=np.int8)
        matrix = flat.reshape(columns, rows).T
        codes[name] = matrix[np.argsort(orders[name])] if name in orders else matrix
    return codes


@torch.no_grad()
def sort_rows(codes: np.ndarray, device: torch.device) -> np.ndarray:
    """A greedy order of rows (R,): row 0 first, then always the nearest unused row in L1."""
    distances = _distances(torch.from_numpy(codes.astype(np.float32)).to(device))
    order = np.zeros(len(codes), dtype=np.int64)
    used = np.zeros(len(codes), dtype=np.float32)
    for place in range(1, len(codes)):
        last = order[place - 1]
        used[last] = np.inf
        order[place] = (distances[last] + used).argmin()
    return order


def _distances(rows: torch.Tensor) -> np.ndarray:
    """L1 distances (R, R) of rows (R, C) of small integers: exact in fp32."""
    distances = torch.empty(len(rows), len(rows))
    for start in range(0, len(rows), BLOCK_ROWS):
        stop = start + BLOCK_ROWS
        # Distances to earlier rows are known: the matrix is symmetric.
        block = torch.cdist(rows[start:stop], rows[start:], p=1).cpu()
        distances[start:stop, start:] = block
        distances[start:, start:stop] = block.T
    return distances.numpy()


def side_bytes(
    tensors: QuantizedModel, compress: Callable[[bytes], bytes] = squeeze
) -> dict[str, int]:
    """Bytes of everything but the symbols: steps, control tensors, corrections, names."""
    codes, others = split(tensors)
    matrices = [tensors[name] for name in codes]
    steps = [a for t in matrices for a in (t.steps, t.columns) if a is not None]
    factors = [f for t in matrices if (c := t.correction) for f in (c.left, c.right)]
    controls = _planes([t.steps for t in others.values()], "<u2")
    controls += b"".join(_as_bytes(t.codes) for t in others.values() if t.codes is not None)
    corrections = len(compress(_planes([f.steps for f in factors], "<u2"))) if factors else 0
    manifest = json.dumps([[n, t.shape, str(t.scheme)] for n, t in tensors.items()]).encode()
    return {
        "steps": len(compress(_planes(steps, "<u2"))),
        "controls": len(compress(controls)) if controls else 0,
        "corrections": corrections + sum(_factor_bytes(f.codes) for f in factors),
        "framing": HEAD_BYTES + len(compress(manifest)),
    }


def _factor_bytes(codes: np.ndarray) -> int:
    """Bytes of integers coded with rANS, with the counts of their values."""
    symbols = codes.reshape(-1).astype(np.int64) - int(codes.min())
    freqs = normalize_counts(np.bincount(symbols))
    return len(encode(symbols, freqs)) + 2 * len(freqs)


def shrink(data: bytes) -> bytes:
    """Compress with brotli, as published, or with lzma if brotli is not installed."""
    try:
        import brotli
    except ImportError:
        return squeeze(data)
    packed: bytes = brotli.compress(data, quality=11, lgwin=24)
    return packed


def _in_layers(names: Iterable[str]) -> list[str]:
    """Names sorted so that those which differ in the layer are in the order of layers."""
    return sorted(names, key=lambda name: (len(name), name))


def _as_bytes(codes: np.ndarray) -> bytes:
    assert np.abs(codes).max(initial=0) <= 127
    return codes.astype(np.int8).tobytes()


def _planes(arrays: Sequence[np.ndarray], kind: str) -> bytes:
    """The bytes of numbers by significance: all high bytes first, because they repeat."""
    width = np.dtype(kind).itemsize
    views = [a.reshape(-1).view(kind) if a.itemsize == width else a.astype(kind) for a in arrays]
    flat = np.concatenate(views or [np.empty(0, kind)])
    return flat.view(np.uint8).reshape(-1, width)[:, ::-1].T.tobytes()
