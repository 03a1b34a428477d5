"""Damaged, joined, foreign and hostile files: a CodecError, soon, and without much memory.

Half of the cases have right checksums, which only a person makes. Each is decoded to the end or
refused; nothing but the original text may come out.
"""

import dataclasses
import hashlib
import random
import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from damage import damage
from tiny_codec import POEM, Unigram, tiny_codec
from underpar.codec.frame import Frame, read_frame
from underpar.codec.stream import Codec
from underpar.data.tokens.byte260 import ByteTokenizer
from underpar.errors import CodecError

QUICK_CASES, MANY_CASES = 2_000, 20_000
# One case in so many is of an adapted file, which takes a hundred times as long.
ADAPTED_EVERY = 50
MOST_SECONDS, MOST_BYTES = 60, 1 << 26
SHORT = b"the cat|the dog|a log"
IDENTITY = hashlib.sha256(b"").hexdigest()

Original = tuple[Codec, bytes, bytes]


@cache
def plain_codec() -> Codec:
    """Letters by their frequencies: a step takes no time."""
    predictor: Any = Unigram(ByteTokenizer(), POEM)
    return Codec(predictor, ByteTokenizer(), IDENTITY)


@cache
def plain_files() -> list[Original]:
    codec, noise = plain_codec(), bytes(range(256))
    ways: list[dict[str, Any]] = [{}, {"separator": b"|"}, {"separator": b"|", "indexed": True}]
    files = [(codec, POEM * 3, codec.compress(POEM * 3, **way)) for way in ways]
    return [*files, (codec, noise, codec.compress(noise))]


@cache
def adapted_files() -> list[Original]:
    codec = tiny_codec()
    ways: list[dict[str, Any]] = [{}, {"separator": b"|"}]
    return [(codec, SHORT, codec.compress(SHORT, adapt=True, **way)) for way in ways]


def damaged(file: bytes, other: bytes, rng: random.Random) -> bytes:
    """The file cut, changed in some bits or bytes, repeated, or followed by another one."""
    kind = rng.randrange(6)
    if kind == 0:
        return file[: rng.randrange(len(file))]
    if kind == 1:
        return file + rng.choice([file, other, other[: rng.randrange(len(other))], b"\0"])
    if kind == 2:
        begin, end = sorted(rng.randrange(len(file)) for _ in range(2))
        return file[:begin] + file[end:]
    return damage(file, rng)


FIELDS = {"num_lanes": 16, "num_documents": 32, "num_bytes": 64}


def forged(file: bytes, other: bytes, rng: random.Random) -> bytes:
    """The file with another field, payload or index, and right checksums."""
    frame, donor = read_frame(file), read_frame(other)
    header = frame.header
    kind = rng.randrange(8)
    if kind == 0:
        name, bits = rng.choice(list(FIELDS.items()))
        now = getattr(header, name)
        values = [0, 1, 2, now - 1, now + 1, 2 * now, 64, 65, 2**16 - 1, 2**20, 2**63, 2**64 - 1]
        value = max(0, min(rng.choice(values), 2**bits - 1))
        frame = dataclasses.replace(frame, header=dataclasses.replace(header, **{name: value}))
    elif kind == 1:
        frame = dataclasses.replace(
            frame, header=dataclasses.replace(header, mode=rng.choice([0, 1, 2, 3, 4, 255]))
        )
    elif kind == 2:
        changes: dict[str, Any] = rng.choice(
            [
                {"machine": "torch \x1b[2J 9.9"},
                {"note": "f" * 16},
                {"separator": rng.choice([b"", b"c", b"||", bytes(255)])},
                {"artifact": bytes(8)},
                {"checksum": bytes(8)},
            ]
        )
        frame = dataclasses.replace(frame, header=dataclasses.replace(header, **changes))
    elif kind == 3:
        payload = rng.choice([donor.payload, frame.payload + donor.payload, b"", bytes(9)])
        frame = dataclasses.replace(frame, payload=payload)
    elif kind == 4:
        index = rng.choice([donor.index, b"", bytes(4), frame.index + bytes(4)])
        index = damage(frame.index, rng) if frame.index and rng.random() < 0.5 else index
        frame = dataclasses.replace(frame, index=index)
    else:
        frame = dataclasses.replace(frame, payload=damage(frame.payload, rng))
    return frame.to_bytes()


@contextmanager
def limited(case: str) -> Iterator[None]:
    """Inside, a hang or much memory is an error."""

    def ring(number: int, frame: object) -> None:
        raise AssertionError(f"{case} takes more than {MOST_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(MOST_SECONDS)
    tracemalloc.reset_peak()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, f"{case} takes much memory"


def try_cases(numbers: range) -> int:
    """Decode one damaged file per number; returns how many were refused."""
    num_refused = 0
    kinds = [adapted_files(), plain_files()]
    tracemalloc.start()
    try:
        for number in numbers:
            rng = random.Random(number)
            files = kinds[number % ADAPTED_EVERY > 0]
            codec, text, file = rng.choice(files)
            other = rng.choice(files)[2]
            # Odd numbers have right checksums.
            bad = (forged if number % 2 else damaged)(file, other, rng)
            if number % ADAPTED_EVERY == 0 and number % (2 * ADAPTED_EVERY):
                bad = forged(file, other, rng)
            with limited(f"case {number}"):
                try:
                    back = codec.decompress(bad)
                except CodecError as error:
                    assert "\n" not in str(error) and str(error).isprintable()
                    num_refused += 1
                else:
                    # A change of a byte to itself, or of nothing that matters.
                    assert back == text, f"case {number} gives another text"
    finally:
        tracemalloc.stop()
    return num_refused


def test_damaged_files_are_refused() -> None:
    assert try_cases(range(QUICK_CASES)) > 0.85 * QUICK_CASES


@pytest.mark.slow
def test_many_damaged_files_are_refused() -> None:
    numbers = range(QUICK_CASES, QUICK_CASES + MANY_CASES)
    assert try_cases(numbers) > 0.85 * MANY_CASES


def test_a_file_of_another_artifact_is_refused() -> None:
    for codec, _, file in [*plain_files()[:3], *adapted_files()]:
        other = dataclasses.replace(codec, identity=hashlib.sha256(b"other").hexdigest())
        with pytest.raises(CodecError, match="artifact it was made with"):
            other.decompress(file)


def lying(file: bytes, **changes: Any) -> bytes:
    """The file with another header, and right checksums."""
    frame = read_frame(file)
    return Frame(dataclasses.replace(frame.header, **changes), frame.payload).to_bytes()


def test_a_bomb_is_refused_by_its_length_and_while_it_grows() -> None:
    codec, text, file = plain_files()[0]
    predictor: Any = codec.predictor
    for length in (1 << 22, 1 << 40, (1 << 64) - 1):
        with pytest.raises(CodecError, match="makes no sense"):
            codec.decompress(lying(file, num_bytes=length))
    before = predictor.num_steps
    # The largest length that is believed: decoding ends where the payload does.
    with pytest.raises(CodecError):
        codec.decompress(lying(file, num_bytes=1 << 20))
    assert predictor.num_steps - before < 2 * len(text)
    # A text that turns out longer than it claims: decoding ends where the claim does.
    before = predictor.num_steps
    with pytest.raises(CodecError, match="more text than its header"):
        codec.decompress(lying(file, num_bytes=8))
    assert predictor.num_steps - before < 60
