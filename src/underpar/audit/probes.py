"""Experiments on a predictor as a black box.

Each probe returns numbers; the rules judge them. Checks are numbered as in the field guide to valid
scores (parameter-golf issue 1017): A01 future independence, A02 substitution, A03 direct sums, A23
independence of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from underpar.data.batch import Batch, pack_documents
from underpar.data.shards import Shard
from underpar.infer.predictor import Predictor
from underpar.infer.tilt import Mixture

# Ids of text: those below are of control pieces, one of which begins a document.
FIRST_TEXT_ID = 4
# How many targets with a hint, and how many without, are replaced, and by how many other tokens.
NUM_TARGETS, NUM_OTHERS = 12, 4


class Prices(Protocol):
    """The part of a predictor that probes use."""

    @property
    def context(self) -> int:
        """The most tokens that a price may depend on."""

    def nll(self, batch: Batch) -> Tensor:
        """Nats of each target."""


def swap_suffix(
    predictor: Prices,
    document: np.ndarray,
    cuts: Sequence[int],
    vocab_size: int,
    rng: np.random.Generator,
) -> int:
    """A01: replace all tokens from each cut on; count the earlier prices that change at all."""
    bos = int(document[0])
    changed = 0
    original = _prices(predictor, document, bos)
    for cut in cuts:
        other = document.copy()
        other[cut:] = rng.integers(FIRST_TEXT_ID, vocab_size, len(other) - cut)
        # Target i is token i + 1: prices of tokens before the cut must stand.
        changed += int((_prices(predictor, other, bos)[: cut - 1] != original[: cut - 1]).sum())
    return changed


def _prices(predictor: Prices, document: np.ndarray, bos: int) -> np.ndarray:
    batch, _ = pack_documents([document], bos, predictor.context)
    return predictor.nll(batch).cpu().numpy()


def isolation_error(predictor: Prices, first: np.ndarray, second: np.ndarray) -> float:
    """A23: largest change of a document's prices, in nats, if another one is packed before it."""
    bos = int(second[0])
    batch, owner = pack_documents([first, second], bos, predictor.context)
    together = predictor.nll(batch).cpu().numpy()[owner == 1]
    return float(np.abs(together - _prices(predictor, second, bos)).max())


def substitution_sums(
    predictor: Prices, document: np.ndarray, lengths: Sequence[int], vocab_size: int
) -> list[float]:
    """A02: price every possible next token through `nll` itself; probabilities must sum to 1."""
    bos = int(document[0])
    sums = []
    for length in lengths:
        total = 0.0
        prefix = document[:length]
        # Each candidate is a document of its own: the prefix, then the candidate.
        for candidates in np.array_split(
            np.arange(vocab_size), max(1, vocab_size * length // 65_536)
        ):
            docs = [np.append(prefix, c) for c in candidates]
            batch, owner = pack_documents(docs, bos, predictor.context)
            nats = predictor.nll(batch).double()
            last = torch.from_numpy(np.searchsorted(owner, np.arange(len(docs))) + length - 1)
            total += float((-nats[last.to(nats.device)]).exp().sum())
        sums.append(total)
    return sums


def distribution_errors(
    predictor: Predictor, document: np.ndarray, vocab_size: int
) -> tuple[float, float]:
    """A03: largest error of a distribution's sum, and of a price against it, in nats.

    A distribution over another number of tokens counts as an error without limit (A11).
    """
    batch, _ = pack_documents([document], int(document[0]), predictor.context)
    log_probs = predictor.log_probs(batch).double()
    if log_probs.shape[1] != vocab_size:
        return float("inf"), float("inf")
    sums = log_probs.exp().sum(dim=-1)
    nats = -log_probs.gather(1, batch.targets.to(log_probs.device)[:, None])[:, 0]
    prices = predictor.nll(batch).double()
    return float((sums - 1).abs().max()), float((nats - prices).abs().max())


def own_targets_matter(
    mixture: Mixture, targets: np.ndarray, vocab_size: int, rng: np.random.Generator
) -> int:
    """A01: the number of proposals that change when their own target is replaced, over some.

    The hints of PR 1967 knew the class of their target.
    """
    if not mixture.experts:
        return 0

    def propose(stream: np.ndarray) -> np.ndarray:
        mixture.open(1, len(targets))
        proposals = mixture.propose(0, stream)
        return np.concatenate([proposals.hints, proposals.confidence], axis=1)  # (n, 2 K)

    honest = propose(targets)
    # Hints may be rare: half of the targets are chosen among those that have one.
    has_hint = (honest[:, : len(mixture.experts)] >= 0).any(axis=1)
    kinds = [np.flatnonzero(has_hint), np.flatnonzero(~has_hint)]
    chosen = np.concatenate([rng.choice(kind, min(len(kind), NUM_TARGETS)) for kind in kinds])
    changed = 0
    for target in chosen:
        for token in rng.integers(FIRST_TEXT_ID, vocab_size, NUM_OTHERS):
            other = propose(np.append(targets[:target], token))
            changed += not np.array_equal(other, honest[: target + 1])
    return changed


def first_documents(shard: Shard, number: int) -> Shard:
    """The first documents of a shard, as a shard; 0 stands for all."""
    if not 0 < number < shard.num_documents:
        return shard
    return Shard(
        tokens=shard.tokens[: int(shard.starts[number])],
        starts=shard.starts[:number],
        doc_bytes=shard.doc_bytes[:number],
        doc_hashes=shard.doc_hashes[:number],
        flags=shard.flags[:number],
    )
