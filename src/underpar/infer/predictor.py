"""The predictor: the only source of probabilities. A price it gives is a price a decoder can have.

Every probability of this package is computed by `log_probs_of`, from hidden states of the same
network:

- `price` and `nll` price a pack of whole documents; `adapt` then learns from that pack and from no
  other (`score/scorer.py`).
- `price_step` prices one chunk of each lane and returns a loss with gradients
  (`score/ttt/lanes.py`).
- `stepper` predicts the next token of each lane (`codec/lanes.py`, `infer/generate.py`).

Different shapes may round differently, so the three ways agree within 1e-4 nats per target, not
bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.core.dist import sum_over_ranks
from underpar.data.batch import Batch
from underpar.errors import RuleError
from underpar.infer.sgd import backward, gradients_on
from underpar.model.kv_cache import LaneCache, PackedCache
from underpar.model.network import ROWS, Network, products
from underpar.seams import Adapter, KVCache

if TYPE_CHECKING:
    from underpar.core.runtime import Runtime
    from underpar.infer.step import StepInputs, StepOutputs


def log_probs_of(
    model: Network, hidden: Tensor, wanted: Tensor | None = None, fused: bool = False
) -> Tensor:
    """Log-probabilities in nats after hidden states (N, dim): the one place that computes them.

    With `wanted` (N, K) those of these tokens, 0 or less; a token of -1 stands for none and gets 0.
    Without it those of all tokens (N, V). `fused`: with the formulas made for compilers.
    """
    # Sums over the vocabulary are in fp32, whatever precision matrix products run in.
    log_probs = F.log_softmax(model.head(hidden, fused).float(), dim=-1)
    if wanted is None:
        return log_probs
    # Rounding may put a certain token above 0.
    chosen = log_probs.gather(1, wanted.clamp(min=0)).clamp(max=0.0)
    return chosen.masked_fill(wanted < 0, 0.0)


class Predictor:
    """A model and its recipe's adapters, which alone may change it.

    Matrix products run in `dtype`.
    """

    def __init__(
        self,
        model: Network,
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
        """The most tokens that a prediction may look back on."""
        return self.model.spec.context

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> Tensor:
        """Log-probabilities (N, V) in nats of every possible next token."""
        with products(self.device, self.dtype):
            return log_probs_of(self.model, self._hidden(batch))

    @torch.no_grad()
    def price(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        """Log-probabilities (N, 1 + K) in nats: of the targets, then of `tokens` (N, K).

        A token of -1 stands for none and gets 0. After this call the batch counts as priced.
        """
        wanted = batch.targets.to(self.device)[:, None]
        if tokens is not None:
            wanted = torch.cat((wanted, tokens.to(self.device)), dim=1)
        with products(self.device, self.dtype):
            slices = zip(self._hidden(batch).split(ROWS), wanted.split(ROWS), strict=True)
            log_p = torch.cat([log_probs_of(self.model, *pair) for pair in slices])
        self._priced = batch
        return log_p

    def nll(self, batch: Batch) -> Tensor:
        """Nats (N,) of the batch's targets. After this call the batch counts as priced."""
        return -self.price(batch)[:, 0]

    def price_step(
        self,
        forward: Callable[[Network, StepInputs, KVCache], StepOutputs],
        inputs: StepInputs,
        cache: KVCache,
    ) -> StepOutputs:
        """Log-probabilities and loss of one step of lanes, with gradients where they are enabled.

        `forward` is `infer.step.forward_step` or its compiled form, `score.ttt.forward`.
        """
        with products(self.device, self.dtype):
            return forward(self.model, inputs, cache)

    def _hidden(self, batch: Batch) -> Tensor:
        batch = batch.to(self.device)
        return self.model.hidden(batch.inputs, PackedCache(batch.segments))

    def adapt(self, batch: Batch) -> None:
        """Learn from `batch`: the one that was priced last, and only once."""
        if batch is not self._priced:
            raise RuleError("adapt was given tokens that have not been priced; score them first")
        self.learn([(batch, None)], len(batch.targets))

    def learn(
        self,
        passes: Sequence[tuple[Batch, Tensor | None]],
        num_targets: int,
        runtime: Runtime | None = None,
    ) -> None:
        """Learn from `num_targets` targets, all of which the caller has priced.

        `passes` are this rank's share of them: batches, and the rows of each that count, None for
        all. The ranks of `runtime` add up their gradients and make the same steps.
        """
        self._priced = None
        here = self.device
        own = [(b.to(here), None if rows is None else rows.to(here)) for b, rows in passes]
        for epoch in range(max((adapter.epochs for adapter in self._adapters), default=0)):
            pairs = zip(self._adapters, self._shares, strict=True)
            active = [(adapter, share) for adapter, share in pairs if epoch < adapter.epochs]
            parameters = [parameter for _, share in active for parameter in share]
            with gradients_on(parameters):
                for batch, rows in own:
                    backward(self.model, batch, num_targets, self.dtype, rows)
                if runtime is not None and runtime.world > 1:
                    _sum_gradients(parameters, runtime)
                for adapter, share in active:
                    adapter.update(share)

    def foresee(self, num_chunks: int) -> bool:
        """Tell adapters how often they will learn; True if one of them needs to know."""
        return any([adapter.foresee(num_chunks) for adapter in self._adapters])

    @property
    def can_adapt(self) -> bool:
        """True when the recipe names an adapter."""
        return bool(self._adapters)

    def state_hash(self) -> str:
        """SHA-256 of all weights; work that must not learn leaves it unchanged."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().numpy().tobytes())
        return digest.hexdigest()

    def state(self) -> dict[str, Tensor]:
        """The weights and what adapters remember, as live tensors: enough to resume a score."""
        state = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        for i, adapter in enumerate(self._adapters):
            state |= {f"adapter{i}/{name}": tensor for name, tensor in adapter.state().items()}
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state; no batch counts as priced after it."""
        self._priced = None
        self.model.load_state_dict(_under("model/", state, self.device))
        for i, adapter in enumerate(self._adapters):
            adapter.load(_under(f"adapter{i}/", state, self.device))

    def stepper(self, num_lanes: int) -> Stepper:
        """A stepper with empty lanes: each begins a document."""
        cache = LaneCache(self.model.spec, num_lanes, self.device)
        return Stepper(self.model, cache, self.dtype)


def _share(named: Mapping[str, Tensor], adapters: list[Adapter]) -> list[list[Tensor]]:
    """The tensors that each adapter changes; the first adapter to name a tensor has it."""
    shares: list[list[Tensor]] = []
    for adapter in adapters:
        taken = {id(parameter) for share in shares for parameter in share}
        shares.append(adapter.parameters({n: p for n, p in named.items() if id(p) not in taken}))
    return shares


def _sum_gradients(parameters: Sequence[Tensor], runtime: Runtime) -> None:
    """Add up over ranks; a rank without a share of the chunk has no gradients of its own."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    sum_over_ranks([p.grad for p in parameters if p.grad is not None], runtime)


def _under(prefix: str, state: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    names = (name for name in state if name.startswith(prefix))
    return {name.removeprefix(prefix): state[name].to(device) for name in names}


class Stepper:
    """One token per lane in, the distribution of the next token per lane out."""

    def __init__(
        self, model: Network, cache: LaneCache, dtype: torch.dtype = torch.float32
    ) -> None:
        self._model = model
        self._cache = cache
        self._dtype = dtype

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Feed tokens (L,), one per lane; returns log-probabilities (L, V) of what follows."""
        self._cache.place()
        with products(tokens.device, self._dtype):
            hidden = self._model.hidden(tokens, self._cache)
            log_probs = log_probs_of(self._model, hidden)
        self._cache.advance()
        return log_probs

    def reset(self, lanes: Tensor) -> None:
        """Begin a new document in the lanes where `lanes` (L,) is true."""
        self._cache.reset(lanes)

    def keep(self, lanes: Tensor) -> None:
        """Keep only these lanes, by index, in this order."""
        self._cache.keep(lanes)
