"""How fast a run is: tokens a second, the share of the device's peak, where the time goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from underpar.core.runtime import Clock
from underpar.schema import ModelSpec
from underpar.seams import Visit

# Dense bf16 operations a second with fp32 sums, from the makers' data sheets. Words of the device's
# name; all must be there, and the first line that fits counts.
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


def flops_per_token(spec: ModelSpec, plan: Sequence[Visit], context: float) -> float:
    """Operations that training takes a token, forward and backward, head included.

    Each multiply-add of a matrix product counts two, and the backward pass twice the forward one
    (PaLM, arXiv:2204.02311, appendix B), but a query only meets the keys before it. Pieces are
    taken as full, `context` tokens long (their mean where they differ); what levers add is left
    out, and so are the windows by which they shorten attention.
    """
    kv_dim = spec.num_kv_heads * spec.head_dim
    weights = 2 * spec.dim * spec.dim + 2 * spec.dim * kv_dim + 2 * spec.dim * spec.mlp_dim
    num_keys = (context + 1) / 2
    visit = 2 * weights + 4 * spec.dim * num_keys
    return 3 * (len(plan) * visit + 2 * spec.dim * spec.vocab_size)


def peak_of(name: str) -> float | None:
    """Peak operations a second of a device by its name; None for one that is not in the table."""
    words = set(name.upper().replace("-", " ").split())
    return next((peak for wanted, peak in PEAK_FLOPS if words >= set(wanted.split())), None)


def peak_flops(device: torch.device) -> float | None:
    """Peak bf16 operations a second of a device, where known."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device))


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
        """Fields of a metrics line: speed since the last one, and seconds by phase of this start.

        A GPU works behind the program, so its time shows in the phase that waits for it.
        """
        speed = (tokens - self._tokens) / max(seconds - self._seconds, 1e-9)
        self.start(tokens, seconds)
        line = {"tokens_per_second": speed}
        if self.peak:
            line["mfu"] = flops_per_token * speed / self.peak
        return line | {f"{name}_seconds": spent for name, spent in self.clock.read().items()}
