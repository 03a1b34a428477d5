"""A codec that fits a short text, made in a second: bytes as tokens, a tiny model, adapters."""

import hashlib
from functools import cache
from pathlib import Path

import numpy as np
import torch

from lever_stacks import CPU, randomized
from underpar.artifact.pack import pack
from underpar.artifact.unpack import Artifact
from underpar.build.adaptation import open_adaptation
from underpar.build.model import build_predictor
from underpar.codec.stream import Codec
from underpar.core.runtime import Runtime
from underpar.data.tokens.byte260 import CONTENT, VOCAB_SIZE, ByteTokenizer
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.infer.sgd import Descent, train_on_stream
from underpar.quant.rounding import round_tensor
from underpar.quant.schemes import parse_scheme
from underpar.recipe import load_recipe

ALONE = Runtime(CPU)
POEM = b"the cat sat on the mat|the dog sat on the log|a cat, a mat, a dog, a log||the end"
SIZES = {"vocab_size": VOCAB_SIZE, "dim": 16, "num_heads": 1, "num_kv_heads": 1, "mlp_dim": 16}
SIZES |= {"num_layers": 1, "context": 16}
LORA = "levers.lora_ttt={rank=2, lr=0.01, chunk=4, short=[], lanes=3}"
PHASE = "levers.phased_sgd={prefix=0.4, lr=0.01, chunk_tokens=16}"
RECIPE = load_recipe("cpu", [*(f"model.{k}={v}" for k, v in SIZES.items()), LORA, PHASE])


@cache
def tiny_artifact() -> Artifact:
    """A model that has read the poem a few times, with fp16 weights."""
    model = randomized(RECIPE)
    stream = np.tile(np.append(1, ByteTokenizer().encode(POEM)), 40)
    train_on_stream(model, stream, 64, 16, Descent(lr=0.2), ALONE)
    scheme = parse_scheme("fp16")
    weights = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}
    tensors = {name: round_tensor(weight, scheme) for name, weight in weights.items()}
    return Artifact(RECIPE, CONTENT, tensors)


@cache
def tiny_codec() -> Codec:
    """The codec of that artifact."""
    artifact = tiny_artifact()
    identity = hashlib.sha256(pack(artifact)).hexdigest()
    predictor = build_predictor(artifact, CPU)
    return Codec(predictor, ByteTokenizer(), identity, lambda: open_adaptation(artifact, ALONE))


def write_artifact(folder: Path) -> Path:
    """The artifact as a file."""
    path = folder / "model.upar"
    path.write_bytes(pack(tiny_artifact()))
    return path


class Unigram:
    """A predictor that knows how often each token occurs in a text, and nothing else."""

    device = torch.device("cpu")
    context = 1000

    def __init__(self, tokenizer: Tokenizer, text: bytes) -> None:
        tokens = tokenizer.encode(text)
        self.num_steps = 0
        counts = np.bincount(tokens, minlength=tokenizer.vocab_size) + 0.01
        self._log_probs = torch.from_numpy(np.log(counts / counts.sum()))

    def stepper(self, num_lanes: int) -> "Unigram":
        return self

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        return self._log_probs.expand(len(tokens), -1)

    def reset(self, lanes: torch.Tensor) -> None:
        pass

    def keep(self, lanes: torch.Tensor) -> None:
        pass
