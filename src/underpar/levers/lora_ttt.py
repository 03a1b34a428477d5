"""Learn each document while it is scored: low-rank adapters, trained chunk by chunk.

The adapters of a document are small products beside the model's own, at chosen sites of every visit
and at the head. A chunk of tokens is priced, then learned from, then the next one is priced; the
last is priced only. Source: PR 77, PR 1530 (one set a document, 11 mBPB), PR 1767 (A stays warm
from document to document), PR 2014 (these sites and values); LoRA, arXiv:2106.09685; score first as
ruled in PR 549. Legal: a token is priced before anything learns from it, and with kept keys the
size of a chunk depends on the place in the document alone, which a decoder knows too.
"""

from __future__ import annotations

from dataclasses import dataclass

from underpar.infer.lora import LoraSettings
from underpar.recipe import ModelSpec, require

STAGE = "infer"
# What scores with it, by name: the code of other ways to score is not counted for them.
ENGINE = "underpar.score.ttt.scorer"


@dataclass(frozen=True)
class Settings(LoraSettings):
    """AdamW without momentum on adapters of `rank`, scaled by `alpha` / rank, at `sites`.

    `chunk`: tokens between updates; `short`: "limit:chunk", smaller chunks up to a limit of tokens;
    `warm`: a lane's next document starts from the A of its last; `lanes`: documents side by side;
    `keys`: "kept" from chunk to chunk, or "fresh", the whole window read again for every chunk;
    `decay_all`: documents that have ended decay too, as published, which the warm A of the next one
    then shows.
    """

    def __post_init__(self) -> None:
        self.check("lora_ttt")


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
