"""A second reader of artifacts, written from docs/format.md alone: plain, slow, without numpy."""

import json
import lzma
import math
import struct
from functools import cache
from itertools import pairwise

from scipy.special import gamma, gammaincc

FILTERS = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 22}]
POWERS = (2, 1.8, 1.5, 1.2)
CHECKS = {1: (0, 0), 4: (0o5, 0o2), 8: (0o13, 0o4), 16: (0o23, 0o4), 64: (0o103, 0o24)}

Lines = list[list[int]]


@cache
def tails(exponent: int) -> list[int]:
    """T of an exponent."""
    g = POWERS[exponent]
    width = math.sqrt(gamma(1 / g) / gamma(3 / g))
    masses = [round(float(gammaincc(1 / g, (k / 8 / width) ** g)) * 2**29) for k in range(65)]
    return masses[: masses.index(0)] if 0 in masses else masses


def mass_above(exponent: int, bucket: int, h: int) -> int:
    octave, i = divmod(bucket - 36, 8)
    q, p = divmod(h * round(2 ** (30 - i / 8)) // 2 ** (12 + octave), 2**16)
    t = tails(exponent)
    at = min(q, len(t) + 1)
    y0, y1, y2, y3 = [2**30 - t[1], *t, 0, 0, 0, 0][at : at + 4]
    a, b, c = y1 - y0, y2 - 2 * y1 + y0, y3 - 3 * y2 + 3 * y1 - y0
    slope = 6 * a * 2**32 + 3 * b * p * 2**16 + c * p * (p - 2**16)
    return max(y0 + slope * (p + 2**16) // (6 * 2**48), 0)


def mass(exponent: int, bucket: int, n: int, d: int) -> int:
    if n == 0:
        return max(2**30 - 2 * mass_above(exponent, bucket, d), 1)
    return max(mass_above(exponent, bucket, 2 * n - d) - mass_above(exponent, bucket, 2 * n + d), 1)


def share(counts: list[int]) -> list[int]:
    used, total = sum(c > 0 for c in counts), sum(counts)
    freqs = [max(1, c * (2**14 - used) // total) if c else 0 for c in counts]
    while sum(freqs) < 2**14:
        gains = [c * 2**32 // (2 * f + 1) for c, f in zip(counts, freqs, strict=True)]
        freqs[gains.index(max(gains))] += 1
    return freqs


@cache
def table(exponent: int, bucket: int, d: int, z: int) -> tuple[list[int], list[int]]:
    """Integers, and the frequencies of these and of escapes."""
    largest = z
    while largest < d or mass(exponent, bucket, largest, d) >= 2**12:
        largest += d
    integers = [*range(-largest, largest + 1, d)]
    escape = 2 * mass_above(exponent, bucket, 2 * largest + d) // d + 1
    return integers, share([mass(exponent, bucket, abs(n), d) for n in integers] + [escape] * d)


class Coders:
    """States and words of a stream."""

    def __init__(self, data: bytes, num_coders: int) -> None:
        self.states = [*struct.unpack_from(f"<{num_coders}I", data)]
        self.words = [
            *struct.unpack(f"<{len(data) // 2 - 2 * num_coders}H", data[4 * num_coders :])
        ]

    def take(self, coder: int, freqs: list[int]) -> int:
        """The next symbol of a coder."""
        slot, symbol, start = self.states[coder] % 2**14, 0, 0
        while slot >= start + freqs[symbol]:
            start += freqs[symbol]
            symbol += 1
        self.states[coder] = freqs[symbol] * (self.states[coder] >> 14) + slot - start
        return symbol

    def refill(self, num_active: int) -> None:
        """Words for the first coders, where they lack one."""
        for coder in range(num_active):
            if self.states[coder] < 2**16:
                self.states[coder] = self.states[coder] << 16 | self.words.pop(0)

    def finish(self) -> None:
        assert not self.words
        assert set(self.states) == {2**16}


def read_array(data: bytes, freqs: list[int], size: int) -> list[int]:
    wanted = min(max(size // (512 if size < 65536 else 8192), 1), 1024)
    num_coders = 2 ** int(math.log2(wanted))
    coders, symbols = Coders(data, num_coders), []
    for begin in range(0, size, num_coders):
        active = min(num_coders, size - begin)
        symbols += [coders.take(coder, freqs) for coder in range(active)]
        coders.refill(active)
    coders.finish()
    return symbols


def read_section(data: bytes, size: int, steps: list[int] | None) -> list[int]:
    center, bucket = data[0], data[1]
    freqs = share([mass(0, bucket, abs(i - center % 128), 1) for i in range(96)])
    halves = read_array(data[2:], freqs, size)
    if center < 128:
        return halves
    assert steps is not None
    middle = sorted(steps)[size // 2]
    return [(i - (t - middle) // 2) % 96 for i, t in zip(halves, steps, strict=True)]


def read_matrix(
    data: bytes, shape: list[int], states: int = 1, steps: Lines | None = None
) -> Lines:
    (num_rows, num_columns), (u, v) = shape, [*(steps or []), None, None][:2]
    kind, row_bytes, column_bytes, num_escapes = struct.unpack_from("<BIII", data)
    ends = [13, 13 + row_bytes, 13 + row_bytes + column_bytes]
    rows, columns = read_section(data[13 : ends[1]], num_rows, u), [0] * num_columns
    if column_bytes:
        columns = [i - 48 for i in read_section(data[ends[1] : ends[2]], num_columns, v)]
    escapes = [*struct.unpack_from(f"<{num_escapes}h", data, ends[2])]
    wanted = min(max(num_rows * num_columns // 16, 2048), 16384)
    num_coders = -(-num_rows // max(1, wanted // num_columns))
    coders = Coders(data[ends[2] + 2 * num_escapes :], num_coders)
    d, (h0, h1) = min(states, 2), CHECKS[states]
    out: list[list[int | None]] = [[] for _ in rows]
    for begin in range(0, num_rows, num_coders):
        active = min(num_coders, num_rows - begin)
        state = [0] * active
        for column in columns:
            for coder in range(active):
                bucket = min(max(rows[begin + coder] + column, 0), 95)
                integers, freqs = table(kind % 4, bucket, d, state[coder] % d)
                symbol = coders.take(coder, freqs)
                inside = symbol < len(integers)
                out[begin + coder].append(integers[symbol] if inside else None)
                x = integers[symbol] // 2 % 2 if inside else symbol - len(integers)
                odd = state[coder] % 2
                state[coder] = state[coder] >> 1 ^ odd * (h0 >> 1) ^ x * (h1 >> 1)
            coders.refill(active)
    coders.finish()
    return [[escapes.pop(0) if n is None else n for n in row] for row in out]


def read_integers(data: bytes) -> tuple[dict[str, list[int]], dict[str, Lines], list[int]]:
    """Integers and log steps of every tensor that has some, and the activation scales."""
    bounds = [96]
    for length in struct.unpack_from("<6Q", data, 48):
        bounds.append(bounds[-1] + length)
    sections = [data[a:b] for a, b in pairwise(bounds)]
    raw = lzma.decompress(sections[0], format=lzma.FORMAT_RAW, filters=FILTERS)
    rows = json.loads(raw)["tensors"]
    lengths = {row["name"]: count_steps(row) for row in rows}
    sizes = [n for counts in lengths.values() for n in counts] + [
        sum("activation" in r for r in rows)
    ]
    centers = struct.unpack_from(f"<{len(sizes)}h", sections[3])
    matrix = read_matrix(sections[3][2 * len(sizes) :], [-(-sum(sizes) // 128), 128])
    flat = [n for row in matrix for n in row]
    lines = [[flat.pop(0) + c for _ in range(n)] for n, c in zip(sizes, centers, strict=True)]
    steps = {name: [lines.pop(0) for _ in counts] for name, counts in lengths.items()}
    codes, at = {}, 0
    for row in rows:
        stream = sections[4][at:][: row.get("bytes", 0)]
        at += len(stream)
        if row["scheme"].startswith("grid"):
            states = int(row["scheme"][4:].removesuffix("+columns"))
            counts = steps[row["name"]][: 1 + ("+" in row["scheme"])]
            decoded = read_matrix(stream, row["shape"], states, counts)
            codes[row["name"]] = [n for line in decoded for n in line]
        elif row["scheme"] != "fp16":
            symbols = read_array(stream, row["freqs"], math.prod(row["shape"]))
            codes[row["name"]] = [row["low"] + symbol for symbol in symbols]
    return codes, steps, lines[0]


def count_steps(row: dict) -> list[int]:
    """Lengths of the lines of a tensor."""
    shape, scheme = row["shape"], row["scheme"]
    lengths = [shape[0]] if scheme.startswith("grid") else []
    if scheme.endswith("+log"):
        slab = shape[: int(scheme.split("/")[1][0])] if "/" in scheme else shape[:-1]
        lengths.append(math.prod(slab))
    lengths += [shape[1]] if "+columns" in scheme or "+awq" in scheme else []
    if "correction" in row:
        c = row["correction"]
        lengths.append(-(-shape[0] * c["rank"] // c["left"]["group"]))
        lengths.append(-(-shape[1] * c["rank"] // c["right"]["group"]))
    return lengths
