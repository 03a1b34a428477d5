"""The audit of any predictor: a protocol of three members, and the rules that need no run folder.

    from underpar.audit.protocol import check
    for finding in check(mine, documents):
        print(finding.verdict, finding.rule, finding.summary)

`AnyPredictor` is what the field guide (parameter-golf issue 1017) asks of an evaluator, as a
scoring function. The rules see it from outside: they change the text and compare prices and states.
An example with comments is in docs/audit.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from underpar.audit.finding import Finding, judge, not_shown
from underpar.audit.kraft import MOST_SAVED_BITS, saved_bits, twice
from underpar.audit.traces import (
    TOLERANCE,
    Commit,
    Experiment,
    Trace,
    random_beginnings,
    replaced,
    shard_of,
    substitution_sum,
)
from underpar.data.shards import Shard
from underpar.errors import RuleError

# Text of the experiments: beginnings of so many documents, of up to so many tokens.
NUM_DOCUMENTS, NUM_TOKENS = 6, 160
# Targets at which probabilities are summed, and the largest vocabulary that is priced as a whole.
NUM_SUMS, WHOLE_VOCABULARY, NUM_SUBSTITUTES = 6, 256, 64
# Random documents and the tokens of each.
NUM_RANDOM, RANDOM_TOKENS = 32, 64
NUM_CUTS, NUM_PAIRS = 3, 3


class AnyPredictor(Protocol):
    """What the audit must know of a predictor."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens that may follow any other."""

    def score(self, documents: Sequence[npt.NDArray[Any]]) -> Iterable[Commit]:
        """Price every token but the first of each document, starting from the untouched model.

        Yields (document, first, nats) in the order in which prices become final: nats (n,) are
        those of tokens first + 1 to first + n of the document. What is learnt from these tokens is
        learnt after the yield.
        """

    def state_hash(self) -> str:
        """A hash of everything that scoring may change: weights, adapters, tables, random state."""


def check(
    predictor: AnyPredictor,
    documents: Sequence[npt.NDArray[Any]],
    uniform: AnyPredictor | None = None,
    frozen: AnyPredictor | None = None,
    rng: np.random.Generator | None = None,
) -> list[Finding]:
    """The findings of all rules that a scoring function alone can be judged by.

    `documents` are token ids, a start token first. `uniform` is the same machinery over a model
    whose prices are all log(vocab_size): with it random text has the best chance to reveal a cheat.
    `frozen` is the predictor without learning, by which documents are shown to be independent; a
    predictor that never changes its state needs none. `rng` makes a check repeatable.
    """
    if not documents or min(map(len, documents)) < 2:
        raise RuleError("expected documents of a start token and one token more, or longer ones")
    rng = rng or np.random.default_rng()
    untouched = predictor.state_hash()
    text = random_beginnings(shard_of(documents), NUM_DOCUMENTS, NUM_TOKENS, rng)
    vocab = np.arange(predictor.vocab_size)
    alphabet = vocab[vocab != text.tokens[0]]
    experiment = Experiment(
        tracer(predictor), text, alphabet, rng, prices_ends=False, num_lengths=12
    )
    covered = _coverage(experiment)
    if not experiment.commits:
        return [covered]
    states = _states(predictor, text)
    fixed = frozen or (predictor if set(states) == {untouched} else None)
    return [
        covered,
        _determinism(experiment),
        _causality(experiment),
        _order(experiment),
        _normalization(experiment, predictor.vocab_size),
        _score_before_update(experiment, predictor, [untouched, *states]),
        _isolation(experiment, fixed),
        _random_text(uniform or predictor, int(text.tokens[0]), rng),
    ]


def tracer(predictor: AnyPredictor) -> Trace:
    """A predictor as a function of a shard."""

    def trace(shard: Shard) -> list[Commit]:
        entries = predictor.score(_documents(shard))
        return [(int(d), int(f), np.asarray(nats, dtype=np.float64)) for d, f, nats in entries]

    return trace


def _documents(shard: Shard) -> list[npt.NDArray[Any]]:
    return [shard.doc(index) for index in range(shard.num_documents)]


def _coverage(experiment: Experiment) -> Finding:
    """A06, A08: each target is priced once, in the order of its document, by a possible price."""
    lengths = [len(document) - 1 for document in _documents(experiment.shard)]
    done, wrong = [0] * len(lengths), 0
    for document, first, nats in experiment.commits:
        wrong += first != done[document]
        # Written so that NaN is refused.
        wrong += int((~((nats >= -TOLERANCE) & np.isfinite(nats))).sum())
        done[document] += len(nats)
    wrong += sum(a != b for a, b in zip(done, lengths, strict=True))
    return judge(
        "coverage",
        not wrong,
        f"{sum(done)} prices for {sum(lengths)} targets in {len(lengths)} documents, {wrong} of "
        "them missing, doubled, out of order or impossible",
        wrong=wrong,
    )


def _determinism(experiment: Experiment) -> Finding:
    """A24: the same text has the same prices again."""
    changed = experiment.repetition_differs()
    return judge("determinism", not changed, f"{changed} entries differ in a second run")


def _causality(experiment: Experiment) -> Finding:
    """A01 a: no price depends on later tokens."""
    changed = experiment.later_tokens_matter()
    said = f"{changed} entries changed when tokens that follow them were replaced"
    return judge("causality", not changed, said)


def _order(experiment: Experiment) -> Finding:
    """A01 b, c, d: no price depends on lengths or places of later documents."""
    lengths, places = experiment.later_lengths_matter(), experiment.later_documents_matter()
    return judge(
        "order",
        not (lengths or places),
        f"{lengths} entries changed when documents ended earlier after them, {places} when later "
        "documents changed places",
    )


def _normalization(experiment: Experiment, vocab_size: int) -> Finding:
    """A02: the prices of all tokens at random targets are those of one distribution."""
    rng, commits = experiment.rng, experiment.commits
    is_whole = vocab_size <= WHOLE_VOCABULARY
    sums = {}
    for index in experiment.cuts(NUM_SUMS):
        document, first, nats = commits[index]
        target = first + int(rng.integers(len(nats)))
        size = vocab_size if is_whole else NUM_SUBSTITUTES
        tokens = rng.choice(vocab_size, size, replace=False)
        total = substitution_sum(experiment.trace, experiment.shard, document, target, tokens)
        sums[f"{document}:{target}"] = total
    # Some tokens of many: their sum has an upper bound only.
    errors = np.array([abs(s - 1) if is_whole else max(0.0, s - 1) for s in sums.values()])
    return judge(
        "normalization",
        bool((errors <= TOLERANCE).all()),
        f"at {len(sums)} targets the probabilities of {size} of {vocab_size} tokens sum to "
        f"{'1' if is_whole else 'at most 1'}, within {errors.max():.1e}",
        sums=sums,
    )


def _score_before_update(
    experiment: Experiment, predictor: AnyPredictor, states: Sequence[str]
) -> Finding:
    """A05, A18, A28: the state in which a target is priced knows nothing of it, or of later ones.

    `states` are that of the untouched model, and those in which each entry was made.
    """
    wrong = int(states[1] != states[0])
    for cut in [0, *experiment.cuts(NUM_CUTS)]:
        later = experiment.commits[cut:]
        text = replaced(experiment.shard, later, experiment.alphabet, experiment.rng)
        other = _states(predictor, text)
        wrong += other[: cut + 1] != list(states[1 : cut + 2])
    return judge(
        "score before update",
        not wrong,
        f"{len(set(states))} states; {wrong} knew tokens that had not been priced",
        states=len(set(states)),
    )


def _states(predictor: AnyPredictor, shard: Shard) -> list[str]:
    """The hash of the state in which each entry was made."""
    return [predictor.state_hash() for _ in predictor.score(_documents(shard))]


def _isolation(experiment: Experiment, frozen: AnyPredictor | None) -> Finding:
    """A23: without learning, a document costs the same alone and after another one."""
    if frozen is None:
        why = "the predictor learns; give `frozen`, the same without learning"
        return not_shown("isolation", why)
    documents, trace, largest = _documents(experiment.shard), tracer(frozen), 0.0
    for _ in range(NUM_PAIRS):
        first, second = (documents[i] for i in experiment.rng.integers(len(documents), size=2))
        alone, after = trace(shard_of([second])), trace(shard_of([first, second]))
        prices = (
            np.concatenate([nats for document, _, nats in commits if document == wanted])
            for commits, wanted in ((alone, 0), (after, 1))
        )
        largest = float(np.fmax(largest, np.abs(np.subtract(*prices)).max()))
    said = f"prices differ by {largest:.1e} nats after another document"
    return judge("isolation", largest <= TOLERANCE, said, largest_nats=largest)


def _random_text(predictor: AnyPredictor, start: int, rng: np.random.Generator) -> Finding:
    """K1 to K4: random text costs its length."""
    vocab = predictor.vocab_size
    documents = [
        np.append(start, rng.integers(vocab, size=int(rng.integers(1, RANDOM_TOKENS))))
        for _ in range(NUM_RANDOM)
    ]
    # The second time the text is known: only its first time counts.
    commits = tracer(predictor)(twice(shard_of(documents)))
    saved = saved_bits(commits, vocab, NUM_RANDOM)
    return judge(
        "random text",
        saved <= MOST_SAVED_BITS,
        f"{sum(map(len, documents)) - NUM_RANDOM} random tokens cost their length less "
        f"{max(0.0, saved):.0f} bits (allowed: {MOST_SAVED_BITS:.0f})",
        saved_bits=saved,
    )
