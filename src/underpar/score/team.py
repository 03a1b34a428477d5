"""This rank's lanes: they read, are priced, and learn what they were priced on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from underpar.infer.lora import Lora
from underpar.infer.predictor import Predictor
from underpar.infer.sgd import products
from underpar.score.reading import KeptLanes, Reading, upload
from underpar.score.schedule import Turn

# Lane -> tokens (count, K) that experts propose for the targets of its turn; -1 for none.
Hints = Mapping[int, np.ndarray]


class Team:
    """Some of the job's lanes, by number, as rows 0, 1, ... of one batch."""

    def __init__(self, predictor: Predictor, reading: Reading, lora: Lora) -> None:
        self.reading = reading
        self._predictor = predictor
        self._lora = lora
        self._loss: Tensor | None = None
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

        A lane without a turn has none to come: documents have run out.
        """
        active = [turn.lane for turn in turns]
        few = 0 < len(active) <= len(self.lanes) // 2
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
        """Lane -> log-probabilities (count, 1 + K) of its targets and hints; keeps the loss.

        Not `adapted`: as if there were no adapters, and nothing to learn.
        """
        self._read_again(turns, adapted)
        rows = self.reading.rows(turns, len(self.lanes))
        wanted = self._wanted(rows.targets, turns, hints)  # (L, c, 1 + K)
        learns = adapted and any(not turn.is_last for turn in turns)
        weights = self._weights(rows.targets, turns) if learns else None
        with self._adapters(adapted), self._products(), torch.set_grad_enabled(learns):
            hidden = self._predictor.model.hidden(rows.inputs, rows.past)
            if rows.places is not None:
                hidden = hidden[rows.places.flatten()]
            logits = self._predictor.model.head(hidden).float()  # (L * c, V)
        with torch.set_grad_enabled(learns):
            log_p = F.log_softmax(logits, dim=-1).gather(1, wanted.flatten(0, 1).clamp(min=0))
            log_p = log_p.view(wanted.shape)
            self._loss = None if weights is None else -(log_p[..., 0] * weights).sum()
        self._has_priced = True
        self.reading.done()
        found = log_p.detach().cpu().double().numpy()
        return {self.lanes[turn.lane]: found[turn.lane, : turn.count] for turn in turns}

    def learn(self, turns: Sequence[Turn]) -> None:
        """One step of each lane whose document goes on, from the loss of what was priced last."""
        if self._loss is not None:
            self._loss.backward()
        elif not (self._has_priced and self._lora.settings.decay_all):
            return
        self._loss = None
        goes_on = np.zeros(len(self.lanes), dtype=np.bool_)
        goes_on[[turn.lane for turn in turns if not turn.is_last]] = True
        self._lora.update(upload(goes_on, self._predictor.device))

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

    def _wanted(self, targets: Tensor, turns: Sequence[Turn], hints: Hints) -> Tensor:
        num_hints = max((hints[self.lanes[turn.lane]].shape[1] for turn in turns), default=0)
        if not num_hints:
            return targets[..., None]
        table = np.full((*targets.shape, num_hints), -1, dtype=np.int64)
        for turn in turns:
            table[turn.lane, : turn.count] = hints[self.lanes[turn.lane]]
        return torch.cat((targets[..., None], upload(table, targets.device)), dim=-1)

    def _weights(self, targets: Tensor, turns: Sequence[Turn]) -> Tensor:
        """(L, c): each lane's mean over its chunk, nothing where a document ends (PR 1530)."""
        weights = np.zeros(targets.shape, dtype=np.float32)
        for turn in turns:
            if not turn.is_last:
                weights[turn.lane, : turn.count] = 1 / turn.count
        return upload(weights, targets.device)
