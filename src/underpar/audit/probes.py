"""Experiments on a predictor or a scorer that treat it as a black box.

Each probe returns numbers; the rules judge them. Checks are numbered as in the field guide to valid
scores (parameter-golf issue 1017): A01 future independence, A02 substitution, A03 direct sums.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from underpar.data.batch import Batch, pack_documents
from underpar.data.shards import Shard
from underpar.infer.predictor import Predictor


class Prices(Protocol):
    """What is probed: anything that prices a batch."""

    @property
    def context(self) -> int:
        """Most inputs of a piece."""

    def nll(self, batch: Batch) -> Tensor:
        """Nats of each target."""


def swap_suffix(predictor: Prices, document: np.ndarray, cuts: list[int], vocab_size: int) -> int:
    """A01: replace all tokens from each cut on; count earlier prices that change by even a bit."""
    rng = np.random.default_rng(0)
    bos = int(document[0])
    changed = 0
    original = _prices(predictor, document, bos)
    for cut in cuts:
        other = document.copy()
        # Ids above the control pieces, so that no document boundary appears.
        other[cut:] = rng.integers(4, vocab_size, len(other) - cut)
        # Target i is token i + 1: prices of tokens before the cut must stand.
        changed += int((_prices(predictor, other, bos)[: cut - 1] != original[: cut - 1]).sum())
    return changed


def _prices(predictor: Prices, document: np.ndarray, bos: int) -> np.ndarray:
    batch, _ = pack_documents([document], bos, predictor.context)
    return predictor.nll(batch).cpu().numpy()


def isolation_error(predictor: Prices, first: np.ndarray, second: np.ndarray) -> float:
    """A23: largest change of the second document's prices when packed behind the first, in nats."""
    bos = int(second[0])
    batch, owner = pack_documents([first, second], bos, predictor.context)
    together = predictor.nll(batch).cpu().numpy()[owner == 1]
    return float(np.abs(together - _prices(predictor, second, bos)).max())


def substitution_sums(
    predictor: Prices, document: np.ndarray, lengths: list[int], vocab_size: int
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


def distribution_errors(predictor: Predictor, document: np.ndarray) -> tuple[float, float]:
    """A03: how far whole distributions are from summing to 1, and prices from them, in nats."""
    batch, _ = pack_documents([document], int(document[0]), predictor.context)
    log_probs = predictor.log_probs(batch).double()
    sums = log_probs.exp().sum(dim=-1)
    own = -log_probs.gather(1, batch.targets.to(log_probs.device)[:, None])[:, 0]
    prices = predictor.nll(batch).double()
    return float((sums - 1).abs().max()), float((own - prices).abs().max())


def head_of(shard: Shard, num_documents: int) -> Shard:
    """The first documents of a shard, as a shard."""
    num = min(num_documents, shard.num_documents)
    end = shard.num_tokens if num == shard.num_documents else int(shard.starts[num])
    return Shard(
        np.array(shard.tokens[:end]),
        shard.starts[:num],
        shard.doc_bytes[:num],
        shard.doc_hashes[:num],
        shard.flags[:num],
    )
