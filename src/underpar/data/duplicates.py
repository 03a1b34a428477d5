"""Find the documents that training and validation share: exact copies, near copies, passages.

Texts are compared by shingles: runs of consecutive lower-cased words (Broder 1997). The shingles of
validation, the small split, are in one sorted table; training documents are looked up in it one by
one. Two documents without a common shingle have similarity 0. So counting common shingles finds
every pair with its exact similarity. MinHash would only estimate the similarity and miss some
pairs; the exact count is cheap here. A shingle is identified by a 64-bit hash. Memory: about 50
bytes per word of validation, plus the results.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from underpar.data.shards import Shard
from underpar.data.workers import map_in_order
from underpar.errors import DataError

NUM_WORST = 50
# Training is searched in parts of about so many tokens: a few seconds each.
PART_TOKENS = 1 << 20

_WORD = re.compile(r"\w+")
# Bounds of the table of known words: a full table is emptied, longer words are not stored.
MAX_KNOWN_WORDS = 1 << 19
_MAX_WORD_CHARACTERS = 64
# Knuth's MMIX multiplier. It is 5 modulo 8, so its powers have the longest period modulo 2^64, and
# the order of the words in a shingle changes the hash.
_MULTIPLIER = np.uint64(6364136223846793005)
# A table of the highest 24 bits of the hashes avoids most binary searches.
_PREFIX_BITS = 24
_PREFIX_SHIFT = np.uint64(64 - _PREFIX_BITS)
_SIDES: tuple[Literal["left"], Literal["right"]] = ("left", "right")

Decode = Callable[[npt.NDArray[Any]], bytes]
# Called with the number of training documents done, and their total.
Progress = Callable[[int, int], None]
Hashes = npt.NDArray[np.uint64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class NearSettings:
    """Thresholds: similarity of a near duplicate, and share of a validation document in training.

    Thirteen words is the length of GPT-3's overlap check (arXiv:2005.14165, appendix C).

    A pair also counts if the training document has `threshold_shared` of the shingles of the
    validation document, however long it is; no pair reaches the default. With `any_order` a shingle
    is a set of neighboring words: a text that is written backwards has the same shingles.
    """

    threshold: float = 0.7
    shingle_words: int = 5
    threshold_containment: float = 0.05
    containment_words: int = 13
    threshold_shared: float = 2.0
    any_order: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise DataError(f"threshold is {self.threshold}, expected above 0 and at most 1")
        if not 0 <= self.threshold_containment < 1:
            raise DataError(
                f"threshold_containment is {self.threshold_containment}, expected at least 0 and "
                "below 1"
            )
        for name in ("shingle_words", "containment_words"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}, expected at least 1")


DEFAULTS = NearSettings()
# A copy shares so many of the sets of three neighboring words with one training document, or of the
# sets of eight with all of them. In two English corpora the most that documents of both splits
# share by chance or by quoting is 0.50 and 0.41 (36 MB of training text).
COPIES = NearSettings(
    threshold=0.7,
    shingle_words=3,
    threshold_shared=0.6,
    threshold_containment=0.5,
    containment_words=8,
    any_order=True,
)


@dataclass(frozen=True)
class Repeats:
    """Exact duplicates inside a split: repeated texts, and copies beyond the first of each."""

    num_repeated: int
    num_extra: int


@dataclass(frozen=True)
class ExactDuplicates:
    """Documents with the same text; `across` holds every (train index, val index) pair."""

    train: Repeats
    val: Repeats
    across: list[tuple[int, int]]


@dataclass(frozen=True)
class NearPair:
    """A training and a validation document that are nearly the same.

    `similarity` is the Jaccard similarity of their sets of shingles. `shared` is the share of the
    shingles of the validation document that the training document has too.
    """

    train: int
    val: int
    similarity: float
    shared: float


@dataclass(frozen=True)
class Overlap:
    """The share of a validation document's shingles that occur anywhere in training.

    `train` is the training document with most of them; of equals, the first.
    """

    val: int
    share: float
    train: int


def exact_duplicates(train: Shard, val: Shard) -> ExactDuplicates:
    """The documents whose source texts have the same SHA-256, inside each split and across."""
    rows = np.concatenate([train.doc_hashes, val.doc_hashes])  # (D, 32)
    _, texts = np.unique(rows.view("V32").ravel(), return_inverse=True)
    train_texts, val_texts = texts[: train.num_documents], texts[train.num_documents :]
    order = np.argsort(val_texts, kind="stable")
    firsts, ends = (np.searchsorted(val_texts[order], train_texts, side) for side in _SIDES)
    train_indices = np.repeat(np.arange(train.num_documents), ends - firsts)
    val_indices = order[_join_ranges(firsts, ends)]
    across = list(zip(train_indices.tolist(), val_indices.tolist(), strict=True))
    return ExactDuplicates(_count_repeats(train_texts), _count_repeats(val_texts), across)


def find_duplicates(
    train: Shard,
    val: Shard,
    decode: Decode,
    settings: NearSettings = DEFAULTS,
    progress: Progress | None = None,
    workers: int = 1,
) -> tuple[list[NearPair], list[Overlap]]:
    """Near pairs (most similar first) and overlaps (largest share first), from one pass.

    Parts of training are searched on so many processes; the result does not depend on their number.

    A pair counts if its similarity is at least `threshold`; exact copies count too. An overlap
    counts if its share is above `threshold_containment`. A document of fewer words than a shingle
    is one shingle; a document without words has none. Passages shorter than a shingle are not
    found, unless both documents consist of nothing else.
    """
    val_words = list(_read_words(val, decode, _WordHashes()))
    overlaps = _Overlaps(len(val_words))
    pairs: list[NearPair] = []
    start = partial(_Search, val_words, decode, settings)
    for (first, part), found in map_in_order(start, train.parts(PART_TOKENS), workers):
        pairs += found.pairs
        overlaps.add(found)
        if progress is not None:
            progress(first + part.num_documents, train.num_documents)
    pairs.sort(key=lambda pair: (-pair.similarity, pair.train, pair.val))
    table = _ShingleTable(val_words, settings.containment_words, settings.any_order)
    return pairs, overlaps.found(table, settings.threshold_containment)


def audit_duplicates(
    train: Shard,
    val: Shard,
    decode: Decode,
    settings: NearSettings = DEFAULTS,
    progress: Progress | None = None,
    workers: int = 1,
) -> dict[str, Any]:
    """Counts and worst cases of all three kinds, ready for JSON; reads the texts once."""
    exact = exact_duplicates(train, val)
    pairs, overlaps = find_duplicates(train, val, decode, settings, progress, workers)

    def name(train_index: int, val_index: int) -> dict[str, Any]:
        return {
            "train": _name_document(train, train_index, decode),
            "val": _name_document(val, val_index, decode),
        }

    return {
        "settings": asdict(settings),
        "exact": {
            "train": asdict(exact.train),
            "val": asdict(exact.val),
            "num_across": len(exact.across),
            "worst": [name(*pair) for pair in exact.across[:NUM_WORST]],
        },
        "near": {
            "num_pairs": len(pairs),
            "num_val_documents": len({pair.val for pair in pairs}),
            "worst": [asdict(pair) | name(pair.train, pair.val) for pair in pairs[:NUM_WORST]],
        },
        "overlap": {
            "num_val_documents": len(overlaps),
            "worst": [asdict(o) | name(o.train, o.val) for o in overlaps[:NUM_WORST]],
        },
    }


def shingle_hashes(words: Hashes, num_words: int, any_order: bool = False) -> Hashes:
    """The distinct shingles of a document, sorted, from the hashes of its words in order."""
    width = min(num_words, len(words))
    if not width:
        return words
    hashes = np.zeros(len(words) - width + 1, dtype=np.uint64)
    for offset in range(width):
        if not any_order:
            hashes *= _MULTIPLIER
        hashes += words[offset : offset + len(hashes)]
    # Sorting in place is several times as fast as np.unique.
    hashes.sort()
    return hashes[np.append(True, hashes[1:] != hashes[:-1])]


class _WordHashes(dict[str, int]):
    """The 64-bit hash of a word, equal on every machine; recent words are cached."""

    def __missing__(self, word: str) -> int:
        digest = hashlib.blake2b(word.encode("utf-8"), digest_size=8).digest()
        value = int.from_bytes(digest, "little")
        if len(word) <= _MAX_WORD_CHARACTERS:
            if len(self) >= MAX_KNOWN_WORDS:
                self.clear()
            self[word] = value
        return value


def _read_text(shard: Shard, index: int, decode: Decode) -> str:
    return decode(shard.doc(index)[1:]).decode("utf-8", "replace")


def _read_words(shard: Shard, decode: Decode, known: _WordHashes) -> Iterator[Hashes]:
    for index in range(shard.num_documents):
        words = _WORD.findall(_read_text(shard, index, decode).lower())
        yield np.fromiter(map(known.__getitem__, words), np.uint64, len(words))


class _ShingleTable:
    """The shingles of many documents, sorted by hash; a row is one shingle of one document."""

    def __init__(self, documents: Sequence[Hashes], num_words: int, any_order: bool) -> None:
        self._num_words, self._any_order = num_words, any_order
        shingles = [self.shingles(words) for words in documents]
        self.sizes = np.array([len(hashes) for hashes in shingles], dtype=np.int64)  # (D,)
        hashes = np.concatenate([np.empty(0, dtype=np.uint64), *shingles])
        order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[order]  # (R,)
        self.owners = np.repeat(np.arange(len(documents)), self.sizes)[order]  # (R,)
        self._has_prefix = np.zeros(1 << _PREFIX_BITS, dtype=bool)
        self._has_prefix[self._hashes >> _PREFIX_SHIFT] = True

    def shingles(self, words: Hashes) -> Hashes:
        """The shingles of a document, made as those of the table."""
        return shingle_hashes(words, self._num_words, self._any_order)

    def find(self, shingles: Hashes) -> Indices:
        """The rows that hold one of these distinct shingles."""
        likely = shingles[self._has_prefix[shingles >> _PREFIX_SHIFT]]
        return _join_ranges(*(np.searchsorted(self._hashes, likely, side) for side in _SIDES))


@dataclass(frozen=True)
class _Found:
    """What one part of training shares with validation, whose documents are D."""

    pairs: list[NearPair]
    rows: Indices  # of the table of overlaps: the shingles that occur in the part
    most_common: Indices  # (D,) the most shingles that one document of the part shares
    most_common_in: Indices  # (D,) the first document that does


class _Search:
    """Compare parts of training with all of validation: near pairs and overlaps.

    Reading takes longer than both searches together, so they share one pass.
    """

    def __init__(self, val_words: Sequence[Hashes], decode: Decode, settings: NearSettings) -> None:
        self._decode, self._settings = decode, settings
        self._known_words = _WordHashes()
        self._near = _ShingleTable(val_words, settings.shingle_words, settings.any_order)
        self._overlap = _ShingleTable(val_words, settings.containment_words, settings.any_order)

    def __call__(self, job: tuple[int, Shard]) -> _Found:
        first, part = job
        num_val = len(self._overlap.sizes)
        most_common, most_common_in = (np.zeros(num_val, dtype=np.int64) for _ in range(2))
        is_seen = np.zeros(len(self._overlap.owners), dtype=bool)  # (R,)
        pairs: list[NearPair] = []
        for index, words in enumerate(_read_words(part, self._decode, self._known_words), first):
            pairs += self._pairs(index, words)
            rows = self._overlap.find(self._overlap.shingles(words))
            is_seen[rows] = True
            owners, num_common = np.unique(self._overlap.owners[rows], return_counts=True)
            is_more = num_common > most_common[owners]
            most_common[owners[is_more]] = num_common[is_more]
            most_common_in[owners[is_more]] = index
        return _Found(pairs, np.flatnonzero(is_seen), most_common, most_common_in)

    def _pairs(self, index: int, words: Hashes) -> list[NearPair]:
        shingles = self._near.shingles(words)
        rows = self._near.find(shingles)
        owners, num_common = np.unique(self._near.owners[rows], return_counts=True)
        shared = num_common / self._near.sizes[owners]
        similarity = num_common / (len(shingles) + self._near.sizes[owners] - num_common)
        is_near = similarity >= self._settings.threshold
        is_near |= shared >= self._settings.threshold_shared
        return [
            NearPair(index, int(owners[i]), float(similarity[i]), float(shared[i]))
            for i in np.flatnonzero(is_near)
        ]


class _Overlaps:
    """The overlaps of validation with all parts of training, which are added in order."""

    def __init__(self, num_val: int) -> None:
        self._rows: list[Indices] = [np.empty(0, dtype=np.int64)]
        self._most_common = np.zeros(num_val, dtype=np.int64)  # (D,)
        self._most_common_in = np.zeros(num_val, dtype=np.int64)  # (D,)

    def add(self, found: _Found) -> None:
        """Add what a part shares."""
        self._rows.append(found.rows)
        is_more = found.most_common > self._most_common
        self._most_common[is_more] = found.most_common[is_more]
        self._most_common_in[is_more] = found.most_common_in[is_more]

    def found(self, table: "_ShingleTable", threshold: float) -> list[Overlap]:
        """The overlaps above a share, worst first."""
        seen = np.unique(np.concatenate(self._rows))
        num_seen = np.bincount(table.owners[seen], minlength=len(self._most_common))
        # A document without words has 0 of 0 shingles: share 0.
        shares = num_seen / np.maximum(table.sizes, 1)
        overlaps = [
            Overlap(int(val), float(shares[val]), int(self._most_common_in[val]))
            for val in np.flatnonzero(shares > threshold)
        ]
        return sorted(overlaps, key=lambda overlap: (-overlap.share, overlap.val))


def _join_ranges(firsts: Indices, ends: Indices) -> Indices:
    lengths = ends - firsts
    # Added to an index of the joined array, the shift gives the value in its range.
    shifts = firsts - (np.cumsum(lengths) - lengths)
    return np.arange(lengths.sum()) + np.repeat(shifts, lengths)


def _count_repeats(texts: Indices) -> Repeats:
    counts = np.bincount(texts)
    repeated = counts[counts > 1]
    return Repeats(len(repeated), int((repeated - 1).sum()))


def _name_document(shard: Shard, index: int, decode: Decode) -> dict[str, Any]:
    return {
        "index": index,
        "sha256": shard.doc_hashes[index].tobytes().hex()[:12],
        "text": _read_text(shard, index, decode)[:80],
    }
