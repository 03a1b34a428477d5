"""Learn each document while it is scored: low-rank adapters, trained chunk by chunk.

The adapters of a document are small products beside the model's own, at chosen sites of every visit
and at the head. A chunk of tokens is priced, then learned from, then the next one is priced; the
last is priced only. Source: PR 77, PR 1530 (one set a document, 11 mBPB), PR 1767 (A stays warm
from document to document), PR 2014 (these sites and values); LoRA, arXiv:2106.09685; score first as
ruled in PR 549. Legal: a token is priced before anything learns from it, and with kept keys the
size of a chunk depends on the place in the document alone, which a decoder knows too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from underpar.recipe import ModelSpec, require

STAGE = "infer"
# What scores with it, by name: the code of other ways to score is not counted for them.
ENGINE = "underpar.score.ttt.scorer"

SITES = ("q", "k", "v", "o", "mlp", "head")


@dataclass(frozen=True)
class Settings:
    """AdamW without momentum on adapters of `rank`, scaled by `alpha` / rank, at `sites`.

    `chunk`: tokens between updates; `short`: "limit:chunk", smaller chunks up to a limit of tokens;
    `warm`: a lane's next document starts from the A of its last; `lanes`: documents side by side;
    `keys`: "kept" from chunk to chunk, or "fresh", the whole window read again for every chunk;
    `decay_all`: documents that have ended decay too, as published, which the warm A of the next one
    then shows.
    """

    sites: tuple[str, ...] = ("k", "o", "mlp", "head")
    rank: int = 80
    alpha: float = 144.0
    lr: float = 7.5e-5
    decay: float = 0.5
    decay_all: bool = False
    beta2: float = 0.99
    eps: float = 1e-10
    chunk: int = 48
    short: tuple[str, ...] = ("256:8", "2000:24")
    warm: bool = True
    lanes: int = 64
    keys: str = "kept"
    seed: int = 0

    def __post_init__(self) -> None:
        where = "levers.lora_ttt."
        for site in self.sites:
            require(site in SITES, f"{where}sites: {site!r} is not one of {', '.join(SITES)}")
        once = 0 < len(self.sites) == len(set(self.sites))
        require(once, f"{where}sites = {self.sites}: name one or more, each once")
        for key in ("rank", "chunk", "lanes"):
            value = getattr(self, key)
            require(value > 0, f"{where}{key} = {value}: expected at least 1")
        for key in ("alpha", "lr", "decay", "seed"):
            value = getattr(self, key)
            require(value >= 0, f"{where}{key} = {value}: expected 0 or more")
        shrink = self.lr * self.decay
        require(shrink < 1, f"{where}lr * decay = {shrink}: expected less than 1")
        require(0 < self.beta2 < 1, f"{where}beta2 = {self.beta2}: expected between 0 and 1")
        require(self.eps > 0, f"{where}eps = {self.eps}: expected more than 0")
        for entry in self.short:
            pair = re.fullmatch(r"[1-9]\d{0,8}:[1-9]\d{0,8}", entry)
            require(pair is not None, f"{where}short: {entry!r} is not 'limit:chunk', as '256:8'")
        known = self.keys in ("kept", "fresh")
        require(known, f"{where}keys = {self.keys!r}: expected 'kept' or 'fresh'")


@dataclass(frozen=True)
class LoraTTT:
    """The settings; whoever scores documents builds the adapters."""

    settings: Settings

    engine = ENGINE

    @property
    def lora(self) -> Settings:
        """What to build adapters from."""
        return self.settings


def plug(settings: Settings, spec: ModelSpec) -> LoraTTT:
    """The seam `lora` of the scorer."""
    widest = max(settings.chunk, *(int(entry.partition(":")[2]) for entry in settings.short), 1)
    require(
        widest <= spec.context,
        f"levers.lora_ttt: a chunk of {widest} tokens, but model.context is {spec.context}",
    )
    return LoraTTT(settings)
