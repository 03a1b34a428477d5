"""Packed bytes and the size of the counted script are those that are pinned."""

from packed import packed_sha256
from pinned import differences, read_pinned
from sizes import script_bytes


def test_packed_bytes_are_the_pinned_ones() -> None:
    assert differences(read_pinned()["packed"], packed_sha256()) == []


def test_the_counted_script_has_not_grown() -> None:
    pinned, sizes = read_pinned()["script_bytes"], script_bytes()
    assert sizes.keys() == pinned.keys()
    assert {name: size for name, size in sizes.items() if size > pinned[name]} == {}
