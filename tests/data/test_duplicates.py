"""Shared documents: every planted copy is found with its exact share, and nothing else is."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from underpar.data import duplicates
from underpar.data.duplicates import (
    NearPair,
    NearSettings,
    Overlap,
    Repeats,
    audit_duplicates,
    exact_duplicates,
    find_duplicates,
)
from underpar.errors import DataError

BOS = 1


@dataclass
class TextShard:
    """What a shard must offer here, one token a byte."""

    texts: list[str]

    def parts(self, num_tokens: int) -> Iterator[tuple[int, "TextShard"]]:
        """Two documents a part, whatever their length."""
        for first in range(0, len(self.texts), 2):
            yield first, TextShard(self.texts[first : first + 2])

    @property
    def num_documents(self) -> int:
        return len(self.texts)

    @property
    def doc_hashes(self) -> np.ndarray:
        digests = [hashlib.sha256(text.encode()).digest() for text in self.texts]
        return np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 32)

    def doc(self, index: int) -> np.ndarray:
        return np.array([BOS, *(4 + byte for byte in self.texts[index].encode())])


def decode(ids: np.ndarray) -> bytes:
    assert BOS not in ids
    return bytes((ids - 4).tolist())


def near(train: list[str], val: list[str], **changes: Any) -> list[NearPair]:
    return find_duplicates(TextShard(train), TextShard(val), decode, NearSettings(**changes))[0]


def overlaps(train: list[str], val: list[str], **changes: Any) -> list[Overlap]:
    return find_duplicates(TextShard(train), TextShard(val), decode, NearSettings(**changes))[1]


def prose(name: str, num_words: int) -> list[str]:
    """Words that no other name and place has."""
    return [f"{name}{i}" for i in range(num_words)]


def join(words: list[str]) -> str:
    return " ".join(words)


def test_exact_copies_are_counted_inside_and_named_across() -> None:
    copies = exact_duplicates(
        TextShard(["a", "b", "a", "c", "a", "d", "d"]), TextShard(["x", "d", "y", "y", "b", "d"])
    )
    assert copies.train == Repeats(num_repeated=2, num_extra=3)
    assert copies.val == Repeats(num_repeated=2, num_extra=2)
    assert copies.across == [(1, 4), (5, 1), (5, 5), (6, 1), (6, 5)]


def test_all_bytes_of_a_hash_count() -> None:
    rows = np.zeros((33, 32), dtype=np.uint8)
    rows[np.arange(32), np.arange(32)] = 1
    shard = SimpleNamespace(num_documents=33, doc_hashes=rows)
    copies = exact_duplicates(shard, shard)
    assert copies.across == [(i, i) for i in range(33)]
    assert copies.train == copies.val == Repeats(0, 0)


def test_splits_without_documents_share_nothing() -> None:
    for train, val in (([], []), (["a b"], []), ([], ["a b"])):
        assert exact_duplicates(TextShard(train), TextShard(val)).across == []
        assert near(train, val) == []
        assert overlaps(train, val) == []


def test_a_near_copy_is_found_with_its_exact_similarity() -> None:
    words = prose("w", 100)
    changed = words.copy()
    changed[50] = "other"
    # One changed word breaks 5 of the 96 shingles on each side.
    copies = near([join(prose("u", 90)), join(changed)], [join(prose("v", 80)), join(words)])
    assert copies == [NearPair(train=1, val=1, similarity=91 / 101, shared=91 / 96)]


def test_the_threshold_itself_is_near_and_above_it_comes_first() -> None:
    words = prose("w", 14)
    train = [join([*words[:10], *prose("u", 4)]), join(words)]
    # Of 10 shingles 6 are kept and 4 replaced.
    assert near(train, [join(words)], threshold=6 / 14) == [
        NearPair(1, 0, 1.0, 1.0),
        NearPair(0, 0, 6 / 14, 6 / 10),
    ]
    assert near(train, [join(words)], threshold=np.nextafter(6 / 14, 1)) == [
        NearPair(1, 0, 1.0, 1.0)
    ]


def test_case_spaces_and_punctuation_do_not_matter() -> None:
    train = ["It was -- in THE end,\n\ta (very) good day!"]
    assert near(train, ["it was in the end a very good day"]) == [NearPair(0, 0, 1.0, 1.0)]


def test_repeated_shingles_count_once() -> None:
    words = prose("w", 20)
    copies = near([join(words * 3)], [join(words)])
    # The copies add the four shingles over each seam, the same at both.
    assert copies == [NearPair(0, 0, 16 / 20, 1.0)]


def test_a_short_document_is_one_shingle() -> None:
    train = ["Good morning", "good", "good morning to you all", "morning good"]
    assert near(train, ["good morning!"]) == [NearPair(0, 0, 1.0, 1.0)]


@pytest.mark.parametrize("text", ["", " \n ", "... --- !!!", "\u2026\u2014"])
def test_documents_without_words_are_like_nothing(text: str) -> None:
    words = join(prose("w", 30))
    assert near([text, words], [text, words]) == [NearPair(1, 1, 1.0, 1.0)]
    assert overlaps([text, words], [text, words]) == [Overlap(val=1, share=1.0, train=1)]


def test_words_of_any_script_are_compared() -> None:
    greek = "\u039f \u03bb\u03cc\u03b3\u03bf\u03c2 \u03c4\u03bf\u03c5 \u03ba\u03bf\u03c5"
    text = f"{greek} na\u00efve \U0001f600 caf\u00e9"
    assert near([text.upper()], [text], threshold=1.0, shingle_words=3) == [
        NearPair(0, 0, 1.0, 1.0)
    ]
    assert near([text.replace("\u00e9", "e")], [text], threshold=0.5, shingle_words=3) == [
        NearPair(0, 0, 3 / 5, 3 / 4)
    ]


def test_two_workers_find_what_one_finds() -> None:
    words = [join(prose(name, 40)) for name in "abcdefg"]
    train = [*words[:5], join([words[1], words[5]]), words[2][: len(words[2]) // 2], words[0]]
    val = [words[5], words[1], "other words", words[2]]
    alone, together = (
        find_duplicates(TextShard(train), TextShard(val), decode, workers=workers)
        for workers in (1, 2)
    )
    assert alone == together
    assert alone[0] and alone[1]


def test_bytes_that_are_not_text_do_not_stop_the_search() -> None:
    shard = TextShard(["one two three four five six"])
    pairs, _ = find_duplicates(shard, shard, lambda ids: decode(ids) + b"\xff\xfe")
    assert pairs == [NearPair(0, 0, 1.0, 1.0)]


def test_a_document_inside_a_long_one_is_an_overlap_though_not_near() -> None:
    inside = prose("w", 40)
    long = join([*prose("u", 2000), *inside, *prose("v", 2000)])
    assert near([long], [join(inside)]) == []
    assert overlaps([join(prose("x", 99)), long], [join(prose("y", 99)), join(inside)]) == [
        Overlap(val=1, share=1.0, train=1)
    ]


def test_an_overlap_adds_up_over_training_and_names_the_largest_part() -> None:
    words = prose("w", 112)  # 100 shingles
    train = [
        join(words[:22]),  # 10 of them
        join([*words[50:82], "and", *words[50:82]]),  # 20, twice
        join(words[5:25]),  # 8, 5 of which are new no more
        join(words[92:112]),  # 8
        join(words[62:82]),  # none that is new
    ]
    assert overlaps(train, [join(words)]) == [Overlap(val=0, share=0.41, train=1)]


def test_the_worst_overlap_comes_first() -> None:
    words = prose("w", 60)
    copies = overlaps([join(words[:40])], [join(words), join(words[:30]), join(words[20:])])
    assert copies == [Overlap(1, 1.0, 0), Overlap(0, 28 / 48, 0), Overlap(2, 8 / 28, 0)]


def test_the_first_of_equal_parts_is_named() -> None:
    words = prose("w", 40)
    train = [join(words[:20]), join(words[20:]), join(words[10:30])]
    assert overlaps(train, [join(words)])[0].train == 0


def test_an_overlap_of_just_the_threshold_is_allowed() -> None:
    words = prose("w", 112)
    assert overlaps([join(words[:17])], [join(words)], threshold_containment=0.05) == []
    assert overlaps([join(words[:18])], [join(words)], threshold_containment=0.05) == [
        Overlap(val=0, share=0.06, train=0)
    ]


@st.composite
def small_corpora(draw: st.DrawFn) -> tuple[list[list[str]], list[list[str]]]:
    document = st.lists(st.sampled_from("abc"), max_size=12)
    corpus = st.lists(document, max_size=5)
    return draw(corpus), draw(corpus)


def shingle_set(words: list[str], num_words: int) -> set[tuple[str, ...]]:
    width = min(num_words, len(words))
    return {tuple(words[i : i + width]) for i in range(len(words) - width + 1) if width}


@settings(deadline=None, max_examples=200)
@given(corpora=small_corpora(), num_words=st.integers(1, 4), threshold=st.floats(0.1, 1))
def test_counts_are_those_of_plain_sets(
    corpora: tuple[list[list[str]], list[list[str]]], num_words: int, threshold: float
) -> None:
    train, val = ([shingle_set(words, num_words) for words in side] for side in corpora)
    pairs = {
        NearPair(t, v, len(a & b) / len(a | b), len(a & b) / len(b))
        for t, a in enumerate(train)
        for v, b in enumerate(val)
        if a & b and len(a & b) / len(a | b) >= threshold
    }
    shares = {
        Overlap(v, len(b & set().union(*train)) / len(b), most_common(train, b))
        for v, b in enumerate(val)
        if b & set().union(*train)
    }
    texts = [[join(words) for words in side] for side in corpora]
    thresholds = NearSettings(threshold, num_words, 0.0, num_words)
    copies, found_shares = find_duplicates(*map(TextShard, texts), decode, thresholds)
    assert set(copies) == pairs and len(copies) == len(pairs)
    assert set(found_shares) == shares and len(found_shares) == len(shares)


def most_common(train: list[set[tuple[str, ...]]], wanted: set[tuple[str, ...]]) -> int:
    return max(range(len(train)), key=lambda t: (len(train[t] & wanted), -t))


def test_a_full_table_of_words_changes_no_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*prose("w", 30), "x" * 100]
    expected = near([join(words[3:])], [join(words)])
    assert expected == [NearPair(0, 0, 24 / 27, 24 / 27)]
    monkeypatch.setattr(duplicates, "MAX_KNOWN_WORDS", 4)
    assert near([join(words[3:])], [join(words)]) == expected


def test_word_hashes_are_the_same_everywhere() -> None:
    digest = hashlib.blake2b(b"word", digest_size=8).digest()
    assert duplicates._WordHashes()["word"] == int.from_bytes(digest, "little")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"threshold": 0.0}, "threshold is 0.0"),
        ({"threshold": 1.1}, "threshold is 1.1"),
        ({"threshold": float("nan")}, "threshold is nan"),
        ({"threshold_containment": 1.0}, "threshold_containment is 1.0"),
        ({"threshold_containment": -0.1}, "threshold_containment is -0.1"),
        ({"shingle_words": 0}, "shingle_words is 0"),
        ({"containment_words": 0}, "containment_words is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        NearSettings(**changes)


def test_progress_counts_training_documents() -> None:
    calls: list[tuple[int, int]] = []
    train, val = TextShard(["a", "b", "c"]), TextShard(["d"])
    find_duplicates(train, val, decode, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(2, 3), (3, 3)]


def test_the_audit_names_both_documents_and_is_json() -> None:
    long = "Caf\u00e9 " + join(prose("w", 200))
    train = TextShard(["nothing of note", long, join(prose("u", 300)), long])
    val = TextShard([join(prose("x", 50)), long, join(prose("u", 100))])
    audit = audit_duplicates(train, val, decode)
    assert json.loads(json.dumps(audit)) == audit
    assert audit == audit_duplicates(train, val, decode)

    def name(shard: TextShard, index: int) -> dict[str, Any]:
        text = shard.texts[index]
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        return {"index": index, "sha256": sha256[:12], "text": text[:80]}

    pairs = [{"train": name(train, t), "val": name(val, 1)} for t in (1, 3)]
    assert audit["exact"] == {
        "train": {"num_repeated": 1, "num_extra": 1},
        "val": {"num_repeated": 0, "num_extra": 0},
        "num_across": 2,
        "worst": pairs,
    }
    assert audit["near"] == {
        "num_pairs": 2,
        "num_val_documents": 1,
        "worst": [{**pair, "similarity": 1.0, "shared": 1.0} for pair in pairs],
    }
    assert audit["overlap"] == {
        "num_val_documents": 2,
        "worst": [
            {**pairs[0], "share": 1.0},
            {"train": name(train, 2), "val": name(val, 2), "share": 1.0},
        ],
    }


def test_the_audit_lists_the_worst_and_counts_all() -> None:
    text = join(prose("w", 20))
    audit = audit_duplicates(TextShard([text] * 8), TextShard([text] * 60), decode)
    assert audit["exact"]["num_across"] == audit["near"]["num_pairs"] == 480
    assert audit["near"]["num_val_documents"] == audit["overlap"]["num_val_documents"] == 60
    assert [len(audit[kind]["worst"]) for kind in ("exact", "near", "overlap")] == [50, 50, 50]
