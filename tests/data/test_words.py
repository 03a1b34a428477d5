"""The word table: what it gives is what encoding every word anew would give, in bounded memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.data.tokens import words
from underpar.data.tokens.words import Pieces, WordTable
from underpar.seams import BOS_ID

# Few different words, so that they repeat within and between documents; one has no tokens.
documents_of_words = st.lists(st.lists(st.sampled_from(["", "a", "bc", "def", "!", "g!"])))


class Encoder:
    """Letters as tokens; notes what it was asked and fails when told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.fails = False

    def __call__(self, new: list[str]) -> Pieces:
        if self.fails:
            raise ValueError("no")
        self.asked += new
        letters = "".join(new)
        return Pieces(
            tokens=np.array([ord(c) for c in letters], dtype=np.int32),
            source_bytes=np.array([ord(c) % 7 for c in letters], dtype=np.int32),
            counts=np.array([len(word) for word in new], dtype=np.int64),
            changed=np.array(["!" in word for word in new], dtype=bool),
        )


def encode_plainly(documents: list[list[str]]) -> dict[str, list[int]]:
    texts = ["".join(document) for document in documents]
    return {
        "tokens": [t for text in texts for t in (BOS_ID, *map(ord, text))],
        "source_bytes": [w for text in texts for w in (0, *(ord(c) % 7 for c in text))],
        "counts": [1 + len(text) for text in texts],
        "changed": ["!" in text for text in texts],
    }


def as_lists(pieces: Pieces) -> dict[str, list[int]]:
    return {name: column.tolist() for name, column in vars(pieces).items()}


@settings(deadline=None, max_examples=100)
@given(st.lists(documents_of_words, min_size=1, max_size=4))
def test_words_are_encoded_once_and_looked_up(batches: list[list[list[str]]]) -> None:
    encoder = Encoder()
    table = WordTable(encoder)
    for documents in batches:
        assert as_lists(table.encode(documents)) == encode_plainly(documents)
    seen = [word for documents in batches for document in documents for word in document]
    assert encoder.asked == list(dict.fromkeys(seen))


@pytest.mark.parametrize(
    ("most_words", "most_tokens"), [(1, 1 << 20), (3, 1 << 20), (99, 4), (0, 0)]
)
def test_a_bounded_table_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, most_words: int, most_tokens: int
) -> None:
    monkeypatch.setattr(words, "MAX_WORDS", most_words)
    monkeypatch.setattr(words, "MAX_TOKENS", most_tokens)
    rng = np.random.default_rng(0)
    vocabulary = [chr(97 + i) * (i % 5) for i in range(20)]
    table = WordTable(Encoder())
    for _ in range(60):
        documents = [
            [vocabulary[i] for i in rng.integers(0, 20, rng.integers(0, 6))] for _ in range(3)
        ]
        assert as_lists(table.encode(documents)) == encode_plainly(documents)
        # One batch may pass the bound, the next begins below it.
        assert len(table._numbers) <= max(most_words, 1)
        assert len(table._tokens.values) <= max(most_tokens, 1)


def test_a_failure_leaves_the_table_right() -> None:
    encoder = Encoder()
    table = WordTable(encoder)
    table.encode([["a", "bc"]])
    encoder.fails = True
    # Known words need no encoder.
    assert as_lists(table.encode([["bc"]])) == encode_plainly([["bc"]])
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            table.encode([["a", "new", "bc", "words"]])
    encoder.fails = False
    documents = [["words", "a"], ["new", "bc", "a"], ["other"]]
    assert as_lists(table.encode(documents)) == encode_plainly(documents)


def test_a_failure_while_reading_words_leaves_the_table_right() -> None:
    table = WordTable(Encoder())
    with pytest.raises(TypeError):
        table.encode([["a", ["no word"]]])  # type: ignore[list-item]
    documents = [["bc", "a"], ["a"]]
    assert as_lists(table.encode(documents)) == encode_plainly(documents)


def test_empty_documents_and_none() -> None:
    table = WordTable(Encoder())
    for documents in ([], [[]], [[""]], [[], ["", "a"], [], [""]], [[]] * 50):
        assert as_lists(table.encode(documents)) == encode_plainly(documents)
    pieces = table.encode([[]])
    assert [column.dtype for column in vars(pieces).values()] == [
        np.int32,
        np.int32,
        np.int64,
        np.bool_,
    ]


def test_many_documents() -> None:
    documents = [[f"w{i % 977}", f"x{i}"] for i in range(20_000)]
    assert as_lists(WordTable(Encoder()).encode(documents)) == encode_plainly(documents)


def test_a_giant_text_does_not_keep_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MAX_TOKENS", 5000)
    table = WordTable(Encoder())
    small = [["a", "bc"], ["def"]]
    table.encode(small)
    giant = [["x" * 100_000, "y"]]
    assert as_lists(table.encode(giant)) == encode_plainly(giant)
    assert len(table._tokens._room) <= 2 * words.MAX_TOKENS
    assert as_lists(table.encode(small)) == encode_plainly(small)


def test_what_was_given_does_not_change_later() -> None:
    table = WordTable(Encoder())
    pieces = table.encode([["a", "bc"]])
    before = as_lists(pieces)
    table.encode([["def", "g!"]])
    table._clear()
    table.encode([["xyz"]])
    assert as_lists(pieces) == before
