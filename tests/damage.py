"""Damage to bytes, JSON, TOML and tensors, as accidents and people do it; drawn from a seed."""

import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HOSTILE: list[Any] = [
    -1, 0, 1, 2, 127, 128, 2**14, 2**20, 2**31, 2**63, 10**30, -(2**40), 0.5, 1e300, True, None, "",
    "1", "fp16", "int6", "int8", "grid1", "grid8+columns", "ternary:4", "ternary:3", "line\nbreak",
    "\ud800", [], [1], [[]], [[1, 2], [3]], {}, {"rank": 1}, [6, 8], [8, 6], [48], [2**27, 1],
    [1, 2**27], [16384],
]  # fmt: skip
# What JSON can hold and Python's writer does not.
RAW = [
    b"-0", b"1e999", b"NaN", b"-Infinity", b"9" * 5000, b"[" * 4000 + b"]" * 4000, b'"\\u0000"',
    b"1.0", b"{}", b"null",
]  # fmt: skip
# Text that a terminal or a template could obey, a file of another place, and much of both.
RUDE: list[Any] = [
    "\x1b]0;title\x07\x1b[2J", "[bold red]markup[/]", "<script>", "../../etc/passwd", "/dev/zero",
    "\0", "a" * 200_000, 10**400, -(10**400), float("nan"), float("inf"), {"a": {"b": [{}]}},
]  # fmt: skip
RAW_TOML = [
    b"9" * 5000, b"[" * 5000, b"{a=" * 5000, b"1e999", b"nan", b"1979-05-27", b"'", b'"\\u0000"',
    b"[1, [2]]", b"true", b"-1", b"10000000000000000000000", b"\xff\xfe", b"x.y = 1",
]  # fmt: skip


def flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def replace_bytes(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 2, 5])):
        data[rng.randrange(len(data))] = rng.randrange(256)


def cut(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice([1, 2, 7, len(data)])]


def insert(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice([1, 2, 9, 100]))


DAMAGES: list[Callable[[bytearray, random.Random], None]] = [flip_bits, replace_bytes, cut, insert]


def damage(data: bytes, rng: random.Random) -> bytes:
    """Some bits flipped, or some bytes replaced, cut out or inserted."""
    changed = bytearray(data)
    if changed:
        rng.choice(DAMAGES)(changed, rng)
    return bytes(changed)


def leaves(tree: Any) -> list[tuple[Any, Any]]:
    """Every place of a tree that holds a value, as container and key."""
    keys = [*tree] if isinstance(tree, dict) else [*range(len(tree))]
    below = [
        place for key in keys if isinstance(tree[key], dict | list) for place in leaves(tree[key])
    ]
    return [(tree, key) for key in keys] + below


def edit_tree(tree: Any, rng: random.Random) -> None:
    """One value of a JSON tree replaced, changed a little, moved or left out."""
    places = leaves(tree)
    if not places:
        return
    inner, key = rng.choice(places)
    kind = rng.random()
    if kind < 0.5:
        inner[key] = copy.deepcopy(rng.choice(HOSTILE + RUDE))
    elif kind < 0.7 and isinstance(inner[key], int | float):
        inner[key] += rng.choice([-1, 1, 2, 256])
    elif kind < 0.8:
        other, there = rng.choice(places)
        inner[key] = copy.deepcopy(other[there])
    elif isinstance(inner, dict):
        del inner[key]


def edit_json(raw: bytes, rng: random.Random) -> bytes:
    """JSON with a value or two changed; also values that Python would not write."""
    if rng.random() < 0.2:
        numbers = [*re.finditer(rb"-?\d+", raw)]
        if numbers:
            spot = rng.choice(numbers)
            return raw[: spot.start()] + rng.choice(RAW) + raw[spot.end() :]
    tree = json.loads(raw)
    if rng.random() < 0.05:
        return json.dumps(rng.choice([[tree], [], 3, "text", None])).encode()
    for _ in range(rng.choice([1, 1, 2])):
        edit_tree(tree, rng)
    return json.dumps(tree).encode()


def edit_lines(raw: bytes, rng: random.Random) -> bytes:
    """Lines of JSON with one changed, repeated, moved or very long."""
    lines = raw.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    kind = rng.random()
    if kind < 0.7:
        lines[at] = edit_json(lines[at], rng) + b"\n"
    elif kind < 0.8:
        lines.insert(rng.randrange(len(lines)), lines[at])
    elif kind < 0.9:
        lines[at] = b"[" + b" " * (1 << 21) + b"\n"
    else:
        del lines[at]
    return b"".join(lines)


def edit_toml(raw: bytes, rng: random.Random) -> bytes:
    """TOML with a value or a line changed."""
    lines = raw.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    kind = rng.random()
    if kind < 0.7 and b"=" in lines[at]:
        name = lines[at].split(b"=")[0]
        lines[at] = name + b"= " + rng.choice(RAW_TOML) + b"\n"
    elif kind < 0.8:
        lines.insert(rng.randrange(len(lines)), lines[at])
    elif kind < 0.9:
        lines.insert(at, b".".join([b"a"] * rng.choice([2, 40, 2000])) + b" = 1\n")
    else:
        del lines[at]
    return b"".join(lines)


def edit_tensors(tensors: dict[str, Tensor], rng: random.Random) -> None:
    """One tensor renamed, reshaped, retyped, cut, left out, or with a value that is no number."""
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    kind = rng.randrange(9)
    if kind == 0:
        tensors[rng.choice(["x", name + ".", "\x1b[2J", "a" * 5000])] = tensors.pop(name)
    elif kind == 1:
        del tensors[name]
    elif kind == 2:
        tensors[name] = tensor.flatten()
    elif kind == 3:
        tensors[name] = tensor[None]
    elif kind == 4:
        tensors[name] = tensor.flatten()[: tensor.numel() // 2]
    elif kind == 5:
        types = [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float64]
        tensors[name] = tensor.to(rng.choice([*types, torch.float8_e4m3fn, torch.complex64]))
    elif kind == 6:
        other = tensors[rng.choice(sorted(tensors))]
        tensors[name] = other.clone()
    elif kind == 7:
        changed = tensor.clone().flatten()
        if changed.numel():
            value = rng.choice([float("nan"), float("inf"), -1.0, 3e38])
            most = changed.is_floating_point() or abs(value) < 2
            changed[rng.randrange(changed.numel())] = value if most else 1
        tensors[name] = changed.reshape(tensor.shape)
    else:
        tensors[name] = torch.zeros(0)
