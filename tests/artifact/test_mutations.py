"""Damaged and hostile files: refused in one line, or harmless; never a crash, a hang or a lie."""

import copy
import hashlib
import json
import random
import re
import struct
import tracemalloc

import numpy as np
import pytest
from every_scheme import draw_artifact

from damage import HOSTILE, RAW, damage, leaves
from underpar.artifact.format import HEAD, HEAD_BYTES, frame, squeeze, unframe, unsqueeze
from underpar.artifact.pack import NUM_SECTIONS, pack, unpack
from underpar.artifact.table import MAX_HEADER_BYTES
from underpar.artifact.unpack import LazyArtifact
from underpar.errors import UnderparError
from underpar.quant.schemes import dequantize

QUICK_FILES, MANY_FILES = 400, 6000
MOST_BYTES = 64 << 20


def edit_header(raw: bytes, rng: random.Random) -> bytes:
    """The JSON with some values replaced, moved or left out."""
    if rng.random() < 0.2:
        numbers = [*re.finditer(rb"-?\d+", raw)]
        spot = rng.choice(numbers)
        return raw[: spot.start()] + rng.choice(RAW) + raw[spot.end() :]
    header = json.loads(raw)
    for _ in range(rng.choice([1, 1, 2])):
        # Recipes are refused by tests of their own.
        places = leaves(header["tensors"])
        tree, key = rng.choice(places if rng.random() < 0.9 else leaves(header))
        kind = rng.random()
        if kind < 0.5:
            tree[key] = copy.deepcopy(rng.choice(HOSTILE))
        elif kind < 0.7 and isinstance(tree[key], int):
            tree[key] += rng.choice([-1, 1, 2, 256])
        elif kind < 0.85:
            other, there = rng.choice(places)
            tree[key] = copy.deepcopy(other[there])
        elif isinstance(tree, dict):
            del tree[key]
        if not isinstance(header.get("tensors"), list) or not header["tensors"]:
            break
    return json.dumps(header).encode()


def change_lengths(data: bytes, rng: random.Random) -> bytes:
    """The file with other section lengths, and a right checksum."""
    lengths = [*struct.unpack_from(f"<{NUM_SECTIONS}Q", data, HEAD_BYTES)]
    a, b = rng.sample(range(NUM_SECTIONS), 2)
    moved = rng.choice([1, 2, lengths[a], 2**40, 2**64 - 1])
    lengths[a] = (lengths[a] - moved) % 2**64
    lengths[b] = (lengths[b] + moved) % 2**64
    body = struct.pack(f"<{NUM_SECTIONS}Q", *lengths) + data[HEAD_BYTES + 8 * NUM_SECTIONS :]
    return seal(data[: HEAD.size], body)


def seal(head: bytes, body: bytes) -> bytes:
    return head + hashlib.sha256(head + body).digest() + body


def forge(data: bytes, rng: random.Random) -> bytes:
    """A mutated file with a right checksum."""
    sections = unframe(data, NUM_SECTIONS)
    kind = rng.random()
    if kind < 0.1:
        return change_lengths(data, rng)
    if kind < 0.15:
        rng.shuffle(sections)
    elif kind < 0.5:
        raw = unsqueeze(sections[0], MAX_HEADER_BYTES)
        sections[0] = squeeze(edit_header(raw, rng))
    elif kind < 0.6:
        # Damage behind the compressor, which itself would notice most of it.
        which = rng.choice([0, 2])
        sections[which] = squeeze(damage(unsqueeze(sections[which], MAX_HEADER_BYTES), rng))
    else:
        which = rng.choice([0, 1, 2, 3, 3, 4, 4, 4, 5, 5])
        sections[which] = damage(sections[which], rng)
    return frame(sections)


def spoil(data: bytes, rng: random.Random) -> bytes:
    """A mutated file with the checksum of the whole one."""
    if rng.random() < 0.1:
        sections = unframe(data, NUM_SECTIONS)
        rng.shuffle(sections)
        body = frame(sections)[HEAD_BYTES:]
        return data[:HEAD_BYTES] + body
    return damage(data, rng)


def check(data: bytes, tokenizer: bytes | None, may_pass: bool) -> bool:
    """Whether a file passes; it must be refused in one line or hold finite weights."""
    try:
        artifact = unpack(data, tokenizer)
        file = LazyArtifact(data)
    except UnderparError as error:
        assert str(error).isprintable(), repr(error)
        assert 0 < len(str(error)) < 1000
        return False
    assert may_pass
    assert list(artifact.tensors) == list(file.rows)
    for name, tensor in artifact.tensors.items():
        weight = dequantize(tensor)
        assert weight.shape == file.rows[name].shape
        assert np.isfinite(weight).all()
    return True


def run_files(num_files: int, seed: int) -> int:
    """How many of so many mutated files passed; the memory of one in ten is watched."""
    rng = random.Random(seed)
    artifact = draw_artifact()
    whole = [(pack(artifact), None), (pack(artifact, tokenizer_inside=False), artifact.tokenizer)]
    num_passed = 0
    for number in range(num_files):
        data, tokenizer = whole[number % 4 // 2]
        forged = bool(number % 2)
        mutated = forge(data, rng) if forged else spoil(data, rng)
        if mutated == data:
            continue
        if number % 10 == 1:
            tracemalloc.start()
        num_passed += check(mutated, tokenizer, may_pass=forged)
        if tracemalloc.is_tracing():
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
            tracemalloc.stop()
    return num_passed


def test_mutated_files_are_refused_or_harmless() -> None:
    # Some changes make another good file; if all did or none, nothing would be tested.
    assert 0 < run_files(QUICK_FILES, seed=0) < QUICK_FILES // 4


@pytest.mark.slow
def test_thousands_of_mutated_files_are_refused_or_harmless() -> None:
    assert 0 < run_files(MANY_FILES, seed=1) < MANY_FILES // 4
