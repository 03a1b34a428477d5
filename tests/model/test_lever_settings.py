"""Settings that do not fit are refused in one line, before anything is allocated."""

import subprocess
import sys

import pytest
import torch

from underpar.build.model import build_model, weight_shapes
from underpar.errors import RecipeError
from underpar.infer.predictor import Predictor
from underpar.recipe import load_recipe
from underpar.stages.pack import forecast_size

LOOP = "levers.loop=true"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["levers.bigram.buckets=1000000000000"], ("bigram.buckets", "16777216")),
        ([f"levers.mudd.width={10**30}"], ("mudd.width", "1e+15")),
        (["levers.mudd_tail.backout=4"], ("mudd_tail.backout = 4", "(3, 7, 9)")),
        (["levers.mudd_tail={layers=[11], backout=11}"], ("mudd_tail", "layer 11")),
        (["levers.mudd_tail.values=11"], ("mudd_tail", "layer 11")),
        (["levers.pair_values.head=2"], ("pair_values.head = 2", "2 key heads")),
        (["levers.pair_values.buckets=1"], ("pair_values.buckets = 1", "at least 2")),
        (["levers.window.layers=[2, 2]"], ("window", "twice")),
        (["levers.window.layers=[11]"], ("window", "layer 11", "0 to 10", "num_layers")),
        (["levers.window.size=0"], ("window.size", "at least 1")),
        (["levers.partial_rope.dims=3"], ("partial_rope.dims", "even")),
        (["levers.partial_rope.dims=64"], ("partial_rope.dims", "24 channels")),
        (["levers.partial_rope={dims=2, ntk_context=64}"], ("ntk_context", "4")),
        (["levers.norm_scale.power=-1e9"], ("norm_scale.power", "0 to 8")),
        (["levers.qk_gain.init=1e300"], ("qk_gain.init", "1e+300")),
        (["levers.xsa.strength=2.0"], ("xsa.strength", "0 to 1")),
        (["levers.diff_attn.layers=[11]"], ("diff_attn", "layer 11", "0 to 10")),
        (["levers.diff_attn=true", "model.num_kv_heads=1"], ("num_kv_heads = 1", "even")),
        (["levers.loop={first=5, last=3}"], ("loop.first", "5")),
        (["levers.loop.start=1.0"], ("loop.start", "1.0")),
        (["levers.recur_ab=true"], ("recur_ab", "without 'loop'")),
        ([LOOP, "levers.recur_ab.sites=50"], ("recur_ab.sites", "50", "6 repeated")),
        ([LOOP, "levers.recur_alpha.sites=2"], ("recur_alpha.sites", "2", "6 repeated")),
        ([LOOP, "levers.recur_lora.sites=2"], ("recur_lora.sites", "2", "6 repeated")),
        ([LOOP, "levers.recur_lora.rank=0"], ("recur_lora.rank", "1 to 4096")),
        ([LOOP, "levers.recur_lora.products=['u']"], ("recur_lora.products", "'u'", "q, k, v, o")),
        ([LOOP, "levers.recur_lora.products=['q', 'q']"], ("recur_lora.products", "once")),
        ([LOOP, "levers.pass_embed.layer=6"], ("pass_embed.passes", "layer 6", "1 times")),
        (["levers.loop.last=4", "levers.pass_blend=true"], ("pass_blend.layers", "(3, 4, 5)")),
        ([LOOP, "levers.pass_blend.beta=[1.0]"], ("pass_blend", "3 values of beta")),
        (["levers.loop={first=7, last=9}", "levers.lanes=true"], ("lanes.start", "layer 7")),
        (
            ["levers.loop={first=7, last=9}", "levers.late_context=true"],
            ("late_context", "layer 7"),
        ),
        (["levers.lanes=true", "levers.late_context=true"], ("lanes and late_context", "layer 8")),
        (["levers.lanes=true", "levers.parallel=true"], ("lanes and parallel", "layer 8")),
        (["levers.softcap=true", "levers.asym_softcap=true"], ("softcap and asym_softcap", "cap")),
        (["levers.key_offset.share=1.5"], ("key_offset.share", "0 to 1")),
        (["levers.logit_rescale.scale=100"], ("logit_rescale.scale", "at most 72")),
        (["levers.logit_rescale.width=0"], ("logit_rescale.width", "more than 0")),
        (
            ["levers.softcap=true", "levers.logit_rescale=true"],
            ("softcap and logit_rescale", "cap"),
        ),
        (["levers.unet=true", "model.num_layers=1"], ("unet", "one visit")),
        (["levers.value_embed.layers=[]"], ("value_embed.layers", "name a layer")),
        (["levers.adapt_scales.lr=-1.0"], ("adapt_scales.lr", "-1.0")),
        (["model.rope_base=0.0"], ("rope_base", "more than 0")),
        (["model.embed_std=-1.0"], ("embed_std", "0 or more")),
    ],
)
def test_a_setting_that_does_not_fit_is_named(overrides: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        weight_shapes(load_recipe("cpu", overrides))
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message


def test_a_forecast_refuses_what_memory_cannot_hold() -> None:
    with pytest.raises(RecipeError, match="weights: expected at most"):
        forecast_size(load_recipe("cpu", ["levers.bigram={buckets=16000000, width=16000}"]))


def test_a_step_takes_the_memory_of_the_text_not_of_the_context() -> None:
    recipe = load_recipe("cpu", ["model.num_layers=2", "model.context=1048576"])
    stepper = Predictor(build_model(recipe), torch.device("cpu"), []).stepper(1)
    for token in (1, 7, 9):
        stepper.step(torch.tensor([token]))
    slots = stepper._cache._slots.values()
    assert max(cache.numel() for cache in slots) <= 2 * 2 * 64 * 24


def test_shapes_are_those_of_the_model_and_load_no_compiler() -> None:
    recipe = load_recipe("pr2014+cpu", ["levers.bigram=true", "levers.gated_attn=true"])
    weights = build_model(recipe).state_dict()
    assert weight_shapes(recipe) == {name: tuple(t.shape) for name, t in weights.items()}
    words = "import sys; from underpar.build.model import weight_shapes; "
    words += "from underpar.recipe import load_recipe; weight_shapes(load_recipe('h200-300s')); "
    words += "print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
