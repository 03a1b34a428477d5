"""The order of block visits, as data: which layer, how often before, in which half."""

from __future__ import annotations

from functools import lru_cache

from underpar.seams import Visit


@lru_cache(maxsize=64)
def make_plan(order: tuple[int, ...]) -> tuple[Visit, ...]:
    """One visit for each entry of `order`; the first half (rounded down) is the encoder."""
    half = len(order) // 2
    seen: dict[int, int] = {}
    visits, num_sites = [], 0
    for slot, layer in enumerate(order):
        repeat = seen.get(layer, 0)
        seen[layer] = repeat + 1
        site = num_sites if repeat else -1
        num_sites += repeat > 0
        visits.append(Visit(slot, layer, repeat, site, slot - half if slot >= half else -1))
    return tuple(visits)
