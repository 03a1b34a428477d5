"""This rank's lanes: they read, are priced, and learn what they were priced on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from underpar.infer.lora import Lora
from underpar.infer.predictor import Predictor
from underpar.infer.sgd import products
from underpar.runtime import Clock
from underpar.score.pricing import Pricing, Question, price_rows
from underpar.score.reading import KeptLanes, Reading, Rows, upload
from underpar.score.schedule import Turn

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
        self._has_gradients = False
        self._has_priced = False

    @property
    def lanes(self) -> Sequence[int]:
        """The number of each row's lane."""
        return self._lora.lanes

    def own(self, turns: Sequence[Turn]) -> list[Turn]:
        """The turns of this team, with its rows as lanes."""
        rows = {lane: row for row, lane in enumerate(self.lanes)}
        return [replace(turn, lane=rows[turn.lane]) for turn in turns if turn.lane in rows]

    def shrink(self, turns: Sequence[Turn]) -> None:
        """Drop the lanes that take no part in `turns`, if they are half of all or more.

        A lane without a turn has none to come: documents have run out. What is compiled is so for
        a number of lanes, and keeps it.
        """
        active = [turn.lane for turn in turns]
        few = 0 < len(active) <= len(self.lanes) // 2 and self._pricing is price_rows
        if few and isinstance(self.reading, KeptLanes):
            self.reading.keep(active)
            self._lora.keep(torch.tensor(active, device=self._predictor.device))

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
        rows = self.reading.rows(turns, len(self.lanes))
        wanted = self._wanted(rows.targets, turns, hints)  # (L, c, 1 + K)
        learns = adapted and any(not turn.is_last for turn in turns)
        question = self._question(rows, wanted, self._weights(rows.targets, turns))
        with torch.set_grad_enabled(learns), self._adapters(adapted), self._products():
            price = self._pricing if learns else price_rows
            log_p, loss = price(self._predictor.model, question)
        self.reading.done()
        prices = Download(log_p.detach())
        if learns:
            with self._clock.phase("adapt"):
                loss.backward()
        self._has_gradients, self._has_priced = learns, True
        found = prices.wait().double().numpy().reshape(wanted.shape)
        return {self.lanes[turn.lane]: found[turn.lane, : turn.count] for turn in turns}

    def learn(self, turns: Sequence[Turn]) -> None:
        """One step of each lane whose document goes on, from the loss of what was priced last."""
        if not self._has_gradients and not (self._has_priced and self._lora.settings.decay_all):
            return
        self._has_gradients = False
        goes_on = np.zeros(len(self.lanes), dtype=np.bool_)
        goes_on[[turn.lane for turn in turns if not turn.is_last]] = True
        self._lora.update(upload(goes_on, self._predictor.device))

    def warm_up(self, width: int, num_hints: int) -> None:
        """Compile what steps need, on `width` tokens a lane; nothing is kept, learnt or drawn."""
        model, shape = self._predictor.model, (len(self.lanes), width)
        wanted = np.zeros((*shape, 1 + num_hints), dtype=np.int64)
        # Plain first: it makes what a compiled pass finds.
        for price in (price_rows, self._pricing):
            rows = self.reading.rehearsal(*shape)
            question = self._question(rows, wanted, np.zeros(shape, dtype=np.float32))
            learns = torch.set_grad_enabled(price is not price_rows)
            with learns, self._adapters(True), self._products():
                _, loss = price(model, question)
            if loss.requires_grad:
                loss.backward()
                self._lora.warm_up()
        self.reading.forget()

    def _read_again(self, turns: Sequence[Turn], adapted: bool) -> None:
        if not isinstance(self.reading, KeptLanes):
            return
        again = self.reading.again(turns)
        if again is None:
            return
        rows = upload(np.array(again.lanes), self._predictor.device)
        with torch.no_grad(), self._products(), self._adapters(adapted, rows):
            self._predictor.model.hidden(again.inputs, again.past)
        self.reading.was_read_again(again)

    def _products(self) -> AbstractContextManager[None]:
        return products(self._predictor.device, self._predictor.dtype)

    def _adapters(
        self, adapted: bool, rows: Tensor | None = None
    ) -> AbstractContextManager[object]:
        return self._lora.attached(rows) if adapted else nullcontext()

    def _question(self, rows: Rows, wanted: np.ndarray, weights: np.ndarray) -> Question:
        device = self._predictor.device
        places = None if rows.places is None else upload(rows.places.ravel(), device)
        tokens = upload(wanted.reshape(-1, wanted.shape[-1]), device)
        return Question(rows.inputs, rows.past, places, tokens, upload(weights.ravel(), device))

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
