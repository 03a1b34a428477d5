"""This rank's lanes: they read, are priced, and learn what they were priced on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from underpar.compile.cuda_graphs import RecordedStep
from underpar.core.runtime import Clock
from underpar.infer.lora import Lora
from underpar.infer.predictor import Predictor
from underpar.kernels.attention import BACKENDS, backend_of
from underpar.model.gpt import Block
from underpar.model.network import products
from underpar.score.ttt.forward import Answer, CompiledPricing, Given, Pricing, price_rows
from underpar.score.ttt.reading import KeptLanes, Reading, Rows, Sizes, upload
from underpar.score.ttt.schedule import Turn

# Lane -> tokens (count, K) that experts propose for the targets of its turn; -1 for none.
Hints = Mapping[int, np.ndarray]


class Team:
    """Some of the job's lanes, by number, as rows 0, 1, ... of one batch."""

    def __init__(
        self, predictor: Predictor, reading: Reading, lora: Lora, pricing: Pricing, clock: Clock
    ) -> None:
        self.reading = reading
        self._predictor = predictor
        self._lora = lora
        self._pricing = pricing
        self._clock = clock
        self._grads: Tensor | None = None
        self._has_priced = False
        self._sizes: Sizes | None = None
        self._recorded: dict[int, RecordedStep] = {}

    @property
    def lanes(self) -> Sequence[int]:
        """The number of each row's lane."""
        return self._lora.lanes

    def own(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns of this team, with its rows as lanes."""
        rows = {lane: row for row, lane in enumerate(self.lanes)}
        own = [(turn, rows[turn.lane]) for turn in turns if turn.lane in rows]
        return [turn if turn.lane == row else replace(turn, lane=row) for turn, row in own]

    def shrink(self, turns: Sequence[Turn]) -> None:
        """Drop the lanes that take no part in `turns`, if they are half of all or more.

        A lane without a turn has none to come: documents have run out. What is recorded is so for
        a number of lanes, and keeps it.
        """
        active = [turn.lane for turn in turns]
        few = 0 < len(active) <= len(self.lanes) // 2 and not self._recorded
        if few and isinstance(self.reading, KeptLanes):
            self.reading.keep(active)
            self._lora.keep(torch.tensor(active, device=self._predictor.device))

    def renew(self) -> None:
        """New adapters, between two groups of documents."""
        self._lora.renew()
        self._grads, self._has_priced = None, False

    def begin(self, turns: Sequence[Turn]) -> None:
        """Fresh adapters where a document begins."""
        starts = [turn for turn in turns if turn.first == 0]
        if starts:
            self._lora.reset([turn.lane for turn in starts], [turn.document for turn in starts])
        if isinstance(self.reading, KeptLanes):
            self.reading.restart(turns)

    def price(
        self, turns: Sequence[Turn], hints: Hints, adapted: bool = True
    ) -> dict[int, np.ndarray]:
        """Lane -> log-probabilities (count, 1 + K) of its targets and hints.

        Not `adapted`: as if there were no adapters. While prices travel from a device, the
        gradients of their loss are computed; only `learn` makes anything of them.
        """
        self._read_again(turns, adapted)
        learns = adapted and any(not turn.is_last for turn in turns)
        rows = self.reading.rows(turns, len(self.lanes), self._sizes if adapted else None)
        wanted = self._wanted(rows.targets, turns, hints)  # (L, c, 1 + K)
        given = self._given(rows, wanted, self._weights(rows.targets, turns))
        step = self._recorded.get(given.width) if adapted else None
        if step is not None:
            prices = Download(step.price(given))
        else:
            log_p, loss = self._ask(given, adapted, learns)
            prices = Download(log_p.detach())
        self._grads, self._has_priced = None, True
        if learns:
            with self._clock.phase("adapt"):
                self._grads = step.gradients() if step else self._lora.differentiate(loss)
        found = prices.wait().double().numpy().reshape(wanted.shape)
        return {self.lanes[turn.lane]: found[turn.lane, : turn.count] for turn in turns}

    def _ask(self, given: Given, adapted: bool = True, learns: bool = True) -> Answer:
        """What the model says; lanes go on behind what they were given."""
        price = self._pricing if learns else price_rows
        with torch.set_grad_enabled(learns), self._adapters(adapted), self._products():
            cache = self.reading.cache(given.counts, given.width)
            answer = price(self._predictor.model, given, cache)
        self.reading.commit()
        return answer

    def learn(self, turns: Sequence[Turn]) -> None:
        """One step of each lane whose document goes on, from the loss of what was priced last."""
        if self._grads is None and not (self._has_priced and self._lora.settings.decay_all):
            return
        goes_on = np.zeros(len(self.lanes), dtype=np.bool_)
        goes_on[[turn.lane for turn in turns if not turn.is_last]] = True
        self._lora.update(upload(goes_on, self._predictor.device), self._grads)
        self._grads = None

    def record(self, sizes: Sizes, num_hints: int) -> None:
        """Compile and record steps of these sizes; nothing is kept, learnt or drawn by it."""
        self._sizes = sizes
        pool = torch.cuda.graph_pool_handle() if self._is_recordable() else None
        for width in reversed(sizes.widths):
            given = self._rehearsal(width, num_hints)
            if not self._recorded:
                # Plain first: it makes what a compiled pass finds.
                self._ask(given, learns=False)
                if isinstance(self._pricing, CompiledPricing):
                    with self._pricing.regions.trace_only():
                        self._ask(given)
            step = RecordedStep(self._ask, self._lora.differentiate, given, pool)
            self._recorded[width] = step
        self._lora.warm_up()

    def _is_recordable(self) -> bool:
        """Whether steps can become CUDA graphs."""
        device, blocks = self._predictor.device, self._predictor.model.blocks
        if device.type != "cuda":
            return False
        if isinstance(self.reading, KeptLanes):
            return True
        # Packed rows: some backends, those of fp32 among them, cut by boundaries on the host.
        windows = {bool(block.attn.window) for block in blocks if isinstance(block, Block)}
        names = [backend_of(device, self._predictor.dtype, windowed) for windowed in windows]
        return all(BACKENDS[name].recordable for name in names)

    def _rehearsal(self, width: int, num_hints: int) -> Given:
        """A step in which nobody reads anything."""
        rows = self.reading.rehearsal(len(self.lanes), width)
        assert self._sizes is not None
        num_targets = width if rows.places is None else self._sizes.num_targets
        shape = (len(self.lanes), num_targets)
        places = None if rows.places is None else np.zeros(shape, dtype=np.int64)
        wanted = np.zeros((*shape, 1 + num_hints), dtype=np.int64)
        return self._given(replace(rows, places=places), wanted, np.zeros(shape, dtype=np.float32))

    def state(self) -> dict[str, Any]:
        """What lanes have read and learnt, between two steps."""
        own = {"reading": self.reading.state(), "lora": self._lora.state()}
        return {**own, "has_priced": self._has_priced}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with the lanes that it has."""
        self.reading.load(state["reading"])
        self._lora.load(state["lora"])
        self._has_priced = state["has_priced"]

    def _read_again(self, turns: Sequence[Turn], adapted: bool) -> None:
        if not isinstance(self.reading, KeptLanes):
            return
        again = self.reading.again(turns)
        if again is None:
            return
        rows = upload(np.array(again.lanes), self._predictor.device)
        with torch.no_grad(), self._products(), self._adapters(adapted, rows):
            self._predictor.model.hidden(again.inputs, again.cache)
        self.reading.was_read_again(again)

    def _products(self) -> AbstractContextManager[None]:
        return products(self._predictor.device, self._predictor.dtype)

    def _adapters(
        self, adapted: bool, rows: Tensor | None = None
    ) -> AbstractContextManager[object]:
        return self._lora.attached(rows) if adapted else nullcontext()

    def _given(self, rows: Rows, wanted: np.ndarray, weights: np.ndarray) -> Given:
        device = self._predictor.device
        return Given(
            upload(rows.inputs.ravel(), device),
            upload(rows.counts, device),
            None if rows.places is None else upload(rows.places.ravel(), device),
            upload(wanted.reshape(-1, wanted.shape[-1]), device),
            upload(weights.ravel(), device),
        )

    def _wanted(self, targets: np.ndarray, turns: Sequence[Turn], hints: Hints) -> np.ndarray:
        """(L, c, 1 + K) targets and hints."""
        num_hints = max((hints[self.lanes[turn.lane]].shape[1] for turn in turns), default=0)
        table = np.full((*targets.shape, 1 + num_hints), -1, dtype=np.int64)
        table[..., 0] = targets
        for turn in turns if num_hints else ():
            table[turn.lane, : turn.count, 1:] = hints[self.lanes[turn.lane]]
        return table

    def _weights(self, targets: np.ndarray, turns: Sequence[Turn]) -> np.ndarray:
        """(L, c): each lane's mean over its chunk, nothing where a document ends (PR 1530)."""
        weights = np.zeros(targets.shape, dtype=np.float32)
        for turn in turns:
            if not turn.is_last:
                weights[turn.lane, : turn.count] = 1 / turn.count
        return weights


class Download:
    """A tensor on its way to the host, while the device goes on."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = tensor
        if tensor.device.type == "cuda":
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The values, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
