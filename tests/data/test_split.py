"""Cuts into words: they join back, they keep keys apart, and they are where they are safe."""

from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trained import any_text, lossless, lossy
from underpar.data.tokens.split import Splitter, splitter_for

SPLITTERS = [Splitter(*flags) for flags in product((False, True), repeat=3)]
PLAIN = Splitter(at_spaces=True, at_lines=True, cleaned=False)
CLEANED = Splitter(at_spaces=True, at_lines=True, cleaned=True)


def words(splitter: Splitter, text: str) -> list[str]:
    return [splitter.word(key) for key in splitter.keys(text)]


@pytest.mark.parametrize("splitter", SPLITTERS, ids=str)
@settings(deadline=None, max_examples=100)
@given(text=st.one_of(any_text, st.text(alphabet="ab \n.\u00a0")))
@example(text="")
@example(text=" ")
@example(text="\n")
@example(text=" \n a  b\n\n c \n")
@example(text="a b\nc. d\n\ne \nf")
def test_words_join_to_the_text(splitter: Splitter, text: str) -> None:
    keys = splitter.keys(text)
    assert "".join(map(splitter.word, keys)) == text
    # The first word of a document is a key of its own, whatever comes later.
    assert [splitter.is_first(key) for key in keys] == [True] + [False] * (len(keys) - 1)


@pytest.mark.parametrize("splitter", SPLITTERS, ids=str)
@settings(deadline=None, max_examples=100)
@given(text=st.one_of(any_text, st.text(alphabet="ab \n.\u00a0")))
def test_cuts_are_only_where_allowed(splitter: Splitter, text: str) -> None:
    for word in words(splitter, text)[1:]:
        assert word[0] == " " if word[0] != "\n" else splitter.at_lines
        assert splitter.at_spaces or word[0] == "\n"


def test_every_space_and_line_is_a_cut() -> None:
    text = " a  b\nc \n\nd"
    assert words(PLAIN, text) == ["", " a", " ", " b", "\nc", " ", "\n", "\nd"]
    at_spaces = Splitter(at_spaces=True, at_lines=False, cleaned=False)
    assert words(at_spaces, text) == ["", " a", " ", " b\nc", " \n\nd"]
    at_lines = Splitter(at_spaces=False, at_lines=True, cleaned=False)
    assert words(at_lines, text) == [" a  b", "\nc ", "\n", "\nd"]
    assert words(Splitter(False, False, False), text) == [text]


def test_cleaned_text_is_cut_between_plain_characters() -> None:
    assert words(CLEANED, "It's a caf\u00e9 (here).\nYes") == [
        "It's",
        " a",
        " caf\u00e9",
        " (here).",
        "\nYes",
    ]
    # A normalizer sees these spaces together with what stands beside them.
    for joined in ("a  b", "a\u00a0 b", "a \u0301b", "a\n\nb", "a \nb", " a", "a ", "a\u200b b"):
        assert words(CLEANED, joined) == [joined]
    without_lines = Splitter(at_spaces=True, at_lines=False, cleaned=True)
    assert words(without_lines, "a b.\nc d") == ["a", " b.\nc", " d"]
    for flags in ((False, True, True), (False, False, True)):
        assert words(Splitter(*flags), "a b\nc") == ["a b\nc"]


@pytest.mark.parametrize(
    ("pieces", "at_spaces", "at_lines"),
    [
        ([b"", b" ", b"\n", b" the", b"\nThe", b"x"], True, True),
        ([b" of the"], False, True),
        ([b"the "], False, True),
        ([b".\n"], True, False),
        ([b"\n\n"], True, False),
        ([b"  ", b"\n "], False, True),
        ([b" \n"], True, False),
    ],
)
def test_pieces_decide(pieces: list[bytes], at_spaces: bool, at_lines: bool) -> None:
    for is_lossless in (False, True):
        expected = Splitter(at_spaces, at_lines, cleaned=not is_lossless)
        assert splitter_for(pieces, is_lossless) == expected


def test_trained_tokenizers_are_cut_finely() -> None:
    assert lossless()._splitter == lossless("caseops_pair")._splitter == PLAIN
    assert lossy()._splitter == CLEANED
    assert lossless("identity", True)._splitter == Splitter(False, True, False)
