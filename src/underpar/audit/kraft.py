"""Kraft tests: on random text nothing can be saved, whatever a score learns, mixes or remembers.

Tokens are drawn independently and uniformly from k. Then no scorer whose prices are probabilities,
fixed before their targets are known, saves more than s of n log2 k bits with a probability above
2^-s (Kraft 1949). A scorer that looks ahead, prices twice, knows its target or does not normalize
saves thousands. These are the tests K1 to K4 of the field guide (parameter-golf issue 1017). They
use a score's own machinery over a model that knows next to nothing, so that losses of the model
cannot hide what a cheat saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from underpar.audit.traces import Commit, shard_of
from underpar.data.shards import Shard
from underpar.kernels.capped import soft_cap
from underpar.model.network import Network
from underpar.seams import BOS_ID

# The most bits that a random text may cost less than its length: 2^-40 is less than one in 10^12.
MOST_SAVED_BITS = 40.0
# The head is multiplied by this: logits are small then, and all gradients are still there.
FAINT = 1 / 64
# Nats added to the logits of tokens outside of the alphabet.
OUTSIDE = -30.0


@torch.no_grad()
def flatten(model: Network, alphabet: np.ndarray) -> None:
    """Make the prices of a model nearly those of a uniform choice from the alphabet."""
    head = model.get_parameter(model.head_name)
    head.mul_(FAINT)
    outside = torch.full((model.spec.vocab_size,), OUTSIDE, device=head.device)
    outside[torch.from_numpy(alphabet)] = 0.0
    cap = model.hooks.cap or partial(soft_cap, cap=model.spec.softcap)

    def flat(logits: torch.Tensor, fused: bool) -> torch.Tensor:
        return cap(logits, fused=fused) + outside

    model.hooks.change(cap=flat)


def random_text(
    alphabet: np.ndarray, num_tokens: int, rng: np.random.Generator, start: int = BOS_ID
) -> Shard:
    """Tokens drawn from an alphabet; if `start` is in it, documents begin where it is drawn."""
    tokens = rng.choice(alphabet, num_tokens)
    tokens[0] = start
    return shard_of(np.split(tokens, np.flatnonzero(tokens == start)[1:]))


def twice(text: Shard) -> Shard:
    """The documents of a text, and then all of them again."""
    documents = [text.doc(i) for i in range(text.num_documents)]
    return shard_of([*documents, *documents])


def saved_bits(commits: Sequence[Commit], num_tokens: int, num_documents: int) -> float:
    """K1: the bits by which the prices of the first documents are below those of a uniform choice
    from so many tokens."""
    prices = [nats for document, _, nats in commits if document < num_documents]
    num_targets = sum(map(len, prices))
    bits = sum(float(np.sum(nats, dtype=np.float64)) for nats in prices) / np.log(2)
    return float(num_targets * np.log2(num_tokens) - bits)


def repeating_text(
    alphabet: np.ndarray, passage_tokens: int, num_documents: int, rng: np.random.Generator
) -> Shard:
    """Documents that are one random passage twice, so that caches and experts have their say."""
    passage = rng.choice(alphabet, passage_tokens)
    return shard_of([np.concatenate(([BOS_ID], passage, passage))] * num_documents)
