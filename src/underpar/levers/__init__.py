"""The table of levers: name -> module. A new lever is one file and one line in this table.

Levers that share a seam act in the order of the table.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from underpar.data.transforms import TRANSFORMS
from underpar.errors import LeverError
from underpar.seams import LeverModule

# Modules are imported when they are used, so a counted script holds the levers of its recipe only.
# Text transforms live in data/transforms, so that a data folder opens without a recipe.
LEVERS = {
    **TRANSFORMS,
    # The stem: from tokens to the stream.
    "bigram": "underpar.levers.bigram",
    "smear": "underpar.levers.smear",
    "static_smear": "underpar.levers.static_smear",
    # The plan of visits. `lanes` stands before `unet`, so that the second lane opens before a skip
    # enters; the blends of loops stand before `unet`, so that an output is blended before it is
    # pushed as a skip.
    "loop": "underpar.levers.loop",
    "pass_embed": "underpar.levers.pass_embed",
    "lanes": "underpar.levers.lanes",
    "late_context": "underpar.levers.late_context",
    "parallel": "underpar.levers.parallel",
    "recur_ab": "underpar.levers.recur_ab",
    "recur_alpha": "underpar.levers.recur_alpha",
    "recur_lora": "underpar.levers.recur_lora",
    "pass_blend": "underpar.levers.pass_blend",
    "unet": "underpar.levers.unet",
    "mudd": "underpar.levers.mudd",
    "mudd_tail": "underpar.levers.mudd_tail",
    # Inside a block.
    "x0_mix": "underpar.levers.x0_mix",
    "norm_scale": "underpar.levers.norm_scale",
    "layer_scale": "underpar.levers.layer_scale",
    "partial_rope": "underpar.levers.partial_rope",
    "qk_gain": "underpar.levers.qk_gain",
    "key_offset": "underpar.levers.key_offset",
    "value_residual": "underpar.levers.value_residual",
    "value_embed": "underpar.levers.value_embed",
    "pair_values": "underpar.levers.pair_values",
    "window": "underpar.levers.window",
    "diff_attn": "underpar.levers.diff_attn",
    # `xsa` acts on the plain output of attention, so it comes before the gates.
    "xsa": "underpar.levers.xsa",
    "sparse_attn_gate": "underpar.levers.sparse_attn_gate",
    "gated_attn": "underpar.levers.gated_attn",
    "attn_out_gate": "underpar.levers.attn_out_gate",
    "leaky_square": "underpar.levers.leaky_square",
    "mlp_gate": "underpar.levers.mlp_gate",
    # The head.
    "softcap": "underpar.levers.softcap",
    "asym_softcap": "underpar.levers.asym_softcap",
    "logit_rescale": "underpar.levers.logit_rescale",
    # Training and scoring.
    "ema": "underpar.levers.ema",
    "lawa": "underpar.levers.lawa",
    "qat_lite": "underpar.levers.qat_lite",
    "ste": "underpar.levers.ste",
    "fp8": "underpar.levers.fp8",
    "entropy_weight": "underpar.levers.entropy_weight",
    "multi_token": "underpar.levers.multi_token",
    "prefix_token": "underpar.levers.prefix_token",
    "uniform_init": "underpar.levers.uniform_init",
    "look_ahead": "underpar.levers.look_ahead",
    # A tensor belongs to the first adapter that names it, so adapters of few tensors come first.
    "adapt_scales": "underpar.levers.adapt_scales",
    "lora_ttt": "underpar.levers.lora_ttt",
    "adapt_bias": "underpar.levers.adapt_bias",
    "ttt_e2e": "underpar.levers.ttt_e2e",
    "stream_sgd": "underpar.levers.stream_sgd",
    "phased_sgd": "underpar.levers.phased_sgd",
    # Changes of the finished logits.
    "token_calibration": "underpar.levers.token_calibration",
    # Experts tilt the distribution one after the other, the most certain one first.
    "tilt": "underpar.levers.tilt",
    "ngram": "underpar.levers.ngram",
    "match": "underpar.levers.match",
    "counts": "underpar.levers.counts",
}


def lever_module(name: str) -> LeverModule:
    """The module of a lever of the table; a counted script holds those of its own run alone."""
    try:
        return cast(LeverModule, import_module(LEVERS[name]))
    except ModuleNotFoundError as error:
        if error.name != LEVERS[name]:
            raise
        why = f"lever {name!r} is not in this script; use the score.py beside the artifact"
        raise LeverError(why) from None
