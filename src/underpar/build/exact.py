"""Build the exact predictor of an artifact. Apart, because the counted script does not carry it."""

from __future__ import annotations

import torch

from underpar.artifact.unpack import Artifact
from underpar.build.model import weighted_model
from underpar.errors import ExactError
from underpar.infer.exact_mode import ExactPowers
from underpar.infer.exact_predictor import ExactPredictor


def build_exact_predictor(artifact: Artifact, device: torch.device) -> ExactPredictor:
    """The predictor of an artifact whose probabilities are the same integers on every machine."""
    network = artifact.recipe.model.network
    if network != "gpt":
        raise ExactError(f"exact mode does not cover the network {network!r}; leave --exact out")
    with ExactPowers():
        model = weighted_model(artifact)
    return ExactPredictor(model, device)
