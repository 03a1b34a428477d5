"""How fast a run is: tokens per second, the share of the device's peak, where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from underpar.core.runtime import Clock, Runtime
from underpar.model.network import Network
from underpar.schema import ModelSpec
from underpar.seams import Visit

# Dense bf16 operations per second with fp32 sums, from the makers' data sheets. A line fits if the
# device's name has all of its words; the first line that fits counts.
PEAK_FLOPS = (
    ("H100 PCIE", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("GH200", 989e12),
    ("H800", 989e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("A40", 150e12),
    ("A10", 125e12),
    ("RTX 5090", 209e12),
    ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
)


def network_flops(network: Network, context: float) -> float:
    """Floating-point operations of training per token, forward and backward, head included.

    A trunk that reads chunks of several tokens counts for its share of each.
    """
    trunks = (
        block_flops(trunk.spec, trunk.plan, context / trunk.tokens_per_position)
        / trunk.tokens_per_position
        for trunk in network.trunks
    )
    return sum(trunks) + 3 * network.flops_outside


def flops_per_token(spec: ModelSpec, plan: Sequence[Visit], context: float) -> float:
    """`network_flops` of a GPT, from its shapes and its plan."""
    return block_flops(spec, plan, context) + 3 * 2 * spec.dim * spec.vocab_size


def block_flops(spec: ModelSpec, plan: Sequence[Visit], context: float) -> float:
    """Floating-point operations of training per token in the blocks.

    A multiply-add of a matrix product counts as two operations, and the backward pass as twice the
    forward pass (PaLM, arXiv:2204.02311, appendix B). Unlike there, a query only counts the keys
    before it. Every piece is taken to have `context` tokens; use the mean if lengths differ. The
    operations and the attention windows of levers are left out.
    """
    kv_dim = spec.num_kv_heads * spec.head_dim
    mlp_dims = sum(spec.mlp_dims[visit.layer] for visit in plan)
    weights = len(plan) * (2 * spec.dim * spec.dim + 2 * spec.dim * kv_dim)
    weights += 2 * spec.dim * mlp_dims
    num_keys = len(plan) * (context + 1) / 2
    return 3 * (2 * weights + 4 * spec.dim * num_keys)


def peak_of(name: str) -> float | None:
    """Peak operations per second of the device called `name`; None if the table lacks it."""
    words = set(name.upper().replace("-", " ").split())
    return next((peak for wanted, peak in PEAK_FLOPS if words >= set(wanted.split())), None)


def peak_flops(device: torch.device) -> float | None:
    """Peak bf16 operations per second of a device; None if unknown."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def matmul_flops(runtime: Runtime) -> float:
    """Operations per second of a product of square matrices, in the precision of training."""
    size = 8192 if runtime.device.type == "cuda" else 1024
    a = torch.randn(size, size, dtype=runtime.dtype, device=runtime.device)
    return 2 * size**3 / best_seconds(lambda: a @ a, runtime)


def best_seconds(work: Callable[[], object], runtime: Runtime) -> float:
    """The shortest time that some work takes."""
    best = float("inf")
    for _ in range(5):
        runtime.synchronize()
        started = time.perf_counter()
        work()
        runtime.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


# Far slower: training does less than this share of what a product of matrices reaches. The demo
# does a third on two idle cores, and the overlay cpu a tenth, as its matrices are tiny.
SLOW_SHARE = 0.03
# A stretch so long is judged, because a short one may wait for a file or a neighbor.
WATCHED_SECONDS = 10.0


class SpeedWatch:
    """Says once if a run is far slower than the figure that the doctor prints, in FLOP/s."""

    def __init__(self, measure: Callable[[], float]) -> None:
        # Not measured before a stretch is over: most runs of tests are shorter.
        self._measure = measure
        self._figure = 0.0
        self._begin: tuple[float, float] | None = None
        self._is_told = False

    def see(self, seconds: float, flops: float) -> str | None:
        """A line to print; the training clock and the operations of all steps are those so far."""
        begin = self._begin = self._begin or (seconds, flops)
        if seconds - begin[0] < WATCHED_SECONDS or self._is_told:
            return None
        self._begin = seconds, flops
        self._figure = self._figure or self._measure()
        speed = (flops - begin[1]) / (seconds - begin[0])
        if speed >= SLOW_SHARE * self._figure:
            return None
        self._is_told = True
        return (
            f"far slower than this machine is: training does {speed / 1e9:,.1f} GFLOP/s, products "
            f"of matrices reach {self._figure / 1e9:,.0f} ('underpar doctor'); is another process "
            "busy, or memory short?"
        )


class Meter:
    """Speed between two logged steps; `peak` is that of all ranks together."""

    def __init__(self, clock: Clock, peak: float | None = None) -> None:
        self.clock = clock
        self.peak = peak
        self._tokens, self._seconds = 0, 0.0

    def start(self, tokens: int, seconds: float) -> None:
        """Measure from here: the tokens trained on and the training clock of a resumed run."""
        self._tokens, self._seconds = tokens, seconds

    def read(self, tokens: int, seconds: float, flops_per_token: float) -> dict[str, float]:
        """Fields of a metrics line: speed since the last line, and seconds per phase of this start.

        A GPU runs later than the program that launches its work, so its time counts in the phase
        that waits for it.
        """
        speed = (tokens - self._tokens) / max(seconds - self._seconds, 1e-9)
        self.start(tokens, seconds)
        line = {"tokens_per_second": speed}
        if self.peak:
            line["mfu"] = flops_per_token * speed / self.peak
        return line | {f"{name}_seconds": spent for name, spent in self.clock.read().items()}
