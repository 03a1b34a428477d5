"""The predictor: the only source of probabilities. What it prices is what can be decoded.

`nll` prices a pack of documents at once, `adapt` learns from a pack that `nll` has priced and from
no other, `stepper` predicts one token of each lane at a time for the codec and for generation.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.data.loader import Batch
from underpar.errors import RuleError
from underpar.infer.cache import LaneCache
from underpar.model.gpt import GPT
from underpar.model.past import PackedPast
from underpar.seams import Adapter

# Rows of logits made at a time: a long document's all at once would not fit.
ROWS = 8192


class Predictor:
    """A model with fixed weights, plus the adapters of its recipe."""

    def __init__(self, model: GPT, device: torch.device, adapters: list[Adapter]) -> None:
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device
        self._adapters = adapters
        self._priced: Batch | None = None

    @property
    def context(self) -> int:
        """Most tokens a prediction may look back on."""
        return self.model.spec.context

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> Tensor:
        """Log-probabilities (N, V) in nats of every next token, each from its past alone."""
        return F.log_softmax(self.model.head(self._hidden(batch)).float(), dim=-1)

    @torch.no_grad()
    def nll(self, batch: Batch) -> Tensor:
        """Nats (N,) of the batch's targets. From here on the batch counts as priced."""
        hidden, targets = self._hidden(batch), batch.targets.to(self.device)
        nats = [
            F.cross_entropy(self.model.head(x).float(), t, reduction="none")
            for x, t in zip(hidden.split(ROWS), targets.split(ROWS), strict=True)
        ]
        self._priced = batch
        return torch.cat(nats)

    def _hidden(self, batch: Batch) -> Tensor:
        batch = batch.to(self.device)
        return self.model.hidden(batch.inputs, PackedPast(batch.segments))

    def adapt(self, batch: Batch) -> None:
        """Learn from `batch`, which must be the one priced last; it can be used once."""
        if batch is not self._priced:
            raise RuleError("adapt was given tokens that have not been priced; score them first")
        self._priced = None
        named = dict(self.model.named_parameters())
        for adapter in self._adapters:
            parameters = adapter.parameters(named)
            for parameter in parameters:
                parameter.requires_grad_(True)
            self._backward(batch)
            adapter.update(parameters)
            for parameter in parameters:
                parameter.requires_grad_(False)
                parameter.grad = None

    def _backward(self, batch: Batch) -> None:
        hidden, targets = self._hidden(batch), batch.targets.to(self.device)
        # The head goes slice by slice up to a copy of its input, then the rest in one pass.
        leaf = hidden.detach().requires_grad_(True)
        for x, t in zip(leaf.split(ROWS), targets.split(ROWS), strict=True):
            loss = F.cross_entropy(self.model.head(x).float(), t, reduction="sum")
            (loss / len(targets)).backward()
        if hidden.requires_grad:
            hidden.backward(leaf.grad)

    @property
    def can_adapt(self) -> bool:
        """True when the recipe names an adapter."""
        return bool(self._adapters)

    def state_hash(self) -> str:
        """SHA-256 over all weights: equal before and after work that must not learn."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().numpy().tobytes())
        return digest.hexdigest()

    def stepper(self, num_lanes: int) -> Stepper:
        """Fresh lanes, each at the start of a document."""
        return Stepper(self.model, LaneCache(self.model.spec, num_lanes, self.device))


class Stepper:
    """Token in, distribution out, for all lanes at once."""

    def __init__(self, model: GPT, cache: LaneCache) -> None:
        self._model = model
        self._cache = cache

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Feed tokens (L,), one a lane; returns log-probabilities (L, V) of what follows."""
        self._cache.place()
        logits = self._model(tokens, self._cache)
        self._cache.advance()
        return F.log_softmax(logits.float(), dim=-1)

    def reset(self, lanes: Tensor) -> None:
        """Begin a new document in the lanes where `lanes` (L,) is true."""
        self._cache.reset(lanes)

    def keep(self, lanes: Tensor) -> None:
        """Go on with these lanes only, by index, in this order."""
        self._cache.keep(lanes)
