"""Per-document LoRA: trains low-rank adapters on each document while it is scored, chunk by chunk.

The adapters of a document stand beside the model's own products, at chosen sites of every visit and
at the head. A chunk of tokens is priced, then learned from, then the next chunk is priced. The last
chunk of a document is priced only. The defaults are those of PR 2014 for sites, rank, alpha, rate,
decay, beta2, eps and chunk sizes. In the order `stream` they differ from PR 2014 in four points: 64
documents side by side instead of 24, keys kept from chunk to chunk instead of computed again, ended
documents do not decay, and the chunk size follows from the place in the document instead of the
longest document of a group. `--order published` is the published loop: it has groups of `group`
documents, and whatever `keys` and `decay_all` are, keys are computed again and all adapters decay.

Source: PR 77, PR 1530 (adapters per document, 11 mBPB), PR 1767 (A stays warm from document to
document), PR 2014 (the values above); LoRA, arXiv:2106.09685; score first as ruled in PR 549.

Legal: a token is priced before anything learns from it. The chunk size depends on the place in the
document only, which a decoder knows too. The published order is different: it sorts documents by
length, so a decoder cannot follow it.

Cost: one forward and backward pass per chunk, and adapters with their second moments for each lane.
The counted script grows by the code of this way to score.
"""

from __future__ import annotations

from dataclasses import dataclass

from underpar.infer.lora import LoraSettings
from underpar.recipe import ModelSpec, require

STAGE = "infer"
# The module that scores with this lever, by name: scripts without the lever do not contain it.
ENGINE = "underpar.score.ttt.scorer"


@dataclass(frozen=True)
class Settings(LoraSettings):
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
    `group`: the same in the published order.
    `keys`: "kept" keeps keys and values from chunk to chunk; "fresh" reads the whole window again
    for every chunk.
    `seed`: seed of the first A.
    """

    def __post_init__(self) -> None:
        self.check("lora_ttt")


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
