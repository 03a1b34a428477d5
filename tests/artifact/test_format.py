"""The frame: every flipped bit, every cut, every foreign file is refused."""

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.artifact.format import HEAD, HEAD_BYTES, frame, squeeze, unframe, unsqueeze
from underpar.errors import ArtifactError

SECTIONS = [b"header", b"", b"\x00" * 50]


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=5))
def test_sections_come_back(sections: list[bytes]) -> None:
    assert unframe(frame(sections), len(sections)) == sections


@pytest.mark.parametrize("place", range(len(frame(SECTIONS))))
def test_a_flipped_bit_anywhere_is_refused(place: int) -> None:
    data = bytearray(frame(SECTIONS))
    data[place] ^= 1 << (place % 8)
    with pytest.raises(ArtifactError):
        unframe(bytes(data), 3)


@pytest.mark.parametrize("keep", [0, 3, 20, HEAD_BYTES, -1])
def test_a_cut_file_is_refused(keep: int) -> None:
    with pytest.raises(ArtifactError):
        unframe(frame(SECTIONS)[:keep], 3)


def test_messages_say_what_is_wrong() -> None:
    data = frame(SECTIONS)
    for bad, word in (
        (b"PK\x03\x04" + data[4:], "magic"),
        (data[:4] + b"\x09\x00" + data[6:], "version 9"),
        (data + b"x", "cut or grown"),
        (data[:-1] + b"x", "checksum"),
    ):
        with pytest.raises(ArtifactError, match=word):
            unframe(bad, 3)


def test_lengths_are_checked_behind_a_right_checksum() -> None:
    data = frame(SECTIONS)
    body = (10**15).to_bytes(8, "little") + data[HEAD_BYTES + 8 :]
    head = data[: HEAD.size]
    forged = head + hashlib.sha256(head + body).digest() + body
    with pytest.raises(ArtifactError, match="do not fill"):
        unframe(forged, 3)


@settings(deadline=None)
@given(st.binary(max_size=500))
def test_squeezing_is_undone(data: bytes) -> None:
    assert unsqueeze(squeeze(data), len(data)) == data


def test_a_bomb_is_refused_before_it_grows() -> None:
    bomb = squeeze(bytes(50_000_000))
    with pytest.raises(ArtifactError, match="grows past 1000"):
        unsqueeze(bomb, 1000)


@pytest.mark.parametrize(
    "bad", [b"", b"\xff" * 20, squeeze(b"text")[:-2], squeeze(b"text") + b"xx"]
)
def test_a_damaged_section_is_refused(bad: bytes) -> None:
    with pytest.raises(ArtifactError):
        unsqueeze(bad, 100)
