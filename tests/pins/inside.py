"""The only file of the pins that imports inner modules: after a move, fix the imports here."""

from underpar.artifact.pack import Artifact, pack
from underpar.build.levers import resolve_levers
from underpar.build.model import weight_shapes
from underpar.cli import app
from underpar.data.sources.corpus import demo_corpus, read_documents
from underpar.quant.rules import quantize_model
from underpar.quant.schemes import QuantizedTensor, parse_scheme
from underpar.quant.trellis import next_state
from underpar.recipe import load_recipe
from underpar.submit.bundle import bundle

__all__ = [
    "Artifact",
    "QuantizedTensor",
    "app",
    "bundle",
    "demo_corpus",
    "load_recipe",
    "next_state",
    "pack",
    "parse_scheme",
    "quantize_model",
    "read_documents",
    "resolve_levers",
    "weight_shapes",
]
