"""The byte ledger of data/ledger.py, against a plain walk over the encoder's own surfaces."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trained import TRANSFORM_NAMES, any_bytes, any_text, lossless, lossy, messy_text, model_of
from underpar.data.tokens.ledger import span_source_bytes, surfaces
from underpar.data.tokens.tokenizer import SentencePieceTokenizer
from underpar.data.transforms import open_transform
from underpar.data.transforms.caseops import ESCAPE, SYMBOLS
from underpar.data.transforms.caseops_pair import SPACE_ALL_CAPS, SPACE_TITLE


def read_varint(message: bytes, at: int) -> tuple[int, int]:
    end = at
    while message[end] >= 0x80:
        end += 1
    digits = [byte & 0x7F for byte in message[at : end + 1]]
    return sum(digit << 7 * i for i, digit in enumerate(digits)), end + 1


def strings_of(message: bytes, wanted: int) -> Iterator[bytes]:
    """The length-delimited fields of one number in a protobuf message."""
    at = 0
    while at < len(message):
        key, at = read_varint(message, at)
        if key & 7 == 2:
            size, at = read_varint(message, at)
            if key >> 3 == wanted:
                yield message[at : at + size]
            at += size
        elif key & 7 == 0:
            _, at = read_varint(message, at)
        else:
            at += 4


def surface_strings(tokenizer: SentencePieceTokenizer, written: str) -> list[str]:
    """What the encoder says each piece stood for, as strings of its own message."""
    proto = model_of(tokenizer).encode(written, out_type="serialized_proto")
    pieces = strings_of(proto, 2)
    return [b"".join(strings_of(piece, 3)).decode() for piece in pieces]


def walk_plainly(strings: list[str], symbols: str) -> list[int]:
    """Weights of pieces: one state for all, one code point at a time (the published sidecar)."""
    source_bytes = []
    is_literal = False
    for surface in strings:
        num_bytes = 0
        for char in surface:
            if is_literal or char not in symbols:
                num_bytes += len(char.encode())
                is_literal = False
            elif char in SPACE_TITLE + SPACE_ALL_CAPS:
                num_bytes += 1
            else:
                is_literal = char == ESCAPE
        source_bytes.append(num_bytes)
    return source_bytes


def reference(tokenizer: SentencePieceTokenizer, text: str) -> list[int]:
    surfaces = surface_strings(tokenizer, tokenizer.transform.forward(text))
    return walk_plainly(surfaces, tokenizer.transform.symbols)


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
@settings(deadline=None, max_examples=150)
@given(text=messy_text)
@example(text=" ")
@example(text="\u2581")
@example(text="a\u2581b c")
@example(text="\ue001\u0301 \ue004\ue004A")
@example(text="\ufb01 \u00bd cup\n\n \u00a0The\t\x01x")
def test_a_lossy_model_has_the_published_source_bytes(name: str, text: str) -> None:
    tokenizer = lossy(name)
    pieces = tokenizer.encode_texts([text])
    ids = model_of(tokenizer).encode(tokenizer.transform.forward(text))
    assert pieces.tokens.tolist() == [1, *ids]
    assert pieces.source_bytes.tolist() == [0, *reference(tokenizer, text)]


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(messy_text, max_size=5))
@example(texts=[" a ", "b"])
@example(texts=["b", " ", "", "a "])
def test_a_dummy_prefix_is_nobodys_byte(texts: list[str]) -> None:
    tokenizer = lossy(add_dummy_prefix=True)
    pieces = tokenizer.encode_texts(texts)
    encoded = [model_of(tokenizer).encode(text) for text in texts]
    assert pieces.tokens.tolist() == [id_ for ids in encoded for id_ in (1, *ids)]
    firsts = np.cumsum(pieces.counts) - pieces.counts
    per_text = np.split(pieces.source_bytes, firsts[1:]) if texts else []
    for text, ids, sizes, changed in zip(texts, encoded, per_text, pieces.changed, strict=True):
        assert changed == (tokenizer.decode(ids) != text.encode())
        # Where the prefix stands for a space that was there, the space has its byte.
        if not text.startswith(" "):
            assert sizes.tolist() == [0, *reference(tokenizer, text)]
        counted, num_bytes = sizes.sum(), len(text.encode())
        assert counted <= num_bytes if changed else counted == num_bytes


@pytest.mark.parametrize("name", ["identity", "caseops"])
@settings(deadline=None, max_examples=150)
@given(text=messy_text)
def test_only_the_edges_of_a_text_lose_bytes(name: str, text: str) -> None:
    tokenizer = lossy(name)
    model = model_of(tokenizer)

    def gives_nothing(char: str) -> bool:
        return not model.encode(tokenizer.transform.forward(char))

    def is_deleted(char: str) -> bool:
        return gives_nothing(char) and bool(model.encode(f"a{char}b") == model.encode("ab"))

    begin, end = 0, len(text)
    while begin < end and gives_nothing(text[begin]):
        begin += 1
    while end > begin and gives_nothing(text[end - 1]):
        end -= 1
    # The library leaves a deleted character with the piece before it, unless a space comes between.
    while begin < end < len(text) and is_deleted(text[end]):
        end += 1
    kept = text[begin:end]
    assert tokenizer.encode_texts([text]).source_bytes.sum() == len(kept.encode())


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
@settings(deadline=None, max_examples=60)
@given(text=any_text.map(lambda text: text.replace("\u2581", "")))
def test_a_lossless_model_has_the_published_source_bytes(name: str, text: str) -> None:
    tokenizer = lossless(name)
    source_bytes = tokenizer.encode_texts([text]).source_bytes[1:].tolist()
    assert source_bytes == reference(tokenizer, text)
    assert sum(source_bytes) == len(text.encode())


@pytest.mark.parametrize(
    ("text", "source_bytes"),
    [
        # The last byte token of a character has all its bytes.
        ("\u4e00", [0, 0, 0, 3]),
        ("\U0001f600", [0, 0, 0, 0, 4]),
        # Its space mark is text like any other, so here it is bytes.
        ("\u2581", [0, 0, 0, 3]),
        # An escape is nothing, what it escapes is itself.
        ("\ue001", [0, 0, 3]),
        ("A", [0, 0, 1]),
    ],
)
def test_who_gets_the_bytes(text: str, source_bytes: list[int]) -> None:
    assert lossless("caseops").encode_texts([text]).source_bytes.tolist() == source_bytes


@pytest.mark.parametrize(
    ("text", "source_bytes"),
    [
        # Several characters become one space: the piece that begins with it has them.
        ("a\n\n b", [0, 1, 4]),
        # One character becomes several pieces: the last has it.
        ("\u00bd", [0, 0, 0, 0, 0, 2]),
        # A deleted character belongs to the piece before it, spaces at the edges to nobody.
        ("a\x01 b", [0, 2, 2]),
        (" \n\x01a \x01 ", [0, 1]),
    ],
)
def test_who_gets_the_bytes_of_a_lossy_model(text: str, source_bytes: list[int]) -> None:
    assert lossy("caseops").encode_texts([text]).source_bytes.tolist() == source_bytes


@pytest.mark.parametrize("name", TRANSFORM_NAMES)
@settings(deadline=None, max_examples=80)
@given(data=any_bytes, cuts=st.lists(st.integers(0, 200)))
def test_a_code_point_is_paid_where_it_ends(name: str, data: bytes, cuts: list[int]) -> None:
    transform = open_transform(name)
    written = transform.forward(data.decode("utf-8", "surrogateescape"))
    size = len(written.encode("utf-8", "surrogateescape"))
    bounds = np.unique([0, size, *(cut for cut in cuts if cut < size)])
    spans = span_source_bytes(written, bounds[:-1], bounds[1:], transform)
    expected = np.zeros(len(bounds) - 1, dtype=np.int64)
    at = 0
    for char, num_bytes in zip(written, transform.source_bytes(written), strict=True):
        at += len(char.encode("utf-8", "surrogateescape"))
        expected[np.searchsorted(bounds, at) - 1] += num_bytes
    assert spans.tolist() == expected.tolist()
    assert spans.sum() == len(data)


def test_spans_outside_and_none() -> None:
    identity = open_transform("identity")
    none = np.zeros(0, dtype=np.int64)
    assert span_source_bytes("", none, none, identity).tolist() == []
    spans = np.array([0, 1, 3, 3]), np.array([1, 3, 3, 4])
    assert span_source_bytes("a\u00e9b", *spans, identity).tolist() == [1, 2, 0, 1]


@settings(deadline=None, max_examples=60)
@given(text=any_text)
def test_surfaces_are_spans_of_the_input(text: str) -> None:
    model = model_of(lossless())
    ids, begins, ends = surfaces(model.encode(text, out_type="serialized_proto"))
    assert ids == model.encode(text)
    raw = text.encode()
    spans = [raw[begin:end].decode() for begin, end in zip(begins, ends, strict=True)]
    assert spans == surface_strings(lossless(), text)
    assert "".join(spans) == text


def test_surfaces_of_a_long_text() -> None:
    # Offsets of three varint bytes.
    text = "word " * 9000
    ids, begins, ends = surfaces(model_of(lossless()).encode(text, out_type="serialized_proto"))
    assert (begins[0], ends[-1]) == (0, len(text))
    assert begins[1:] == ends[:-1] and len(ids) == len(begins)


def test_surfaces_reads_what_is_left_out_as_zero() -> None:
    piece = bytes([0x0A, 1, 97, 0x10, 0xAC, 0x02, 0x28, 5])
    score = bytes([0x1D, 0, 0, 0x80, 0x3F])
    proto = bytes([0x0A, 1, 97, 0x12, len(piece)]) + piece + score + bytes([0x12, 0])
    assert surfaces(proto) == ([300, 0], [0, 0], [5, 0])
    assert surfaces(b"") == ([], [], [])


def test_symbols_are_those_of_the_published_grammar() -> None:
    assert [hex(ord(symbol)) for symbol in SYMBOLS] == ["0xe001", "0xe002", "0xe003", "0xe004"]
