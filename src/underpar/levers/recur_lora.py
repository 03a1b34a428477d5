"""RecurLoRA: repeated visits of a layer differ by low-rank adapters and by gains of their own.

A repeated visit computes y + B (A x) at the chosen products, and multiplies what attention and the
MLP give by one gain each. With B = 0 and gains of 1, where training starts, it is the plain loop.
At "o" and "mlp" the adapter reads what the branch read, beside its other products. Adapters are
trained with AdamW: under Muon ranks above 1 diverged (PR 1096).

Source: PR 1894, which tried it and dropped it, as it did not pay for its bytes; PR 1181 and PR 1552
(rank 2 at attention's products, on repeated visits only); relaxed recursive transformers,
arXiv:2410.20672.

Legal: ordinary weights, the same for all tokens.

Cost: rank (in + out) weights per repeated visit and product, 0.9 % of those of attention at
rank 2, two thin products for each, and two gains per repeated visit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.recipe import ModelSpec, require
from underpar.seams import Visit, check_sites

STAGE = "model"
NEEDS = ("loop",)

# Products that may have adapters, by the names of the seam `adjust`; the last two have gains.
PRODUCTS = ("q", "k", "v", "o", "mlp")


@dataclass(frozen=True)
class Settings:
    """`sites`: number of repeated visits in the plan; each has adapters and gains of its own.
    `products`: products that get adapters: q, k, v, o, mlp.
    `rank`: rank of an adapter.
    """

    sites: int = 6
    products: tuple[str, ...] = ("q", "k", "v", "o")
    rank: int = 2

    def __post_init__(self) -> None:
        where = "levers.recur_lora."
        for key in ("sites", "rank"):
            value = getattr(self, key)
            require(0 < value <= 4096, f"{where}{key} = {value}: expected 1 to 4096")
        for product in self.products:
            known = product in PRODUCTS
            require(known, f"{where}products: {product!r} is not one of {', '.join(PRODUCTS)}")
        once = len(self.products) == len(set(self.products))
        require(once, f"{where}products = {self.products}: name each once")


TINY = (Settings(products=PRODUCTS),)


class Lever(nn.Module):
    """A and B of each product, and gains of attention and MLP, by repeated visit."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        super().__init__()
        kv_dim = spec.num_kv_heads * spec.head_dim
        outs = {"q": spec.dim, "k": kv_dim, "v": kv_dim, "o": spec.dim, "mlp": spec.dim}
        sites, rank, bound = settings.sites, settings.rank, spec.dim**-0.5
        self.a = nn.ParameterDict(
            {
                p: torch.empty(sites, rank, spec.dim).uniform_(-bound, bound)
                for p in settings.products
            }
        )
        self.b = nn.ParameterDict({p: torch.zeros(sites, outs[p], rank) for p in settings.products})
        self.gains = nn.Parameter(torch.ones(sites, 2))

    @torch.no_grad()
    def neutral_(self) -> None:
        """Set every B to 0 and every gain to 1, the plain loop."""
        for b in self.b.values():
            b.zero_()
        self.gains.fill_(1.0)

    def check(self, plan: Sequence[Visit]) -> None:
        """Refuse a number of sites that is not the number of repeated visits."""
        check_sites("recur_lora", len(self.gains), plan)

    def adjust(self, site: str, visit: Visit | None, y: Tensor, x: Tensor) -> Tensor:
        """Scale the product y (N, out) of a repeated visit, and add what its adapter makes of x."""
        if visit is None or not visit.repeat:
            return y
        if site in PRODUCTS[-2:]:
            y = self.gains[visit.site, PRODUCTS[-2:].index(site)].to(y.dtype) * y
        if site in self.a:
            a, b = (side[site][visit.site].to(y.dtype) for side in (self.a, self.b))
            y = y + F.linear(F.linear(x, a), b)
        return y
