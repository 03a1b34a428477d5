"""Experiments on a scoring function: documents in, prices out, in the order of their entry.

A trace is such a function. It may learn, mix and read documents side by side; the experiments know
nothing of this. They change the text and compare prices. What they change, and where, is drawn from
the audit's own random numbers, so that a score cannot be made for them. Numbers of checks (A01 ...)
are those of the field guide to valid scores, parameter-golf issue 1017.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from underpar.data.shards import Shard, pick_documents
from underpar.recipe import Recipe

# One entry of prices: document, first target, nats. Target i of a document is its token i + 1.
Commit = tuple[int, int, np.ndarray]
# Scores a shard; returns the prices in the order in which they were entered.
Trace = Callable[[Shard], list[Commit]]

# Nats; packs of different shapes round differently.
TOLERANCE = 1e-4
# In a probe: the most tokens between two updates, documents per lane, and the divisor of the limits
# of short chunks, so that a short document has chunks of all sizes.
CHUNK_TOKENS, LANE_DOCUMENTS, SHORTER = 160, 3, 16
# Chunks over which a rate falls that falls over the whole text.
PROBE_CHUNKS = 12
# A document that is shortened ends so many targets after its last price, at most.
MOST_SPARE = 4


@dataclass(frozen=True)
class Experiment:
    """A scoring function, a text, and the prices that later changes of the text must not touch."""

    trace: Trace
    shard: Shard
    # Tokens that may replace another one: none of them begins a document.
    alphabet: np.ndarray
    rng: np.random.Generator
    # Whether the token after a document's last one, which ends it, is a target too.
    prices_ends: bool = True
    # How many times documents are shortened.
    num_lengths: int = 4

    @cached_property
    def commits(self) -> list[Commit]:
        """The prices of the text as it is."""
        return self.trace(self.shard)

    def later_tokens_matter(self) -> int:
        """A01 a: the number of prices that change when all tokens after them are replaced.

        The first cut is after the first target of all: whatever was learnt before it, in a warm-up
        or from another pass, is learnt from other text then (A18, A28).
        """
        changed = 0
        for cut in [0, *self.cuts(3)]:
            # Targets that are entered together are priced together: cut between them too.
            document, first, nats = self.commits[cut]
            stays = int(self.rng.integers(1, len(nats) + 1)) if cut else 1
            later = [(document, first + stays, nats[stays:]), *self.commits[cut + 1 :]]
            after = self.trace(replaced(self.shard, later, self.alphabet, self.rng))
            changed += self._num_changed(after, cut, stays)
        return changed

    def later_lengths_matter(self) -> int:
        """A01 b and d: the same when documents end earlier after them, as soon as they can, or
        later."""
        changed = 0
        for index, cut in enumerate(self._cuts_within(self.num_lengths)):
            most_spare = 1 if index % 2 else MOST_SPARE
            after = self.trace(shortened(self.shard, self.commits[:cut], most_spare, self.rng))
            # The next entry ends early. Its prices stay, except for the new end of the document.
            stays = len(after[cut][2]) - self.prices_ends if cut < len(after) else 0
            changed += self._num_changed(after, cut, stays)
        for cut in self._cuts_within(self.num_lengths // 2):
            entered = self.commits[:cut]
            after = self.trace(lengthened(self.shard, entered, self.alphabet, self.rng))
            stays = len(self.commits[cut][2]) - self.prices_ends
            changed += self._num_changed(after, cut, stays)
        return changed

    def later_documents_matter(self) -> int:
        """A01 c: the same when documents that have not begun come in another order."""
        changed = 0
        for cut in self.cuts(2):
            begun = {document for document, _, _ in self.commits[:cut]}
            waiting = [d for d in range(self.shard.num_documents) if d not in begun]
            places = np.arange(self.shard.num_documents)
            places[waiting] = self.rng.permutation(waiting)
            after = self.trace(pick_documents(self.shard, places.tolist()))
            changed += self._num_changed(after, cut, 0)
        return changed

    def repetition_differs(self) -> int:
        """A24: the number of prices that differ when the same text is scored once more."""
        return num_different(self.commits, self.trace(self.shard))

    def cuts(self, number: int) -> list[int]:
        """Random entries, one in each of so many equal parts of the score."""
        edges = np.linspace(0, len(self.commits), number + 1).astype(int)
        parts = ((begin, end) for begin, end in pairwise(edges) if begin < end)
        return [int(self.rng.integers(begin, end)) for begin, end in parts]

    def _cuts_within(self, number: int) -> list[int]:
        """Random entries, half of them in documents that have begun, if there are any."""
        begun = [index for index, (_, first, _) in enumerate(self.commits) if first]
        if not begun:
            return self.cuts(number)
        return [*self.cuts(number // 2), *self.rng.choice(begun, number - number // 2).tolist()]

    def _num_changed(self, after: Sequence[Commit], cut: int, stays: int) -> int:
        """Entries that differ before a cut, and in the first few prices of the one at the cut."""
        return num_different(_until(self.commits, cut, stays), _until(after, cut, stays))


def num_different(before: Sequence[Commit], after: Sequence[Commit]) -> int:
    """The number of entries that are missing, of other targets, or have other prices."""
    changed = abs(len(before) - len(after))
    for old, new in zip(before, after, strict=False):
        same = old[:2] == new[:2] and len(old[2]) == len(new[2])
        # Written so that NaN counts as another price.
        changed += not (same and bool((np.abs(old[2] - new[2]) <= TOLERANCE).all()))
    return changed


def _until(commits: Sequence[Commit], cut: int, stays: int) -> list[Commit]:
    begun = [(document, first, nats[:stays]) for document, first, nats in commits[cut : cut + 1]]
    return [*commits[:cut], *begun]


def substitution_sum(
    trace: Trace, shard: Shard, document: int, target: int, tokens: np.ndarray
) -> float:
    """A02: the probabilities of all these tokens at one target, each scored in its turn, summed.

    The scoring function sees each token as the one that is there, so a hint that knows its target,
    a sum that was never normalized, or the better of two predictors shows.
    """
    place = int(shard.starts[document]) + target + 1
    total = 0.0
    for token in tokens:
        changed = np.array(shard.tokens)
        changed[place] = token
        total += float(np.exp(-_price(trace(replace(shard, tokens=changed)), document, target)))
    return total


def _price(commits: Sequence[Commit], document: int, target: int) -> float:
    for owner, first, nats in commits:
        if owner == document and first <= target < first + len(nats):
            return float(nats[target - first])
    return float("nan")


def random_beginnings(
    shard: Shard, num_documents: int, num_tokens: int, rng: np.random.Generator
) -> Shard:
    """The beginnings of random documents, of unequal lengths up to `num_tokens`."""
    num = min(num_documents, shard.num_documents)
    chosen = rng.choice(shard.num_documents, num, replace=False).tolist()
    most = [num_tokens - num_tokens * (i % 4) // 8 for i in range(num)]
    picked = pick_documents(shard, chosen)
    return with_documents(picked, [picked.doc(i)[:length] for i, length in enumerate(most)])


def for_probes(recipe: Recipe, shard: Shard, stride: int = 0) -> Recipe:
    """The recipe for a probe's short text: several updates, several documents per lane, chunks of
    all sizes in a document, and with a `stride` several windows."""
    # Independent of the lengths of documents, because a probe changes them.
    score = replace(recipe.score, adapt_tokens=min(recipe.score.adapt_tokens, CHUNK_TOKENS))
    levers = dict(recipe.levers)
    for name, settings in recipe.levers.items():
        if settings.get("cosine"):
            # A decoder is told the number of chunks, so it stays when lengths change.
            levers[name] = settings | {"cosine": False, "horizon_chunks": PROBE_CHUNKS}
    if (lora := levers.get("lora_ttt")) is not None:
        most = max(2, shard.num_documents // LANE_DOCUMENTS)
        limits = (entry.split(":") for entry in lora["short"])
        short = tuple(f"{max(1, int(limit) // SHORTER)}:{size}" for limit, size in limits)
        side_by_side = {key: min(lora[key], most) for key in ("lanes", "group")}
        levers["lora_ttt"] = {**lora, **side_by_side, "short": short}
    model = recipe.model
    if stride:
        model = replace(model, context=min(model.context, max(stride, CHUNK_TOKENS)))
    return replace(recipe, model=model, score=score, levers=levers)


def replaced(
    shard: Shard, later: Sequence[Commit], alphabet: np.ndarray, rng: np.random.Generator
) -> Shard:
    """The shard with random tokens at the targets of these entries."""
    tokens = np.array(shard.tokens)
    for document, first, nats in later:
        begin = int(shard.starts[document]) + first + 1
        # The end of a document is the next one's BOS, which stays.
        end = min(begin + len(nats), int(shard.starts[document]) + len(shard.doc(document)))
        tokens[begin:end] = rng.choice(alphabet, max(0, end - begin))
    return replace(shard, tokens=tokens)


def shortened(
    shard: Shard, entered: Sequence[Commit], most_spare: int, rng: np.random.Generator
) -> Shard:
    """The shard, with unfinished documents ending a few tokens after the targets entered."""
    priced, documents = _num_priced(shard, entered), []
    for document in range(shard.num_documents):
        tokens = shard.doc(document)
        # Nothing follows the last document: it has one target less than tokens.
        ends = int(document == shard.num_documents - 1)
        if priced[document] < len(tokens) - ends:
            spare = int(rng.integers(1, most_spare + 1))
            tokens = tokens[: int(priced[document]) + 1 + ends + spare]
        documents.append(tokens)
    return with_documents(shard, documents)


def lengthened(
    shard: Shard, entered: Sequence[Commit], alphabet: np.ndarray, rng: np.random.Generator
) -> Shard:
    """The shard, with unfinished documents going on for up to twice their length."""
    priced, documents = _num_priced(shard, entered), []
    for document in range(shard.num_documents):
        tokens = shard.doc(document)
        if priced[document] < len(tokens) - 1:
            more = rng.choice(alphabet, int(rng.integers(1, len(tokens) + 1)))
            tokens = np.append(tokens, more).astype(tokens.dtype)
        documents.append(tokens)
    return with_documents(shard, documents)


def _num_priced(shard: Shard, entered: Sequence[Commit]) -> np.ndarray:
    """The number of targets of each document that have been entered."""
    priced = np.zeros(shard.num_documents, dtype=np.int64)
    for document, _, nats in entered:
        priced[document] += len(nats)
    return priced


def with_documents(shard: Shard, documents: Sequence[np.ndarray]) -> Shard:
    """The shard with these tokens as its documents."""
    lengths = np.array([len(tokens) for tokens in documents])
    starts = np.cumsum(lengths) - lengths
    return replace(shard, tokens=np.concatenate(documents), starts=starts)


def shard_of(documents: Sequence[np.ndarray]) -> Shard:
    """A shard of these documents, their start token first, without a text."""
    num = len(documents)
    lengths = np.array([len(tokens) for tokens in documents], dtype=np.int64)
    return Shard(
        tokens=np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens in documents]),
        starts=np.cumsum(lengths) - lengths,
        doc_bytes=np.zeros(num, dtype=np.int64),
        doc_hashes=np.zeros((num, 32), dtype=np.uint8),
        flags=np.zeros(num, dtype=np.uint8),
    )
