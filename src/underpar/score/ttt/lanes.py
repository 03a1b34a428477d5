"""This rank's lanes: they read their next chunks, price them, and learn from what was priced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from underpar.core.runtime import Clock
from underpar.infer.lora import Lora
from underpar.infer.predictor import Predictor
from underpar.infer.step import StepInputs, StepOutputs, forward_step
from underpar.kernels.attention import BACKENDS, backend_of
from underpar.model.gpt import Block
from underpar.model.network import products
from underpar.score.ttt.forward import CapturedStep, CompiledForward, Forward
from underpar.score.ttt.reading import HostInputs, KeptLanes, Reading, StepShapes, upload
from underpar.score.ttt.schedule import Chunk

# Lane -> tokens (count, K) that experts propose for the targets of its chunk; -1 for none.
Hints = Mapping[int, np.ndarray]


class LaneBatch:
    """The lanes of this rank, by number, as rows 0, 1, ... of one batch."""

    def __init__(
        self, predictor: Predictor, reading: Reading, lora: Lora, forward: Forward, clock: Clock
    ) -> None:
        """`forward` is the forward pass of steps that learn: `forward_step`, or compiled."""
        self.reading = reading
        self.lora = lora
        self._predictor = predictor
        self._forward = forward
        self._clock = clock
        self._grads: Tensor | None = None
        self._has_priced = False
        self._shapes: StepShapes | None = None
        self._captured: dict[int, CapturedStep] = {}

    @property
    def lanes(self) -> Sequence[int]:
        """The number of each row's lane."""
        return self.lora.lanes

    def rows_of(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks of this rank's lanes, with rows in place of lanes."""
        rows = {lane: row for row, lane in enumerate(self.lanes)}
        pairs = [(chunk, rows[chunk.lane]) for chunk in chunks if chunk.lane in rows]
        return [chunk if chunk.lane == row else replace(chunk, lane=row) for chunk, row in pairs]

    def shrink(self, chunks: Sequence[Chunk]) -> None:
        """Drop the lanes without a chunk, if they are half of all lanes or more.

        A lane without a chunk gets none later: documents have run out. Captured steps have a fixed
        number of lanes, so captured batches do not shrink.
        """
        active = [chunk.lane for chunk in chunks]
        few = 0 < len(active) <= len(self.lanes) // 2 and not self._captured
        if few and isinstance(self.reading, KeptLanes):
            self.reading.keep(active)
            self.lora.keep(torch.tensor(active, device=self._predictor.device))

    def renew(self) -> None:
        """Start with new adapters, between two groups of documents."""
        self.lora.renew()
        self._grads, self._has_priced = None, False

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Reset adapters and caches of the lanes in which a document begins."""
        starts = [chunk for chunk in chunks if chunk.first == 0]
        if starts:
            rows, documents = [c.lane for c in starts], [c.document for c in starts]
            self.lora.reset(rows, documents)
        if isinstance(self.reading, KeptLanes):
            self.reading.restart(chunks)

    def reread(self, chunks: Sequence[Chunk], adapted: bool = True) -> None:
        """Fill the caches of lanes that have no room for their chunk; again: nothing."""
        if not isinstance(self.reading, KeptLanes):
            return
        reread = self.reading.reread(chunks)
        if reread is None:
            return
        predictor = self._predictor
        rows = upload(np.array(reread.lanes), predictor.device)
        precision = products(predictor.device, predictor.dtype)
        with torch.no_grad(), precision, self.adapters(adapted, rows):
            predictor.model.hidden(reread.tokens, reread.cache)
        self.reading.commit_reread(reread)

    def price(
        self, chunks: Sequence[Chunk], hints: Hints, adapted: bool = True
    ) -> dict[int, np.ndarray]:
        """Lane -> log-probabilities (count, 1 + K) of its targets and hints.

        Without `adapted` the adapters have no effect. The gradients of the loss are computed here,
        while the prices travel from the device; only `learn` uses them.
        """
        self.reread(chunks, adapted)
        learns = adapted and any(not chunk.is_last for chunk in chunks)
        shapes = self._shapes if adapted else None
        host = self.reading.host_inputs(chunks, len(self.lanes), shapes)
        wanted = self._wanted(host.targets, chunks, hints)  # (L, c, 1 + K)
        inputs = self._upload(host, wanted, self._weights(host.targets, chunks))
        captured = self._captured.get(inputs.width) if adapted else None
        if captured is not None:
            prices = Download(captured.price(inputs))
        else:
            log_p, loss = self._run(inputs, adapted, learns)
            prices = Download(log_p.detach())
        self._grads, self._has_priced = None, True
        if learns:
            with self._clock.phase("adapt"):
                self._grads = captured.gradients() if captured else self.lora.differentiate(loss)
        log_probs = prices.wait().double().numpy().reshape(wanted.shape)
        return {self.lanes[chunk.lane]: log_probs[chunk.lane, : chunk.count] for chunk in chunks}

    def _run(self, inputs: StepInputs, adapted: bool = True, learns: bool = True) -> StepOutputs:
        """The predictor's outputs; lanes then continue after these inputs."""
        forward = self._forward if learns else forward_step
        with torch.set_grad_enabled(learns), self.adapters(adapted):
            cache = self.reading.cache(inputs.counts, inputs.width)
            outputs = self._predictor.price_step(forward, inputs, cache)
        self.reading.commit()
        return outputs

    def learn(self, chunks: Sequence[Chunk]) -> None:
        """One optimiser step of each lane whose document goes on, on what was priced last."""
        if self._grads is None and not (self._has_priced and self.lora.settings.decay_all):
            return
        goes_on = np.zeros(len(self.lanes), dtype=np.bool_)
        goes_on[[chunk.lane for chunk in chunks if not chunk.is_last]] = True
        self.lora.update(upload(goes_on, self._predictor.device), self._grads)
        self._grads = None

    def capture(self, shapes: StepShapes, num_hints: int) -> None:
        """Compile and capture steps of these shapes; no lane reads, learns or draws by it."""
        self._shapes = shapes
        pool = torch.cuda.graph_pool_handle() if self.is_capturable() else None
        for width in reversed(shapes.widths):
            inputs = self._empty_inputs(width, num_hints)
            if not self._captured:
                # An eager step comes first: it makes the buffers that a compiled step expects.
                self._run(inputs, learns=False)
                if isinstance(self._forward, CompiledForward):
                    with self._forward.regions.trace_only():
                        self._run(inputs)
            self._captured[width] = CapturedStep(self._run, self.lora.differentiate, inputs, pool)
        self.lora.warm_up()

    def is_capturable(self) -> bool:
        """True if steps can become CUDA graphs."""
        device, modules = self._predictor.device, self._predictor.model.modules()
        if device.type != "cuda":
            return False
        if isinstance(self.reading, KeptLanes):
            return True
        # Packed rows: some backends, those of fp32 among them, cut by boundaries on the host.
        windows = {bool(part.attn.window) for part in modules if isinstance(part, Block)}
        names = [backend_of(device, self._predictor.dtype, windowed) for windowed in windows]
        return all(BACKENDS[name].recordable for name in names)

    def _empty_inputs(self, width: int, num_hints: int) -> StepInputs:
        """The inputs of a step in which no lane reads."""
        host = self.reading.empty_inputs(len(self.lanes), width)
        assert self._shapes is not None
        num_targets = width if host.rows is None else self._shapes.num_targets
        shape = (len(self.lanes), num_targets)
        rows = None if host.rows is None else np.zeros(shape, dtype=np.int64)
        wanted = np.zeros((*shape, 1 + num_hints), dtype=np.int64)
        return self._upload(replace(host, rows=rows), wanted, np.zeros(shape, dtype=np.float32))

    def state(self) -> dict[str, Any]:
        """What lanes have read and learnt, between two steps."""
        state = {"reading": self.reading.state(), "lora": self.lora.state()}
        return {**state, "has_priced": self._has_priced}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state, with the lanes that it has."""
        self.reading.load(state["reading"])
        self.lora.load(state["lora"])
        self._has_priced = state["has_priced"]

    def adapters(
        self, adapted: bool = True, rows: Tensor | None = None
    ) -> AbstractContextManager[object]:
        """Inside, the adapters act: those of all lanes, or of some rows."""
        return self.lora.attached(rows) if adapted else nullcontext()

    def _upload(self, host: HostInputs, wanted: np.ndarray, weights: np.ndarray) -> StepInputs:
        device = self._predictor.device
        return StepInputs(
            upload(host.tokens.ravel(), device),
            upload(host.counts, device),
            None if host.rows is None else upload(host.rows.ravel(), device),
            upload(wanted.reshape(-1, wanted.shape[-1]), device),
            upload(weights.ravel(), device),
        )

    def _wanted(self, targets: np.ndarray, chunks: Sequence[Chunk], hints: Hints) -> np.ndarray:
        """(L, c, 1 + K) targets and hints."""
        num_hints = max((hints[self.lanes[chunk.lane]].shape[1] for chunk in chunks), default=0)
        wanted = np.full((*targets.shape, 1 + num_hints), -1, dtype=np.int64)
        wanted[..., 0] = targets
        for chunk in chunks if num_hints else ():
            wanted[chunk.lane, : chunk.count, 1:] = hints[self.lanes[chunk.lane]]
        return wanted

    def _weights(self, targets: np.ndarray, chunks: Sequence[Chunk]) -> np.ndarray:
        """(L, c) weights in the loss: the mean over each lane's chunk, 0 where a document ends.

        That is the loss of PR 1530.
        """
        weights = np.zeros(targets.shape, dtype=np.float32)
        for chunk in chunks:
            if not chunk.is_last:
                weights[chunk.lane, : chunk.count] = 1 / chunk.count
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
        """The values, once they have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._values
