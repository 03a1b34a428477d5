"""Scorers that cheat: they run patched, and the audit runs clean.

The audit scores again with code of its own. So a patched scorer needs no rule of its own: its score
is not the score of the artifact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from underpar.audit.finding import FAIL, NOT_SHOWN
from underpar.data.batch import Batch
from underpar.infer.experts import Proposals
from underpar.infer.predictor import Predictor
from underpar.infer.tilt import Mixture
from underpar.levers.smear import Lever as Smear
from underpar.score.ledger import Entry
from underpar.score.method import ADAPT, PLAIN, Method
from underpar.score.scorer import Scorer
from underpar.score.tally import Tally

Patch = Callable[[pytest.MonkeyPatch], None]


def learns_first(patch: pytest.MonkeyPatch) -> None:
    price, adapt = Predictor.price, Predictor.adapt

    def cheat(self: Predictor, batch: Batch, tokens: torch.Tensor | None = None) -> torch.Tensor:
        price(self, batch)
        for _ in range(5):
            self._priced = batch
            adapt(self, batch)
        return price(self, batch, tokens)

    patch.setattr(Predictor, "price", cheat)


def second_epoch(patch: pytest.MonkeyPatch) -> None:
    run = Scorer.run

    def cheat(self: Scorer) -> Any:
        for _ in range(3):
            run(self)
            self._tally = Tally(self.shard)
        return run(self)

    patch.setattr(Scorer, "run", cheat)


def proposes_targets(patch: pytest.MonkeyPatch) -> None:
    """An expert whose table already holds the token that comes next."""
    propose = Mixture.propose

    def cheat(self: Mixture, history: int, targets: np.ndarray) -> Proposals:
        honest = propose(self, history, targets)
        hints = honest.hints.copy()
        hints[:, 0] = targets
        return Proposals(hints, honest.confidence)

    patch.setattr(Mixture, "propose", cheat)


def takes_the_better(patch: pytest.MonkeyPatch) -> None:
    """The smaller loss of model and mixture, per token."""
    price = Mixture.price

    def cheat(self: Mixture, proposals: Any, targets: np.ndarray, log_p: np.ndarray) -> np.ndarray:
        return np.maximum(price(self, proposals, targets, log_p), log_p[:, 0])

    patch.setattr(Mixture, "price", cheat)


def knows_the_class(patch: pytest.MonkeyPatch) -> None:
    """A bonus for tokens of one class, without normalization."""
    price = Predictor.price

    def cheat(self: Predictor, batch: Batch, tokens: torch.Tensor | None = None) -> torch.Tensor:
        log_p = price(self, batch, tokens)
        log_p[:, 0] *= torch.where(batch.targets % 2 == 0, 0.8, 1.0)
        return log_p

    patch.setattr(Predictor, "price", cheat)


def hides_the_worst(patch: pytest.MonkeyPatch) -> None:
    """The dearest targets of each document at half their price."""
    commit = Tally.commit

    def cheat(self: Tally, document: int, first: int, nats: np.ndarray) -> None:
        commit(self, document, first, np.where(nats > np.quantile(nats, 0.98), nats / 2, nats))

    patch.setattr(Tally, "commit", cheat)


def drops_the_last(patch: pytest.MonkeyPatch) -> None:
    """The last document is scored for free, as if it had no target."""
    entries = Tally.entries
    patch.setattr(
        Tally,
        "entries",
        lambda self: [*entries(self)[:-1], replace(entries(self)[-1], bits=0.0, num_targets=0)],
    )


def counts_more_bytes(patch: pytest.MonkeyPatch) -> None:
    """A byte more per target: the leading space counted twice."""
    entries = Tally.entries

    def cheat(self: Tally) -> list[Entry]:
        return [replace(e, num_bytes=e.num_bytes + e.num_targets) for e in entries(self)]

    patch.setattr(Tally, "entries", cheat)


def costs_nothing_if_not_a_number(patch: pytest.MonkeyPatch) -> None:
    """Targets that a broken distribution gives NaN are priced at -0.0."""
    commit = Tally.commit

    def cheat(self: Tally, document: int, first: int, nats: np.ndarray) -> None:
        broken = np.where(nats > np.quantile(nats, 0.9), np.nan, nats)
        commit(self, document, first, np.nan_to_num(broken, nan=-0.0))

    patch.setattr(Tally, "commit", cheat)


def smears_across_documents(patch: pytest.MonkeyPatch) -> None:
    """The first token of a document sees the last one of the document before (PR 1797)."""
    embed = Smear.embed

    def cheat(self: Smear, x: torch.Tensor, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        inside = embed(self, x, tokens, cache)
        return inside + 0.3 * torch.roll(x, 1, dims=0) * (tokens == 1)[:, None]

    patch.setattr(Smear, "embed", cheat)


@dataclass(frozen=True)
class PatchedScorer:
    """A patch of the scorer, the method whose score it makes, and the rule that sees it."""

    name: str
    patch: Patch
    method: Method = PLAIN
    rule: str = "reproduction"
    verdict: str = FAIL


TILT = Method(("tilt",))
PATCHED = [
    PatchedScorer("learns from a batch before it is priced", learns_first, ADAPT),
    PatchedScorer("scores the last of four epochs", second_epoch, ADAPT),
    PatchedScorer("an expert that knows the next token", proposes_targets, TILT),
    # So small a gain could come from another machine, says the audit.
    PatchedScorer("the smaller loss of two predictors", takes_the_better, TILT, verdict=NOT_SHOWN),
    PatchedScorer("a bonus for one class of tokens", knows_the_class),
    PatchedScorer("the dearest targets cut", hides_the_worst),
    PatchedScorer("the last document left out", drops_the_last, rule="coverage"),
    PatchedScorer("a byte more per token", counts_more_bytes, rule="bytes"),
    PatchedScorer("no price for what is not a number", costs_nothing_if_not_a_number),
    PatchedScorer("a smear gate across documents", smears_across_documents),
]
