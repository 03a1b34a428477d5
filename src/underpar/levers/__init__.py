"""The table of levers: name -> module. A new lever is its file and one line here.

Levers that share a seam act in the order of the table.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from underpar.data.transforms import TRANSFORMS
from underpar.seams import LeverModule

# Modules by name, imported when used: a bundle carries the levers of its recipe and no others.
# Text transforms live with the data they change, so that a data folder opens without a recipe.
LEVERS = {
    **TRANSFORMS,
    # The stem: tokens to the stream.
    "bigram": "underpar.levers.bigram",
    "smear": "underpar.levers.smear",
    "static_smear": "underpar.levers.static_smear",
    # The order of visits. Lanes open before a skip enters; loops blend before a skip leaves.
    "loop": "underpar.levers.loop",
    "pass_embed": "underpar.levers.pass_embed",
    "lanes": "underpar.levers.lanes",
    "parallel": "underpar.levers.parallel",
    "recur_ab": "underpar.levers.recur_ab",
    "recur_alpha": "underpar.levers.recur_alpha",
    "pass_blend": "underpar.levers.pass_blend",
    "unet": "underpar.levers.unet",
    "mudd": "underpar.levers.mudd",
    # Inside a block.
    "x0_mix": "underpar.levers.x0_mix",
    "norm_scale": "underpar.levers.norm_scale",
    "layer_scale": "underpar.levers.layer_scale",
    "partial_rope": "underpar.levers.partial_rope",
    "qk_gain": "underpar.levers.qk_gain",
    "value_residual": "underpar.levers.value_residual",
    "value_embed": "underpar.levers.value_embed",
    "window": "underpar.levers.window",
    # The projection off the own value comes before the gates.
    "xsa": "underpar.levers.xsa",
    "sparse_attn_gate": "underpar.levers.sparse_attn_gate",
    "gated_attn": "underpar.levers.gated_attn",
    "attn_out_gate": "underpar.levers.attn_out_gate",
    "leaky_square": "underpar.levers.leaky_square",
    "mlp_gate": "underpar.levers.mlp_gate",
    # The head.
    "softcap": "underpar.levers.softcap",
    "asym_softcap": "underpar.levers.asym_softcap",
    # Training and scoring.
    "ema": "underpar.levers.ema",
    "lawa": "underpar.levers.lawa",
    "qat_lite": "underpar.levers.qat_lite",
    "ste": "underpar.levers.ste",
    # A tensor belongs to the first adapter that names it: the choosy ones come first.
    "adapt_scales": "underpar.levers.adapt_scales",
    "lora_ttt": "underpar.levers.lora_ttt",
    "adapt_bias": "underpar.levers.adapt_bias",
    "ttt_e2e": "underpar.levers.ttt_e2e",
    "stream_sgd": "underpar.levers.stream_sgd",
    "phased_sgd": "underpar.levers.phased_sgd",
    # Logits, once all of that has made them.
    "token_calibration": "underpar.levers.token_calibration",
    # Experts tilt in turn: the surest first.
    "tilt": "underpar.levers.tilt",
    "match": "underpar.levers.match",
    "counts": "underpar.levers.counts",
}


def lever_module(name: str) -> LeverModule:
    """The module of a lever in the table."""
    return cast(LeverModule, import_module(LEVERS[name]))
