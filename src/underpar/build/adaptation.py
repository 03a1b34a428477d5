"""From an artifact to the way in which a codec adapts: that of `underpar score --adapt`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from underpar.artifact.unpack import Artifact
from underpar.build.model import build_predictor
from underpar.build.scoring import having, how_of, levers_of, mix_levers, open_method
from underpar.codec.adapted import Adaptation
from underpar.core.runtime import Runtime
from underpar.errors import RuleError
from underpar.infer.predictor import Predictor
from underpar.recipe import Recipe
from underpar.score.method import ADAPT, STREAM, Method


def open_adaptation(artifact: Artifact, runtime: Runtime) -> Adaptation:
    """The adaptation that the artifact's recipe names; one that cannot be coded is refused."""
    return adaptation_for(artifact, *open_method(artifact.recipe, ADAPT), runtime)


def adaptation_for(
    artifact: Artifact, method: Method, recipe: Recipe, runtime: Runtime
) -> Adaptation:
    """The adaptation of a method, with the settings that the recipe has."""
    levers = levers_of(method, recipe)
    lora = having(levers, "lora")
    why = ""
    if not lora:
        why = "files are coded with adapters of documents (the lever lora_ttt) only"
    elif method.order != STREAM:
        why = f"a decoder does not know the order {method.order!r}"
    elif lora[0].lora.keys != "kept":
        why = "files are coded with levers.lora_ttt.keys = 'kept' only"
    if why:
        raise RuleError(f"the method {method.label!r} cannot be coded: {why}")
    # Compiled kernels may differ from one process to the next.
    runtime = replace(runtime, compiled=False)
    artifact = replace(artifact, recipe=recipe)

    def open_predictor() -> Predictor:
        predictor = build_predictor(artifact, runtime.device, [], runtime.dtype)
        for lever in having(levers, "classes"):
            lever.attach(predictor.model)
        return predictor

    how = how_of(replace(method, name="", seconds=0.0), recipe, runtime)
    digest = hashlib.sha256(json.dumps(how, sort_keys=True).encode()).hexdigest()[:16]
    phases = next(iter(having(levers, "boundaries")), None)
    experts = mix_levers(levers, artifact).experts
    return Adaptation(open_predictor, lora[0].lora, phases, runtime, digest, experts)
