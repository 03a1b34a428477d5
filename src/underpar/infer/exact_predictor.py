"""A predictor whose probabilities are integers, the same ones on every machine.

A distribution is integer frequencies out of 2^FREQ_BITS, one at least for each token, as their
running sums: token t owns the numbers from the end of token t - 1 to its own end. The forward pass
over a pack and the steps of lanes give the same integers, bit for bit, whatever the batch, the
number of lanes and threads, the instruction set or the device. So a text is priced and encoded in
one pass, and a decoder steps through it elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from underpar.data.batch import Batch, segments_from_starts
from underpar.errors import RuleError
from underpar.infer.exact_attention import POINTS, ExactLanes, ExactPack, weights_of
from underpar.infer.exact_math import divide
from underpar.infer.exact_mode import ExactMode
from underpar.infer.experts import Ints
from underpar.infer.predictor import Predictor, Stepper
from underpar.model.network import Network
from underpar.seams import BOS_ID

FREQ_BITS = 28
TOTAL = 1 << FREQ_BITS
# Bits of the largest probability before it is scaled: sums over 2^16 tokens are exact.
_WEIGHT_BITS = 36
# Logits made at a time, and tokens of one forward pass.
LOGITS, CUDA_LOGITS = 1 << 18, 1 << 27
TOKENS, CUDA_TOKENS = 1 << 11, 1 << 16
# Tokens before a pack that its first token may look back on, as in score/scorer.py.
LOOK_BACK = 2


def ends_of(logits: Tensor) -> Tensor:
    """The ends (n, V) of tokens' intervals, integers in float64, of logits (n, V)."""
    vocab_size = logits.size(-1)
    weights = weights_of(logits * POINTS, _WEIGHT_BITS)
    share = divide(float(TOTAL - vocab_size), weights.sum(-1, keepdim=True))
    ends = weights.mul_(share).floor_().add_(1.0).cumsum(-1)
    # The last token has what rounding down left over.
    ends[:, -1] = TOTAL
    return ends


class ExactPredictor(Predictor):
    """A frozen network in exact arithmetic."""

    def __init__(self, model: Network, device: torch.device) -> None:
        super().__init__(model.double(), device, [])
        self._mode = ExactMode()

    @torch.no_grad()
    def ends(self, hidden: Tensor) -> Tensor:
        """The ends (n, V) of intervals after hidden states (n, dim)."""
        with self._mode:
            logits = self.model.head(hidden)
        return ends_of(logits)

    @torch.no_grad()
    def _hidden(self, batch: Batch) -> Tensor:
        batch = batch.to(self.device)
        pack = ExactPack(batch.segments)
        with self._mode:
            return self.model.hidden(batch.inputs, pack)

    def _slices(self, hidden: Tensor) -> Sequence[Tensor]:
        most = CUDA_LOGITS if hidden.is_cuda else LOGITS
        return hidden.split(max(1, most // self.model.spec.vocab_size))

    def intervals(self, batch: Batch, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Starts and frequencies (N, K) int64 of tokens `wanted` (N, K) after a batch's inputs."""
        parts = self._slices(self._hidden(batch))
        wanted = wanted.to(self.device)
        pairs = [
            interval_of(self.ends(part), tokens)
            for part, tokens in zip(parts, wanted.split(len(parts[0])), strict=True)
        ]
        starts, freqs = (torch.cat(column) for column in zip(*pairs, strict=True))
        return starts, freqs

    def price(self, batch: Batch, tokens: Tensor | None = None) -> Tensor:
        """Log-probabilities (N, 1 + K) in nats: of the targets, then of `tokens` (N, K)."""
        wanted = batch.targets.to(self.device)[:, None]
        if tokens is not None:
            wanted = torch.cat((wanted, tokens.to(self.device)), dim=1)
        _, freqs = self.intervals(batch, wanted.clamp(min=0))
        return _nats(freqs).masked_fill(wanted < 0, 0.0)

    def log_probs(self, batch: Batch) -> Tensor:
        """Log-probabilities (N, V) in nats of every possible next token."""
        ends = torch.cat([self.ends(part) for part in self._slices(self._hidden(batch))])
        return _nats(ends.diff(prepend=torch.zeros_like(ends[:, :1])))

    def learn(self, *_: object) -> None:
        """Refused: a network that learns is not exact."""
        raise RuleError("exact mode covers the frozen network: leave out --exact or --adapt")

    def stream_intervals(
        self, targets: Ints, begins: Ints, on_tokens: Callable[[int], None] | None = None
    ) -> tuple[Ints, Ints]:
        """Starts and frequencies (n,) of targets (n,); `begins` are the first of each stream.

        A stream begins with a BOS before its first target. After a target BOS a document begins.
        """
        inputs = np.concatenate(([BOS_ID], targets[:-1]))
        inputs[begins] = BOS_ID
        cu = segments_from_starts(inputs == BOS_ID, len(inputs), self.context).cu.numpy()
        most = CUDA_TOKENS if self.device.type == "cuda" else TOKENS
        starts, freqs = (np.empty(len(targets), dtype=np.int64) for _ in range(2))
        first = 0
        while first < len(cu) - 1:
            # Whole segments, one at least.
            last = max(first + 1, int(np.searchsorted(cu, cu[first] + most, side="right")) - 1)
            begin, end = int(cu[first]), int(cu[last])
            before = min(LOOK_BACK, begin)
            cuts = np.append(0, cu[first:last] - begin + before)
            rows = slice(begin - before, end)
            batch = Batch(
                torch.from_numpy(inputs[rows]),
                torch.from_numpy(targets[rows]),
                segments_from_starts(cuts, end - begin + before, self.context),
            )
            pair = self.intervals(batch, batch.targets[:, None])
            for whole, part in zip((starts, freqs), pair, strict=True):
                whole[begin:end] = part[before:, 0].cpu().numpy()
            if on_tokens:
                on_tokens(end - begin)
            first = last
        return starts, freqs

    def lane_bytes(self, length: int) -> int:
        """Memory of the keys and values of a lane that reads `length` tokens."""
        spec = self.model.spec
        row = 2 * 8 * spec.num_kv_heads * (spec.head_dim + 1)
        return len(self.model.plan) * row * min(length, self.context)

    def lanes(self, num_lanes: int) -> ExactLanes:
        """Lanes that have read nothing."""
        return ExactLanes(self.model.spec, num_lanes, self.device)

    @torch.no_grad()
    def step(self, tokens: Tensor, lanes: ExactLanes) -> Tensor:
        """Feed tokens (L,), one per lane; returns the ends (L, V) of what follows."""
        with self._mode:
            hidden = self.model.hidden(tokens, lanes)
        return self.ends(hidden)

    def stepper(self, num_lanes: int) -> Stepper:
        """Refused: exact lanes give integers, and `step` is theirs."""
        raise RuleError("exact mode steps with lanes of its own")


def interval_of(ends: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Starts and frequencies int64 of tokens (n, K), from ends (n, V)."""
    before = ends.gather(1, (tokens - 1).clamp(min=0)).masked_fill_(tokens == 0, 0.0)
    return before.long(), (ends.gather(1, tokens) - before).long()


def _nats(freqs: Tensor) -> Tensor:
    return (freqs.double() / TOTAL).log()
