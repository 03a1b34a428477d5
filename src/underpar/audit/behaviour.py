"""Rules on how a model prices: what a price may depend on, and that prices are probabilities.

Each rule runs experiments (probes.py, traces.py, kraft.py) on predictors and scores and judges the
figures. Documents, positions and replacements are random choices of the audit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from underpar.audit import kraft, probes
from underpar.audit.case import Case, Rescore
from underpar.audit.finding import FAIL, Finding, deviates, judge, not_shown
from underpar.audit.order import wrong_events
from underpar.audit.traces import (
    Commit,
    Experiment,
    Trace,
    random_beginnings,
    substitution_sum,
)
from underpar.data.shards import Shard
from underpar.infer.tilt import Mixture
from underpar.score.ledger import Score
from underpar.score.method import PUBLISHED
from underpar.score.tally import num_targets_of
from underpar.seams import BOS_ID

# Largest error in fp32 of a distribution's sum, and in nats of a price in another pack.
TOLERANCE = 1e-4
# Text for probes of methods that learn: beginnings of a few documents; more and longer on a GPU.
PROBE_DOCUMENTS, PROBE_TOKENS = 6, 160
CUDA_PROBE_DOCUMENTS, CUDA_PROBE_TOKENS = 24, 320
# Text for probes of experts: long enough that passages repeat.
HINT_TOKENS = 4096
# Documents whose suffixes are replaced, and random cuts in each; pairs of documents in one pack.
NUM_DOCUMENTS, NUM_CUTS, NUM_PAIRS = 2, 4, 3
# The shortest and the longest prefix after which every token is priced, one text per row.
PREFIXES = ((1, 4), (5, 24))
# The text of sums through a method: documents of one passage twice, over so many tokens.
SUM_TOKENS, SUM_DOCUMENTS, PASSAGE_TOKENS = 12, 6, 24
# Tokens of each random text; the alphabet of the second one.
KRAFT_TOKENS, CUDA_KRAFT_TOKENS, SMALL_ALPHABET = 1024, 8192, 64


def causality(case: Case) -> Finding:
    """R08, R25: no price depends on later tokens or on other documents."""
    predictor, vocab = case.open_predictor(), case.recipe.model.vocab_size
    shard, rng, context = case.data.val, case.rng, case.open_predictor().context
    lengths = np.diff(shard.starts, append=shard.num_tokens)
    # The longest document has all edges of windows; others are drawn.
    drawn = rng.integers(shard.num_documents, size=NUM_DOCUMENTS - 1)
    changed, cuts = 0, {}
    for index in {int(lengths.argmax()), *map(int, drawn)}:
        document = np.array(shard.doc(index))[: 4 * context]
        edges = [1, 2, *(context + d for d in (-1, 0, 1)), len(document) - 1]
        places = {*edges, *map(int, rng.integers(1, max(2, len(document)), NUM_CUTS))}
        cuts[index] = sorted(cut for cut in places if 0 < cut < len(document))
        changed += probes.swap_suffix(predictor, document, cuts[index], vocab, rng)
    leak = 0.0
    for _ in range(NUM_PAIRS):
        first, second = (np.array(shard.doc(i)) for i in rng.integers(shard.num_documents, size=2))
        leak = max(leak, probes.isolation_error(predictor, first[:context], second))
    num_cuts = sum(map(len, cuts.values()))
    return judge(
        "causality",
        changed == 0 and leak <= TOLERANCE,
        f"{changed} prices changed over {num_cuts} swapped suffixes; packed documents differ "
        f"from lone ones by {leak:.1e} nats",
        cuts=cuts,
        changed_prices=changed,
        packing_error_nats=leak,
    )


def normalization(case: Case) -> Finding:
    """R09: the prices of all possible next tokens form one distribution, mixtures included."""
    predictor, vocab, shard = case.open_predictor(), case.recipe.model.vocab_size, case.data.val
    sums, prefixes, errors = [], {}, []
    for shortest, longest in PREFIXES:
        index = int(case.rng.integers(shard.num_documents))
        document = np.array(shard.doc(index))
        prefixes[index] = min(len(document), int(case.rng.integers(shortest, longest + 1)))
        sums += probes.substitution_sums(predictor, document, [prefixes[index]], vocab)
        begin = document[: 4 * predictor.context]
        errors.append(probes.distribution_errors(predictor, begin, vocab))
    mixed = _sums_through_methods(case)
    through = [total for totals in mixed.values() for total in totals]
    # Unlike max, np.max keeps NaN, which then fails.
    error = float(np.abs(np.array([*sums, *through]) - 1).max())
    direct, disagreement = map(float, np.max(errors, axis=0))
    return judge(
        "normalization",
        error <= TOLERANCE and direct <= TOLERANCE and disagreement <= TOLERANCE,
        f"{len(sums)} positions x {vocab} tokens priced one by one, and {len(through)} x "
        f"{SUM_TOKENS} through {', '.join(mixed) or 'no score'}: sums within {error:.1e} of 1; "
        f"whole distributions within {direct:.1e}, prices within {disagreement:.1e} nats of them",
        prefix_tokens=prefixes,
        sums=sums,
        sums_through_methods=mixed,
        direct_error=direct,
        price_error_nats=disagreement,
    )


def _sums_through_methods(case: Case) -> dict[str, list[float]]:
    """A02 through the scoring function of each score, adapters and experts included.

    The model knows a few tokens only, so their probabilities must sum to 1. The text is one passage
    again and again: caches and experts have hints for it.
    """
    rng, sums = case.rng, {}
    few = _draw_alphabet(case.recipe.model.vocab_size, SUM_TOKENS, rng)
    text = kraft.repeating_text(few, PASSAGE_TOKENS, SUM_DOCUMENTS, rng)
    rescore = case.rescore_flat(few)
    for label, score in case.scores.items():
        # Two targets: in the first document, where little is known, and one with a hint.
        first = int(rng.integers(2 * PASSAGE_TOKENS))
        places = [(0, first), _target_with_hint(case.open_mixture(score), text, rng)]
        trace = _tracer(rescore, score)
        sums[label] = [substitution_sum(trace, text, *place, few) for place in places]
    return sums


def _target_with_hint(mixture: Mixture, text: Shard, rng: np.random.Generator) -> tuple[int, int]:
    """A random target, by document and place, for which experts propose a token if there are any.

    It is in the second half of the text and no end of a document.
    """
    targets = np.asarray(text.tokens[1:])
    mixture.open(1, len(targets))
    has_hint = (mixture.propose(0, targets).hints >= 0).any(axis=1)
    is_inside = (targets != BOS_ID) & (np.arange(len(targets)) > len(targets) // 2)
    rows = np.flatnonzero(has_hint & is_inside)
    row = int(rng.choice(rows if len(rows) else np.flatnonzero(is_inside)))
    document = int(np.searchsorted(text.starts, row, side="right")) - 1
    return document, row - int(text.starts[document])


def random_text_saves_nothing(case: Case) -> Finding:
    """K1 to K4 (R08 to R11): by no method of the run random text costs less than its length."""
    if not case.scores:
        return not_shown("random text", "no score file in the run")
    rng, vocab = case.rng, case.recipe.model.vocab_size
    size = CUDA_KRAFT_TOKENS if case.runtime.device.type == "cuda" else KRAFT_TOKENS
    few = np.append(_draw_alphabet(vocab, min(SMALL_ALPHABET, vocab // 2) - 1, rng), BOS_ID)
    whole, small = (kraft.random_text(tokens, size, rng) for tokens in (np.arange(vocab), few))
    # Each with a model that knows the alphabet. A repeated text is cheap the second time, not the
    # first time. The end of its last document is not drawn, so this document does not count.
    texts = {
        "whole vocabulary": (case.rescore_flat(np.arange(vocab)), whole, whole.num_documents),
        "few tokens": (case.rescore_flat(few), kraft.twice(small), small.num_documents - 1),
    }
    sizes = {"whole vocabulary": vocab, "few tokens": len(few)}
    saved = {
        label: {
            name: kraft.saved_bits(_tracer(rescore, score)(text), sizes[name], num_documents)
            for name, (rescore, text, num_documents) in texts.items()
        }
        for label, score in case.scores.items()
    }
    most = max(bits for row in saved.values() for bits in row.values())
    return judge(
        "random text",
        all(bits <= kraft.MOST_SAVED_BITS for row in saved.values() for bits in row.values()),
        f"{size} random tokens of {vocab} and of {len(few)} cost at least their length less "
        f"{max(0.0, most):.0f} bits (allowed: {kraft.MOST_SAVED_BITS:.0f}), by {', '.join(saved)}",
        saved_bits=saved,
        tokens=size,
    )


def _draw_alphabet(vocab_size: int, number: int, rng: np.random.Generator) -> np.ndarray:
    return rng.choice(np.arange(probes.FIRST_TEXT_ID, vocab_size), number, replace=False)


def score_before_update(case: Case) -> Finding:
    """R07, R10, R11: each target is priced once, and nothing learns from it before that."""
    scores = case.scores
    if not scores:
        return not_shown("score before update", "no score file in the run")
    vocab, totals = case.recipe.model.vocab_size, num_targets_of(case.data.val).tolist()
    wrong = {m: wrong_events(score, totals) for m, score in scores.items()}
    changed = {m: experiment_of(case, s).later_tokens_matter() for m, s in scores.items()}
    begin = int(case.rng.integers(max(1, case.data.val.num_tokens - HINT_TOKENS)))
    targets = np.array(case.data.val.tokens[begin + 1 : begin + 1 + HINT_TOKENS], dtype=np.int64)
    hints = {
        m: probes.own_targets_matter(case.open_mixture(score), targets, vocab, case.rng)
        for m, score in scores.items()
    }
    finding = judge(
        "score before update",
        not any((*wrong.values(), *changed.values(), *hints.values())),
        f"{sum(wrong.values())} events out of order; {sum(changed.values())} prices changed when "
        f"tokens that follow them were replaced, {sum(hints.values())} hints when their targets "
        f"were, over {', '.join(scores)}",
        wrong_events=wrong,
        changed_prices=changed,
        changed_hints=hints,
    )
    bad = [m for m in scores if wrong[m] or changed[m] or hints[m]]
    if finding.verdict == FAIL and all(
        not (wrong[m] or hints[m]) and _is_cyclic_alone(case, scores[m]) for m in bad
    ):
        why = f"{', '.join(bad)}: experts follow the file, adapters the lengths of documents"
        return deviates(finding, ("D3",), why)
    return finding


def _is_cyclic_alone(case: Case, score: Score) -> bool:
    """D3: in the published order later tokens matter only through experts, which follow the file.

    The method without its experts must not depend on later tokens.
    """
    if score.order != PUBLISHED or not case.open_mixture(score).experts:
        return False
    levers = [
        name
        for name in score.how["levers"]
        if not case.open_mixture(replace(score, how=score.how | {"levers": [name]})).experts
    ]
    without = replace(score, how=score.how | {"levers": levers})
    return experiment_of(case, without).later_tokens_matter() == 0


def decodable_order(case: Case) -> Finding:
    """R12: no price depends on the length of a document, which a decoder learns at its end."""
    scores = case.scores
    if not scores:
        return not_shown("order", "no score file in the run")
    lengths, others, twice = {}, {}, {}
    for method, score in scores.items():
        experiment = experiment_of(case, score)
        lengths[method] = experiment.later_lengths_matter()
        others[method] = experiment.later_documents_matter()
        twice[method] = experiment.repetition_differs()
    published = [m for m in scores if scores[m].order == PUBLISHED]
    bad = [m for m in scores if lengths[m] or others[m]]
    said = f"; no decoder could follow {', '.join(bad)}" if bad else ""
    finding = judge(
        "order",
        not (bad or published or any(twice.values())),
        f"{sum(lengths.values())} prices changed when documents ended earlier after them, "
        f"{sum(others.values())} when later documents changed places, {sum(twice.values())} when "
        f"nothing did{said}",
        changed_prices=lengths,
        changed_by_places=others,
        changed_by_repetition=twice,
        orders={m: score.order for m, score in scores.items()},
    )
    if published and set(bad) <= set(published) and not any(twice.values()):
        return deviates(finding, ("D1", "D2"), "documents are sorted by length, as in PR 1530")
    return finding


def probe_size(device: torch.device) -> tuple[int, int]:
    """The number of documents in a probe, and the most tokens of each."""
    if device.type == "cuda":
        return CUDA_PROBE_DOCUMENTS, CUDA_PROBE_TOKENS
    return PROBE_DOCUMENTS, PROBE_TOKENS


def experiment_of(case: Case, score: Score) -> Experiment:
    """A score's method, and beginnings of random documents."""
    shard = random_beginnings(case.data.val, *probe_size(case.runtime.device), case.rng)
    alphabet = np.arange(probes.FIRST_TEXT_ID, case.recipe.model.vocab_size)
    return Experiment(_tracer(case.rescore, score), shard, alphabet, case.rng)


def _tracer(rescore: Rescore, score: Score) -> Trace:
    def trace(shard: Shard) -> list[Commit]:
        commits: list[Commit] = []
        rescore(score, shard, lambda *commit: commits.append(commit))
        return commits

    return trace
