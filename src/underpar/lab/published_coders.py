"""How public records store rounded matrices, to compare ours with: bytes that can be decoded again.

PR 1855 and PR 2014 split the symbols into seven groups, one a role, sort the rows of some so that
neighbours are alike, transpose every matrix and hand each group to `lrzip -z -L 9`, whose back end
is ZPAQ with its largest model. Steps and control tensors are compressed with brotli. Before them
all symbols went through lzma.
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

# In the order of the published file.
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
# Other tensors of at most so many weights pass through among the control tensors (PR 1394).
SMALL_WEIGHTS = 65_536
# Rows whose distances are found at a time.
BLOCK_ROWS = 1024

Codes = Mapping[str, np.ndarray]
"""Integers (R, C) of matrices by name."""


@dataclass(frozen=True)
class Compressor:
    """A program: standard input to standard output, or from the file IN to the file OUT."""

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
    """The program at `path`, which reads standard input; else lrzip as published, else zpaq."""
    if path is not None:
        if not (found := shutil.which(path)):
            raise BenchError(f"{path} is not a program; --zpaq names one that reads standard input")
        return Compressor(path.name, (found,))
    if found := shutil.which("lrzip"):
        # One thread, so that the file does not depend on the machine.
        words = (found, "-q", "-z", "-L", "9", "-p", "1", "-o", "OUT", "IN")
        return Compressor("lrzip -z -L 9", words)
    if found := shutil.which("zpaq"):
        return Compressor("zpaq -method 5", (found, "add", "OUT", "IN", "-method", "5"))
    raise BenchError(
        "neither lrzip nor zpaq is on the PATH; install one, or name a program that compresses its "
        "standard input with --zpaq"
    )


def split(tensors: QuantizedModel) -> tuple[dict[str, np.ndarray], QuantizedModel]:
    """Codes of the matrices whose symbols are coded by themselves, and all other tensors."""
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
    """Bytes of the symbols by groups, unsorted and sorted, and what it takes to undo the sort."""

    unsorted_bytes: int
    sorted_bytes: int
    permutation_bytes: int

    @property
    def sort_pays(self) -> bool:
        """Whether the file is smaller with sorted rows."""
        return self.sorted_bytes + self.permutation_bytes < self.unsorted_bytes

    def parts(self) -> dict[str, int]:
        """The smaller variant."""
        if not self.sort_pays:
            return {"symbols": self.unsorted_bytes}
        return {"symbols": self.sorted_bytes, "permutations": self.permutation_bytes}


def per_group_bytes(
    codes: Codes, compress: Compressor, pool: Executor, device: torch.device
) -> GroupBytes:
    """The published layout, with the row sort and without it; programs run side by side."""
    orders = {n: sort_rows(c, device) for n, c in codes.items() if group_of(n) in SORTED}
    plain, in_order = _checked_layout(codes, {}), _checked_layout(codes, orders)
    jobs = {(False, group): data for group, data in plain.items()}
    jobs |= {(True, group): data for group, data in in_order.items() if group in SORTED}
    # The largest first: the last to finish sets the time.
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
    restored = restore(streams, orders, {name: own.shape for name, own in codes.items()})
    assert all(np.array_equal(restored[name], own) for name, own in codes.items())
    return streams


def lay_out(codes: Codes, orders: Mapping[str, np.ndarray]) -> dict[str, bytes]:
    """Each group's matrices in layer order, rows in their order, column after column."""
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
    """What `lay_out` was given, in int8."""
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
    """Greedy order (R,): row 0, then always the unused row nearest in L1, the first of equals."""
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
        # What is left of the diagonal is known already.
        block = torch.cdist(rows[start:stop], rows[start:], p=1).cpu()
        distances[start:stop, start:] = block
        distances[start:, start:stop] = block.T
    return distances.numpy()


def side_bytes(
    tensors: QuantizedModel, compress: Callable[[bytes], bytes] = squeeze
) -> dict[str, int]:
    """Bytes of all but the symbols: steps, control tensors, corrections, and what names them."""
    codes, others = split(tensors)
    own = [tensors[name] for name in codes]
    steps = [a for t in own for a in (t.steps, t.columns) if a is not None]
    factors = [f for t in own if (c := t.correction) for f in (c.left, c.right)]
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
    """Integers with the counts of their values: less than any byte compressor takes."""
    symbols = codes.reshape(-1).astype(np.int64) - int(codes.min())
    freqs = normalize_counts(np.bincount(symbols))
    return len(encode(symbols, freqs)) + 2 * len(freqs)


def shrink(data: bytes) -> bytes:
    """Brotli at its best where it is installed, as published; else lzma."""
    try:
        import brotli
    except ImportError:
        return squeeze(data)
    packed: bytes = brotli.compress(data, quality=11, lgwin=24)
    return packed


def _in_layers(names: Iterable[str]) -> list[str]:
    """Names that differ in a layer's number alone, in the order of layers."""
    return sorted(names, key=lambda name: (len(name), name))


def _as_bytes(codes: np.ndarray) -> bytes:
    assert np.abs(codes).max(initial=0) <= 127
    return codes.astype(np.int8).tobytes()


def _planes(arrays: Sequence[np.ndarray], kind: str) -> bytes:
    """Numbers with their bytes of equal weight together, high ones first: they repeat."""
    width = np.dtype(kind).itemsize
    views = [a.reshape(-1).view(kind) if a.itemsize == width else a.astype(kind) for a in arrays]
    flat = np.concatenate(views or [np.empty(0, kind)])
    return flat.view(np.uint8).reshape(-1, width)[:, ::-1].T.tobytes()
