"""Batches of random documents with the shapes of training batches: for warm-up and benches."""

from __future__ import annotations

import numpy as np
import torch

from underpar.data.batch import Batch, segments_from_starts
from underpar.data.loader import CU_BUCKET, MicroBatch
from underpar.seams import BOS_ID

# Mean length of a document of the published validation set.
MEAN_DOCUMENT_TOKENS = 957


def made_up_batch(
    micro: MicroBatch, vocab_size: int, rng: np.random.Generator, order: str, longest: int = 0
) -> Batch:
    """Random tokens in documents of exponential lengths, cut as the loader cuts with `order`."""
    lengths = 2 + rng.exponential(MEAN_DOCUMENT_TOKENS, micro.tokens).astype(np.int64)
    ends = np.cumsum(lengths)
    starts = np.append(0, ends[ends < micro.tokens])
    tokens = rng.integers(2, vocab_size, micro.tokens + 1)
    tokens[starts] = BOS_ID
    # Sequences ignore document boundaries.
    cuts = starts if order == "documents" else np.array([0])
    return Batch(
        inputs=torch.from_numpy(tokens[:-1]),
        targets=torch.from_numpy(tokens[1:]),
        segments=segments_from_starts(cuts, micro.tokens, micro.context, CU_BUCKET, longest),
    )
