"""The predictor: the only source of probabilities. What it prices is what can be decoded.

`price` and `nll` price a pack of documents at once, `adapt` learns from the pack that was priced
last and from no other, `stepper` predicts one token of each lane at a time for the codec and for
generation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.data.loader import Batch
from underpar.errors import RuleError
from underpar.infer.sgd import backward, gradients_on
from underpar.model.gpt import GPT
from underpar.model.kv_cache import LaneCache, PackedCache
from underpar.model.network import ROWS, products
from underpar.seams import Adapter


class Predictor:
    """A model and the adapters of its recipe, which alone change it; products run in `dtype`."""

    def __init__(
        self,
        model: GPT,
        device: torch.device,
        adapters: list[Adapter],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._adapters = adapters
        for adapter in adapters:
            adapter.attach(model)
        self.model = model.to(device).eval().requires_grad_(False)
        self.device = device
        self.dtype = dtype
        self._shares = _share(dict(model.named_parameters()), adapters)
        self._priced: Batch | None = None

    @property
    def context(self) -> int:
        """Most tokens a prediction may look back on."""
        return self.model.spec.context

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> Tensor:
        """Log-probabilities (N, V) in nats of every next token, each from its past alone."""
        return self._log_softmax(self._hidden(batch))

    @torch.no_grad()
    def price(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        """Log-probabilities (N, 1 + K) in nats, 0 or less: of targets, then of `tokens` (N, K).

        A token of -1 is none, and gets 0. From here on the batch counts as priced.
        """
        hidden, wanted = self._hidden(batch), batch.targets.to(self.device)[:, None]
        if tokens is not None:
            wanted = torch.cat((wanted, tokens.to(self.device)), dim=1)
        logs = [
            self._log_softmax(x).gather(1, w.clamp(min=0)).clamp(max=0.0)
            for x, w in zip(hidden.split(ROWS), wanted.split(ROWS), strict=True)
        ]
        self._priced = batch
        return torch.cat(logs).masked_fill(wanted < 0, 0.0)

    def nll(self, batch: Batch) -> Tensor:
        """Nats (N,) of the batch's targets. From here on the batch counts as priced."""
        return -self.price(batch)[:, 0]

    def _hidden(self, batch: Batch) -> Tensor:
        batch = batch.to(self.device)
        with products(self.device, self.dtype):
            return self.model.hidden(batch.inputs, PackedCache(batch.segments))

    def _log_softmax(self, hidden: Tensor) -> Tensor:
        with products(self.device, self.dtype):
            logits = self.model.head(hidden)
        return F.log_softmax(logits.float(), dim=-1)

    def adapt(self, batch: Batch) -> None:
        """Learn from `batch`, which must be the one priced last; it can be used once."""
        if batch is not self._priced:
            raise RuleError("adapt was given tokens that have not been priced; score them first")
        self._priced = None
        batch = batch.to(self.device)
        for epoch in range(max((adapter.epochs for adapter in self._adapters), default=0)):
            pairs = zip(self._adapters, self._shares, strict=True)
            active = [(adapter, own) for adapter, own in pairs if epoch < adapter.epochs]
            with gradients_on([parameter for _, own in active for parameter in own]):
                backward(self.model, batch, len(batch.targets), self.dtype)
                for adapter, own in active:
                    adapter.update(own)

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

    def state(self) -> dict[str, Tensor]:
        """Weights, and what adapters remember: live tensors, from which pricing can go on."""
        state = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for i, adapter in enumerate(self._adapters):
            state |= {f"adapter{i}/{name}": tensor for name, tensor in adapter.state().items()}
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put a state back; nothing counts as priced."""
        self._priced = None
        self.model.load_state_dict(_under("model/", state, self.device))
        for i, adapter in enumerate(self._adapters):
            adapter.load(_under(f"adapter{i}/", state, self.device))

    def stepper(self, num_lanes: int) -> Stepper:
        """Fresh lanes, each at the start of a document."""
        cache = LaneCache(self.model.spec, num_lanes, self.device)
        return Stepper(self.model, cache, self.dtype)


def _share(named: Mapping[str, Tensor], adapters: list[Adapter]) -> list[list[Tensor]]:
    """The tensors of each adapter; one that several name belongs to the first of them."""
    shares: list[list[Tensor]] = []
    for adapter in adapters:
        taken = {id(parameter) for own in shares for parameter in own}
        shares.append(adapter.parameters({n: p for n, p in named.items() if id(p) not in taken}))
    return shares


def _under(prefix: str, state: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    names = (name for name in state if name.startswith(prefix))
    return {name.removeprefix(prefix): state[name].to(device) for name in names}


class Stepper:
    """Token in, distribution out, for all lanes at once."""

    def __init__(self, model: GPT, cache: LaneCache, dtype: torch.dtype = torch.float32) -> None:
        self._model = model
        self._cache = cache
        self._dtype = dtype

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Feed tokens (L,), one a lane; returns log-probabilities (L, V) of what follows."""
        self._cache.place()
        with products(tokens.device, self._dtype):
            logits = self._model(tokens, self._cache)
        self._cache.advance()
        return F.log_softmax(logits.float(), dim=-1)

    def reset(self, lanes: Tensor) -> None:
        """Begin a new document in the lanes where `lanes` (L,) is true."""
        self._cache.reset(lanes)

    def keep(self, lanes: Tensor) -> None:
        """Go on with these lanes only, by index, in this order."""
        self._cache.keep(lanes)
