"""Rules on how a model prices: what a price may depend on, and that prices are probabilities.

Each rule runs experiments (probes.py, order.py) on predictors and scores and judges the figures.
"""

from __future__ import annotations

import numpy as np
import torch

from underpar.audit import order, probes
from underpar.audit.case import Case
from underpar.audit.finding import Finding, judge, not_shown
from underpar.data.shards import Shard
from underpar.score.ledger import Score
from underpar.score.method import STREAM
from underpar.score.tally import num_targets_of

# Largest error in fp32 of a distribution's sum, and in nats of a price in another pack.
TOLERANCE = 1e-4
# Text for probes of methods that learn: beginnings of a few documents; more and longer on a GPU.
PROBE_DOCUMENTS, PROBE_TOKENS = 6, 160
CUDA_PROBE_DOCUMENTS, CUDA_PROBE_TOKENS = 24, 320
# Text for probes of experts: long enough that passages repeat.
HINT_TOKENS = 4096


def causality(case: Case) -> Finding:
    """R08: no price depends on later tokens or on other documents."""
    predictor, vocab = case.open_predictor(), case.recipe.model.vocab_size
    shard = case.data.val
    lengths = np.diff(shard.starts, append=shard.num_tokens)
    longest = np.array(shard.doc(int(lengths.argmax())))[: 4 * predictor.context]
    edges = [predictor.context + d for d in (-1, 0, 1)]
    cuts = [c for c in (1, 2, len(longest) // 2, *edges, len(longest) - 1) if 0 < c < len(longest)]
    changed = probes.swap_suffix(predictor, longest, cuts, vocab)
    leak = (
        max(
            probes.isolation_error(predictor, np.array(shard.doc(i)), np.array(shard.doc(i + 1)))
            for i in range(min(3, shard.num_documents - 1))
        )
        if shard.num_documents > 1
        else 0.0
    )
    return judge(
        "causality",
        changed == 0 and leak <= TOLERANCE,
        f"{changed} prices changed over {len(cuts)} swapped suffixes; packed documents differ "
        f"from lone ones by {leak:.1e} nats",
        cuts=cuts,
        changed_prices=changed,
        packing_error_nats=leak,
    )


def normalization(case: Case) -> Finding:
    """R09: the prices of all possible next tokens form one distribution."""
    predictor, vocab = case.open_predictor(), case.recipe.model.vocab_size
    document = np.array(case.data.val.doc(0))
    lengths = sorted({1, 2, min(len(document), 8), min(len(document), 32)})
    sums = probes.substitution_sums(predictor, document, lengths, vocab)
    error = max(abs(s - 1) for s in sums)
    direct, disagreement = probes.distribution_errors(predictor, document[: 4 * predictor.context])
    return judge(
        "normalization",
        max(error, direct, disagreement) <= TOLERANCE,
        f"{len(sums)} positions x {vocab} tokens priced one by one: sums within {error:.1e} of 1; "
        f"whole distributions within {direct:.1e}, prices within {disagreement:.1e} nats of them",
        prefix_tokens=lengths,
        sums=sums,
        direct_error=direct,
        price_error_nats=disagreement,
    )


def score_before_update(case: Case) -> Finding:
    """R07, R10, R11: each target is priced once, and nothing learns from it before that."""
    scores = learning_scores(case)
    if not scores:
        return not_shown("score before update", "no adapted or mixed score in the run")
    shard, vocab = _probe_shard(case), case.recipe.model.vocab_size
    totals = num_targets_of(case.data.val).tolist()
    wrong = {m: order.wrong_events(score, totals) for m, score in scores.items()}
    changed = {
        m: order.later_tokens_matter(_tracer(case, score), shard, vocab)
        for m, score in scores.items()
    }
    targets = np.array(case.data.val.tokens[1 : 1 + HINT_TOKENS], dtype=np.int64)
    hints = {
        m: order.own_targets_matter(case.open_mixture(score), targets, vocab)
        for m, score in scores.items()
    }
    return judge(
        "score before update",
        not any((*wrong.values(), *changed.values(), *hints.values())),
        f"{sum(wrong.values())} events out of order; {sum(changed.values())} prices changed when "
        f"tokens that follow them were replaced, {sum(hints.values())} hints when their targets "
        f"were, over {', '.join(scores)}",
        wrong_events=wrong,
        changed_prices=changed,
        changed_hints=hints,
    )


def decodable_order(case: Case) -> Finding:
    """R12: no price depends on the length of a document, which a decoder learns at its end."""
    scores = learning_scores(case)
    if not scores:
        return not_shown("order", "no adapted or mixed score in the run")
    shard = _probe_shard(case)
    changed = {
        m: order.later_lengths_matter(_tracer(case, score), shard) for m, score in scores.items()
    }
    bad = [m for m in scores if changed[m] or scores[m].order != STREAM]
    said = f"; no decoder could follow {', '.join(bad)}" if bad else ""
    return judge(
        "order",
        not bad,
        f"{sum(changed.values())} prices changed when documents ended earlier after them{said}",
        changed_prices=changed,
        orders={m: score.order for m, score in scores.items()},
    )


def learning_scores(case: Case) -> dict[str, Score]:
    """The scores whose method has levers, by label."""
    return {m: score for m, score in case.scores.items() if score.how.get("levers")}


def probe_size(device: torch.device) -> tuple[int, int]:
    """The number of documents in a probe, and the most tokens of each."""
    if device.type == "cuda":
        return CUDA_PROBE_DOCUMENTS, CUDA_PROBE_TOKENS
    return PROBE_DOCUMENTS, PROBE_TOKENS


def _probe_shard(case: Case) -> Shard:
    return order.short_stream(case.data.val, *probe_size(case.runtime.device))


def _tracer(case: Case, score: Score) -> order.Trace:
    def trace(shard: Shard) -> list[order.Commit]:
        commits: list[order.Commit] = []
        case.rescore(score, shard, lambda *commit: commits.append(commit))
        return commits

    return trace
