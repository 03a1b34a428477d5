"""A toy predictor that learns while it scores, and the cheats that the audit must see in it."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from underpar.audit.traces import Commit

VOCAB, START, CHUNK = 32, 0, 8
BOOST = 2.0


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


class Toy:
    """A bigram table, a bias per document, a bias of all text, and hints from trigram counts.

    `cheat` names what is wrong with it, if anything. With `is_uniform` the table knows nothing;
    with `learns` off nothing changes.
    """

    vocab_size = VOCAB

    def __init__(
        self, seed: int, cheat: str = "", is_uniform: bool = False, learns: bool = True
    ) -> None:
        rng = np.random.default_rng(seed)
        self.table = np.zeros((VOCAB, VOCAB)) if is_uniform else rng.normal(0, 1.5, (VOCAB, VOCAB))
        self.cheat = cheat
        self.learns = learns
        self.clock = np.random.default_rng()
        self.reset()

    def reset(self) -> None:
        self.own, self.shared = np.zeros(VOCAB), np.zeros(VOCAB)
        self.counts: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
        self.tops, self.bottoms = np.zeros(16), np.zeros(16)

    def state_hash(self) -> str:
        counts = sorted((context, sorted(c.items())) for context, c in self.counts.items())
        state = (self.own.tobytes(), self.shared.tobytes(), counts, self.tops.tobytes())
        return hashlib.sha256(repr(state).encode()).hexdigest()

    def score(self, documents: Sequence[np.ndarray]) -> Iterator[Commit]:
        self.reset()
        order = list(range(len(documents)))
        if self.cheat == "sorts by length":
            order.sort(key=lambda document: len(documents[document]))
        if self.cheat == "random order":
            self.clock.shuffle(order)
        if self.cheat == "warm-up":
            for document in documents:
                self.learn_all(document)
        if self.cheat == "second epoch":
            for document in order:
                list(self.score_document(document, documents))
        for document in order:
            yield from self.score_document(document, documents)
            if self.learns:
                self.learn_all(documents[document])
                if self.cheat == "learns the next document":
                    self.learn_all(documents[(document + 1) % len(documents)])

    def score_document(self, index: int, documents: Sequence[np.ndarray]) -> Iterator[Commit]:
        document = documents[index]
        self.own = np.zeros(VOCAB)
        size = CHUNK
        if self.cheat == "chunks by length":
            size = 4 if len(document) < 24 else CHUNK
        first = 0
        while first < len(document) - 1:
            targets = document[first + 1 : first + 1 + size]
            before = documents[index - 1][-1] if self.cheat == "smear" and index else START
            inputs = np.concatenate(([before], document))[first : first + size + 1]
            if self.cheat == "learns first":
                self.learn_own(inputs[1:], targets)
            if self.cheat == "counts first":
                self.count(inputs, targets)
            nats = self.price(inputs, targets, len(document) - 1 - first)
            if self.cheat == "twice and dropped" and first == size:
                yield index, first - 1, nats
            else:
                yield index, first, nats
            if self.learns:
                self.learn_own(inputs[1:], targets)
                self.count(inputs, targets)
            first += size

    def price(self, inputs: np.ndarray, targets: np.ndarray, left: int) -> np.ndarray:
        """`inputs` begin with the token before the first one that predicts."""
        n = len(targets)
        last, before = inputs[1 : 1 + n], inputs[:n]
        own = self.own
        if self.cheat == "slot":
            for _ in range(5):
                own = own + self.gradient(own, last, targets)
        logits = self.table[last] + own + self.shared
        if self.cheat == "smear":
            logits = logits + 0.1 * self.table[before]
        if self.cheat == "peeks":
            logits[: n - 1] += 0.1 * self.table[targets[1:]]
        if self.cheat == "knows the end" and left <= n:
            logits[-1, 5] += 1.0
        p = softmax(logits)
        rows = np.arange(n)
        for row in rows:
            counts = self.counts.get((int(before[row]), int(last[row])))
            if not counts:
                continue
            # The smallest of the most frequent tokens.
            hint = min(counts, key=lambda token: (-counts[token], token))
            if self.cheat == "gated hint" and (targets[row] - hint) % 2:
                continue
            p[row, hint] *= np.exp(BOOST)
            if self.cheat != "boost":
                p[row] /= p[row].sum()
        chosen = p[rows, targets]
        if self.cheat == "bucket ratio":
            top = (7 * last + targets) % 16
            chosen = np.minimum(1, (self.tops[top] + 0.5) / (self.bottoms[last % 16] + 1))
        if self.cheat == "better of two":
            pairs = zip(before, last, targets, strict=True)
            tables = [(self.counts.get((int(a), int(b)), Counter()), t) for a, b, t in pairs]
            other = [(c[int(t)] + 0.1) / (c.total() + 0.1 * VOCAB) for c, t in tables]
            chosen = np.maximum(chosen, other)
        nats: np.ndarray = -np.log(chosen)
        return nats

    def gradient(self, own: np.ndarray, last: np.ndarray, targets: np.ndarray) -> np.ndarray:
        n = len(targets)
        expected = softmax(self.table[last[:n]] + own + self.shared).mean(axis=0)
        step: np.ndarray = np.bincount(targets, minlength=VOCAB) / n - expected
        return step

    def learn_own(self, last: np.ndarray, targets: np.ndarray) -> None:
        self.own = self.own + self.gradient(self.own, last, targets)

    def learn_all(self, document: np.ndarray) -> None:
        shares = np.bincount(document[1:], minlength=VOCAB) / len(document)
        self.shared = 0.9 * self.shared + 0.3 * (shares - 1 / VOCAB)

    def count(self, inputs: np.ndarray, targets: np.ndarray) -> None:
        for row, target in enumerate(targets):
            before, last = int(inputs[row]), int(inputs[row + 1])
            self.counts[before, last][int(target)] += 1
            self.tops[(7 * last + int(target)) % 16] += 1
            self.bottoms[last % 16] += 1


def toy_text(seed: int) -> list[np.ndarray]:
    """Twenty documents in which passages come again."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(1, VOCAB, 5) for _ in range(4)]
    return [
        np.concatenate([[START], *(phrases[i] for i in rng.integers(4, size=rng.integers(2, 7)))])
        for _ in range(20)
    ]
