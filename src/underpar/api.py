"""The Python interface: `underpar.load("model.upar")` returns a `Model`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from underpar.build.artifact import build_tokenizer, read_artifact
from underpar.build.model import build_predictor
from underpar.codec.stream import Codec
from underpar.core.runtime import open_runtime
from underpar.data.batch import pack_documents
from underpar.errors import DataError
from underpar.infer.generate import Sampling, generate
from underpar.recipe import Recipe
from underpar.score.ledger import Entry, Score


@dataclass(frozen=True)
class Model:
    """An open artifact: score, generate, compress."""

    recipe: Recipe
    codec: Codec

    @staticmethod
    def open(path: str | Path, device: str = "cpu") -> Model:
        """Read and check an artifact file."""
        artifact, identity = read_artifact(Path(path))
        predictor = build_predictor(artifact, open_runtime(device).device)
        return Model(artifact.recipe, Codec(predictor, build_tokenizer(artifact), identity))

    def score(self, text: str) -> Score:
        """Bits of `text` as one document, its end included; `.bpb` is bits per UTF-8 byte."""
        raw = text.encode()
        if not raw:
            raise DataError("cannot score an empty text: there are no bytes to divide by")
        tokenizer, predictor = self.codec.tokenizer, self.codec.predictor
        document = np.concatenate(([tokenizer.bos_id], tokenizer.encode(raw)))
        batch, _ = pack_documents([document], tokenizer.bos_id, predictor.context)
        bits = float(predictor.nll(batch).cpu().double().sum() / np.log(2))
        return Score("plain", [Entry(0, bits, len(raw), len(document))])

    def stream(self, prompt: str = "", **sampling: float) -> Iterator[str]:
        """Text after `prompt`, piece by piece; options of `Sampling`: max_tokens, temperature..."""
        options = Sampling(**sampling)  # type: ignore[arg-type]
        return generate(self.codec.predictor, self.codec.tokenizer, prompt, options)

    def generate(self, prompt: str = "", **sampling: float) -> str:
        """Text after `prompt`: max_tokens, temperature, top_p, seed."""
        return "".join(self.stream(prompt, **sampling))

    def compress(self, data: bytes) -> bytes:
        """Compress any bytes; text gets smaller."""
        return self.codec.compress(data)

    def decompress(self, data: bytes, any_machine: bool = False) -> bytes:
        """The bytes that `compress` was given.

        Data of another machine or version of torch is refused, because its floats may differ;
        `any_machine` tries all the same.
        """
        return self.codec.decompress(data, any_machine)
