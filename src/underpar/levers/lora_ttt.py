"""Per-document LoRA: trains low-rank adapters on each document while it is scored, chunk by chunk.

The adapters of a document stand beside the model's own products, at chosen sites of every visit and
at the head. A chunk of tokens is priced, then learned from, then the next chunk is priced. The last
chunk of a document is priced only. The defaults are those of PR 2014 for sites, rank, alpha, rate,
decay, beta2, eps and chunk sizes. They differ from PR 2014 in four points: 64 documents side by
side instead of 24, keys kept from chunk to chunk instead of computed again, ended documents do not
decay, and the chunk size follows from the place in the document instead of the longest document of
a group. `--order published` with `lanes = 24`, `keys = "fresh"` and `decay_all = true` is the
published loop.

Source: PR 77, PR 1530 (adapters per document, 11 mBPB), PR 1767 (A stays warm from document to
document), PR 2014 (the values above); LoRA, arXiv:2106.09685; score first as ruled in PR 549.

Legal: a token is priced before anything learns from it. The chunk size depends on the place in the
document only, which a decoder knows too. The published order is different: it sorts documents by
length, so a decoder cannot follow it.

Cost: one forward and backward pass per chunk, and adapters with their second moments for each lane.
The counted script grows by the code of this way to score.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from underpar.recipe import ModelSpec, require

STAGE = "infer"
# The module that scores with this lever, by name: scripts without the lever do not contain it.
ENGINE = "underpar.score.ttt.scorer"

SITES = ("q", "k", "v", "o", "mlp", "head")


@dataclass(frozen=True)
class Settings:
    """`sites`: products that get adapters: q, k, v, o, mlp, head.
    `rank`: rank of an adapter.
    `alpha`: an adapter's output is multiplied by alpha / rank.
    `lr`: learning rate of AdamW (without momentum).
    `decay`: decoupled weight decay.
    `decay_all`: true lets the adapters of ended documents decay too, as published; the warm A of
    the next document then shows it.
    `beta2`: decay of the second moments.
    `eps`: term added to the root of a second moment.
    `chunk`: tokens between updates.
    `short`: "limit:chunk" entries; a smaller chunk is used up to that many tokens of a document.
    `warm`: true starts the next document of a lane from the A of its last one.
    `lanes`: number of documents side by side.
    `keys`: "kept" keeps keys and values from chunk to chunk; "fresh" reads the whole window again
    for every chunk.
    `seed`: seed of the first A.
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
        unique = 0 < len(self.sites) == len(set(self.sites))
        require(unique, f"{where}sites = {self.sites}: name one or more, each once")
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
        is_known = self.keys in ("kept", "fresh")
        require(is_known, f"{where}keys = {self.keys!r}: expected 'kept' or 'fresh'")


@dataclass(frozen=True)
class LoraTTT:
    """Hands the settings to the scorer of documents, which builds the adapters."""

    settings: Settings

    engine = ENGINE

    @property
    def lora(self) -> Settings:
        """The settings of the adapters."""
        return self.settings


def plug(settings: Settings, spec: ModelSpec) -> LoraTTT:
    """The settings for the scorer of documents, checked against the context."""
    widest = max(settings.chunk, *(int(entry.partition(":")[2]) for entry in settings.short), 1)
    require(
        widest <= spec.context,
        f"levers.lora_ttt: a chunk of {widest} tokens, but model.context is {spec.context}",
    )
    return LoraTTT(settings)
