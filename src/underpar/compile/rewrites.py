"""Other forms in which training computes a network: the same function, fewer passes over memory.

folded_scales
    The scale of a branch multiplies the last weight of the branch once per visit, not the output
    for every token. Stands back if a lever acts between the product and the scale.
fused_skips
    What levers do before a visit is in the region of the visit, so that the stream is not written
    in between (PR 2014 compiles the whole network as one graph). It costs two more graphs.
linear_loss
    Head, soft cap and cross-entropy are one operator, which stores no logits
    (`kernels/linear_loss`). Stands back if logits are more than a product and a constant cap, or if
    the loss is more than the mean over tokens; then the compiler fuses what it can.

`TracedRun` runs the first two, `train/step.py` the third. Everything else (eager training, scoring,
exact mode, export) runs the network as it is written.

Measured together: -3.88 % of a step of `h200-300s` (docs/benchmarking.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from underpar.core.runtime import Runtime
from underpar.errors import UnderparError
from underpar.kernels import linear_loss
from underpar.model.network import Network
from underpar.recipe import nearest

FOLDED_SCALES, FUSED_SKIPS, LINEAR_LOSS = "folded_scales", "fused_skips", "linear_loss"
REWRITES = (FOLDED_SCALES, FUSED_SKIPS, LINEAR_LOSS)


@dataclass(frozen=True)
class Choice:
    """The rewrites of a run; of those that a GPU run does without, why."""

    names: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """A line for each that stands back."""
        return [f"trains without {name}: {why}" for name, why in self.refused.items()]


def choose_rewrites(
    wish: str, network: Network, runtime: Runtime, loss_levers: Sequence[object] = ()
) -> Choice:
    """The rewrites for a network that trains with these levers of the loss.

    `wish` is "auto" for all that fit, "none", or names with commas; a named one that does not fit
    is refused.
    """
    if wish == "none" or (wish == "auto" and not runtime.compiled):
        return Choice()
    names = REWRITES if wish == "auto" else tuple(wish.split(","))
    for name in names:
        if name not in REWRITES:
            known = ("auto", "none", *REWRITES)
            raise UnderparError(f"no rewrite {name!r}{nearest(name, known)}")
    reasons = {name: _refuse(name, network, runtime, loss_levers) for name in names}
    reasons = {name: why for name, why in reasons.items() if why}
    if reasons and wish != "auto":
        name, why = next(iter(reasons.items()))
        raise UnderparError(f"rewrite {name!r} does not fit: {why}")
    # Elsewhere nobody misses a kernel for GPUs.
    told = reasons if runtime.device.type == "cuda" else {}
    return Choice(frozenset(names) - reasons.keys(), told)


def _refuse(name: str, network: Network, runtime: Runtime, loss_levers: Sequence[object]) -> str:
    if not runtime.compiled:
        return "the network is not compiled"
    if name == FOLDED_SCALES:
        hooks = [trunk.hooks for trunk in network.trunks]
        seams = [s for s in ("adjust", "mlp_out") if any(getattr(h, s) for h in hooks)]
        return f"levers at the seam {seams[0]!r} act before the scale" if seams else ""
    if name == LINEAR_LOSS:
        if loss_levers:
            return "levers change the loss of each token"
        if network.hooks.adjust:
            return "levers at the seam 'adjust' change logits"
        if not _has_constant_cap(network):
            return "the soft cap of a lever is no constant"
        spec = network.spec
        return linear_loss.refuse(runtime.device, runtime.dtype, spec.vocab_size, spec.softcap)
    return ""


def _has_constant_cap(network: Network) -> bool:
    """Whether logits are bounded by the constant of the spec for all of training."""
    if network.hooks.cap is None:
        return True
    lever = getattr(network.hooks.cap, "__self__", None)
    caps = [getattr(lever, name) for name in getattr(lever, "frozen", ())]
    return bool(caps) and all(float(cap) == network.spec.softcap for cap in caps)
