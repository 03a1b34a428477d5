"""Documents to leave out, so that neither training nor other held-out text repeats held-out text.

`underpar audit` fails a run whose held-out documents are copies, also in another order of words or
in pieces. Ordinary folders hold such copies: versions of a file, and manuals with common parts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from underpar.data.duplicates import COPIES, NearSettings, exact_duplicates, find_duplicates
from underpar.data.folder import DataFolder
from underpar.data.shards import Shard, pick_documents

# Called with the number of training documents searched.
Report = Callable[[int], None]


def repeated_documents(data: DataFolder) -> set[int]:
    """Held-out documents that nearly repeat an earlier one that stays."""
    pairs, _ = find_duplicates(data.val, data.val, data.tokenizer.decode, COPIES)
    repeated: set[int] = set()
    for pair in sorted(pairs, key=lambda pair: (pair.val, pair.train)):
        if pair.train < pair.val and pair.train not in repeated:
            repeated.add(pair.val)
    return repeated


def find_copies(data: DataFolder, workers: int) -> tuple[set[int], set[int]]:
    """Held-out documents that training repeats, and the training documents that do so most."""
    decode = data.tokenizer.decode
    pairs, pieces = find_duplicates(data.train, data.val, decode, COPIES, workers=workers)
    copied = {pair.val for pair in pairs} | {overlap.val for overlap in pieces}
    return copied, {pair.train for pair in pairs} | {overlap.train for overlap in pieces}


@dataclass(frozen=True)
class Drops:
    """Hashes of documents to leave out; copies of a held-out text are left out by their place."""

    training: frozenset[bytes]
    held_out: frozenset[bytes]
    has_repeats: bool

    def __bool__(self) -> bool:
        return bool(self.training or self.held_out or self.has_repeats)


def find_drops(data: DataFolder, similarity: float, workers: int, report: Report) -> Drops:
    """The documents to leave out.

    Of training: what equals a held-out document, shares `similarity` of its runs of five words or
    of its sets of three neighbors, or adds most to held-out text that training has in pieces. Of
    the held-out documents: what nearly repeats an earlier one.
    """
    decode = data.tokenizer.decode
    repeated = repeated_documents(data)
    val = _without(data.val, repeated)
    first = set(_hashes(val, range(val.num_documents)))
    held_out = set(_hashes(data.val, repeated)) - first
    train, training = data.train, set[bytes]()
    copies = {index for index, _ in exact_duplicates(train, val).across}
    settings = (NearSettings(threshold=similarity), replace(COPIES, threshold=similarity))
    while True:
        for near in settings:
            pairs, pieces = find_duplicates(
                train, val, decode, near, lambda done, total: report(done), workers
            )
            copies |= {pair.train for pair in pairs}
            # Passages count by the audit's measure only: others are listed, and stay.
            copies |= {overlap.train for overlap in pieces if near.any_order}
        if not copies:
            return Drops(frozenset(training), frozenset(held_out), bool(repeated))
        training.update(_hashes(train, copies))
        train, copies = _without(train, copies), set()


def _hashes(shard: Shard, indices: Iterable[int]) -> list[bytes]:
    return [shard.doc_hashes[index].tobytes() for index in indices]


def _without(shard: Shard, left_out: set[int]) -> Shard:
    kept = np.setdiff1d(np.arange(shard.num_documents), sorted(left_out))
    return pick_documents(shard, kept.tolist())
