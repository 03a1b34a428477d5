"""Where a run will end, from what it has logged so far.

The law is L(p) = a - b ln p, the power law a + b p^-c for small c, by least squares over what was
logged from a quarter of the present progress on. Two numbers are all that noisy losses decide: a
fitted exponent, a straight line and a term for the falling rate did worse on the runs below.

Of the HELD-OUT text, where it was priced on the way: its bits per byte at the end, with the weights
that are packed. The fall is fitted, and begins at the last price, which has no noise. On four runs
of 486 to 1,420 steps, up to 1.8 passes over the text, priced ten times, the error had a root mean
square of 28 mBPB at half of the run, 19 at 0.7, 22 at 0.8 and 6 at 0.9. This form was chosen on
the same four: a line that need not begin there has 22 at half of the run, but 19 at 0.9.

Of the TRAINING text always: the mean loss over the last tenth of training, as the live weights meet
it. A run of several passes has seen that text before, so the held-out text will cost more: on the
same four runs it was 32 mBPB off the held-out text at half of the run, and 49 at 0.9. In nats, on
22 runs of 236 to 839 steps, 1,024 tokens each, its error had a root mean square of 0.39 at 0.3 of
the run, 0.14 at 0.5, 0.11 at 0.7 and 0.10 at 0.85. On published curves, one micro-batch every 500
steps, it was below 0.03 nats at 0.7 for PR 2014 and PR 1219, and up to 0.24 for others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

NUM_BINS = 100
FIRST_SHARE = 0.3
# Of the present progress: earlier losses say little about the rest.
FITTED_FROM = 0.25
# The middle of the last tenth.
END_SHARE = 0.95
# Nothing is fitted to fewer.
FEWEST_BINS = 3
FEWEST_PRICES = 2

# Weight, x, y.
Point = tuple[float, float, float]


class Forecast:
    """Takes logged losses in nats per token; the cost does not grow with their number.

    `tokens_per_byte` of the training text turns their forecast into bits per byte of it.
    """

    def __init__(self, tokens_per_byte: float) -> None:
        self.tokens_per_byte = tokens_per_byte
        self._sums = [[0, 0.0, 0.0] for _ in range(NUM_BINS)]
        self._progress = 0.0
        # ln progress, bits per byte of the held-out text.
        self._prices: list[tuple[float, float]] = []

    def see(self, line: Mapping[str, float]) -> dict[str, float]:
        """Take a line of metrics; returns the forecasts to add to it."""
        self.add(line["progress"], line["loss"])
        price = line.get("average_val_bpb", line.get("val_bpb"))
        if price is not None and math.isfinite(price) and line["progress"] > 0:
            self._prices.append((math.log(line["progress"]), price))
        forecasts = {"forecast_bpb": self.final_bpb(), "forecast_train_bpb": self.final_train_bpb()}
        return {name: bpb for name, bpb in forecasts.items() if bpb is not None}

    def add(self, progress: float, loss: float) -> None:
        """A logged loss at this progress, from 0 to 1."""
        if progress <= 0 or not math.isfinite(loss):
            return
        self._progress = max(self._progress, progress)
        sums = self._sums[min(int(progress * NUM_BINS), NUM_BINS - 1)]
        sums[0] += 1
        sums[1] += math.log(progress)
        sums[2] += loss

    def final(self) -> float | None:
        """The mean loss of the last tenth of the run; None before 0.3 of it."""
        if self._progress < FIRST_SHARE:
            return None
        first = int(self._progress * FITTED_FROM * NUM_BINS)
        points = [(n, x / n, y / n) for n, x, y in self._sums[first:] if n]
        if len(points) < FEWEST_BINS:
            return None
        return _extrapolate(points, math.log(END_SHARE))

    def final_train_bpb(self) -> float | None:
        """The same loss in bits per byte of the training text, not of the held-out one."""
        nats = self.final()
        return None if nats is None else nats / math.log(2) * self.tokens_per_byte

    def final_bpb(self) -> float | None:
        """Bits per byte of the held-out text at the end; None unless it was priced twice."""
        if self._progress < FIRST_SHARE or len(self._prices) < FEWEST_PRICES:
            return None
        first = math.log(self._progress * FITTED_FROM)
        recent = sum(x >= first for x, _ in self._prices)
        points = [(1.0, *price) for price in self._prices[-max(recent, FEWEST_PRICES) :]]
        _, x, last = points[-1]
        return last - _slope(points) * x


def _extrapolate(points: list[Point], x_end: float) -> float:
    """The line through the points by least squares, at `x_end`; it may not rise."""
    mean_x, mean_y = _means(points)
    return mean_y + _slope(points) * (x_end - mean_x)


def _slope(points: list[Point]) -> float:
    mean_x, mean_y = _means(points)
    spread = sum(n * (x - mean_x) ** 2 for n, x, _ in points)
    return min(sum(n * (x - mean_x) * (y - mean_y) for n, x, y in points) / spread, 0.0)


def _means(points: list[Point]) -> tuple[float, float]:
    total = sum(n for n, _, _ in points)
    return sum(n * x for n, x, _ in points) / total, sum(n * y for n, _, y in points) / total
