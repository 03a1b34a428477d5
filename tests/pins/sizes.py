"""Bytes of the counted script, for recipes as they are and with levers of scoring added."""

from inside import bundle, load_recipe, resolve_levers

# 'score --adapt' uses the levers that the recipe names: the demo's lora_ttt is in its script.
SCORING = {
    "baseline": [[], ["adapt_scales"]],
    "demo": [[]],
    "pr2014": [[], ["lora_ttt", "phased_sgd", "tilt"]],
    "h200-300s": [[], ["lora_ttt", "phased_sgd", "tilt"]],
}


def script_bytes() -> dict[str, int]:
    """Recipe, with the levers added to it -> bytes of its counted script."""
    sizes = {}
    for recipe, choices in SCORING.items():
        for levers in choices:
            changes = [f"levers.{lever}=true" for lever in levers]
            script = bundle(resolve_levers(load_recipe(recipe, changes)))
            sizes[" + ".join([recipe, *levers])] = len(script)
    return sizes
