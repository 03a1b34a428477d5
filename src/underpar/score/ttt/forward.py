"""The compiled forward pass of a step, and a step captured as a CUDA graph.

Both run `infer.step.outputs_of`, which takes its probabilities from `infer.predictor.log_probs_of`.
That makes adapted prices those of the predictor; `tests/score/ttt/test_forward.py` holds compiled,
captured and eager prices together. The network is compiled in regions, as in training
(`compile/regions.py`). The number of lanes is fixed; the number of tokens per lane may vary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from torch import Tensor

from underpar.compile.cuda_graphs import Recording, rehearse
from underpar.compile.regions import DynamoBranches, DynamoRun, DynamoVisits, Sharing, mark_sized
from underpar.infer.step import StepInputs, StepOutputs, forward_step, outputs_of
from underpar.model.network import Network
from underpar.seams import KVCache, Stream

Forward = Callable[[Network, StepInputs, KVCache], StepOutputs]


class CompiledForward:
    """`forward_step`, compiled.

    `vary`: steps have several widths, as with windows that are read again. Such steps are long, so
    whole visits of blocks are fused. Steps of one width are short; they compile attention and MLP
    alone, in half the time.
    """

    def __init__(self, vary: bool, sharing: Sharing | None = None) -> None:
        runner = DynamoVisits if vary else DynamoBranches
        self.regions: DynamoRun = runner(sharing)
        self._vary = vary

    def __call__(self, model: Network, inputs: StepInputs, cache: KVCache) -> StepOutputs:
        """The log-probabilities and the loss of a step."""
        # The compiler treats a size of one as a constant: that of a lane, or of a lane without its
        # last token. So steps with fewer than three tokens per lane are not compiled.
        if self._vary and min(len(inputs.tokens), len(inputs.wanted)) < 3 * len(inputs.counts):
            return forward_step(model, inputs, cache)
        rest = (inputs.rows, inputs.wanted, inputs.weights)
        if self._vary:
            mark_sized(*rest)
        stream = model.run_blocks(inputs.tokens, cache, self.regions)
        outputs: StepOutputs = self.regions.end(_finish, model, stream, *rest)
        return outputs


def _finish(
    model: Network, stream: Stream, rows: Tensor | None, wanted: Tensor, weights: Tensor
) -> StepOutputs:
    return outputs_of(model, model.finish(stream), rows, wanted, weights, fused=True)


class CapturedStep:
    """Forward and backward pass of steps of one width, captured once and then replayed.

    A step launches thousands of kernels, and launching them one by one takes longer than running
    them. On a GPU a capture is a CUDA graph, one launch. On other devices, and with attention that
    needs the host, the step runs again from the same buffers.
    """

    def __init__(
        self,
        forward: Callable[[StepInputs], StepOutputs],
        differentiate: Callable[[Tensor], Tensor],
        inputs: StepInputs,
        pool: Any,
    ) -> None:
        """`inputs` becomes the buffer of all steps. Its counts and weights are zero, so `forward`
        changes no state and may run as often as a capture needs.

        `pool` is memory that captures share, as only one of them runs at a time; None captures
        nothing.
        """
        self._inputs = inputs
        self._forward, self._differentiate = forward, differentiate
        rehearse(self._run_forward, self._run_backward, device=inputs.tokens.device)
        self._prices = Recording(self._run_forward, pool)
        self._gradients = Recording(self._run_backward, pool)

    def _run_forward(self) -> None:
        self._log_p, self._loss = self._forward(self._inputs)

    def _run_backward(self) -> None:
        self._grads = self._differentiate(self._loss)

    def price(self, inputs: StepInputs) -> Tensor:
        """Log-probabilities (n, 1 + K); the next step overwrites them."""
        for field in fields(inputs):
            values, buffer = getattr(inputs, field.name), getattr(self._inputs, field.name)
            if values is not None:
                buffer.copy_(values, non_blocking=True)
        self._prices.replay()
        return self._log_p.detach()

    def gradients(self) -> Tensor:
        """Gradients of the loss of what was priced last; the next step overwrites them."""
        self._gradients.replay()
        return self._grads
