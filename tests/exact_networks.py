"""Networks for tests of exact mode: the same weights on every machine."""

from dataclasses import replace

import numpy as np
import torch

from lever_stacks import stack_with
from underpar.build.model import build_model
from underpar.infer.exact_mode import ExactPowers
from underpar.model.gpt import GPT

CONTEXT = 32


def made_up(*cases: str) -> GPT:
    """A network with these levers and weights of numpy's, which no instruction set changes."""
    torch.manual_seed(0)
    with ExactPowers():
        recipe = stack_with(*cases)
        recipe = replace(recipe, model=replace(recipe.model, context=CONTEXT))
        model = build_model(recipe).eval()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.as_tensor(0.1 * rng.standard_normal(parameter.shape))
            # Scales of blocks and gains of levers stay near where they start.
            parameter.copy_(noise if parameter.ndim > 1 and "levers" not in name else 1.0 + noise)
    return model
