"""The Python interface: `underpar.load("model.upar")` returns a `Model`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from underpar.artifact.unpack import Artifact
from underpar.build.artifact import build_tokenizer, read_artifact
from underpar.build.model import build_predictor
from underpar.build.scoring import ScoringRequest, open_method, run_method
from underpar.codec.stream import Codec
from underpar.core.runtime import Runtime, open_runtime
from underpar.data.shards import Shard
from underpar.data.tokens.tokenizer import Tokenizer
from underpar.errors import DataError
from underpar.infer.generate import LaneReader, Sampling, generate
from underpar.infer.predictor import Predictor
from underpar.recipe import Recipe
from underpar.score.ledger import Score
from underpar.score.method import ADAPT, PLAIN
from underpar.score.tally import OnCommit

Text = str | bytes


@dataclass(frozen=True)
class TokenLogProb:
    """A token, the text it stands for, and the natural logarithm of its probability.

    The token that ends a document stands for no text.
    """

    token: int
    text: bytes
    log_prob: float

    @property
    def bits(self) -> float:
        """What the token costs in a compressed file."""
        return -self.log_prob / float(np.log(2))


@dataclass(frozen=True, repr=False, eq=False)
class Model:
    """An open artifact: score, generate, compress. A text is `str`, or `bytes` of any content."""

    artifact: Artifact
    codec: Codec
    runtime: Runtime

    @staticmethod
    def open(path: str | Path, device: str = "cpu") -> Model:
        """Read and check an artifact file."""
        artifact, identity = read_artifact(Path(path))
        runtime = open_runtime(device)
        predictor = build_predictor(artifact, runtime.device)
        return Model(artifact, Codec(predictor, build_tokenizer(artifact), identity), runtime)

    def __repr__(self) -> str:
        spec = self.recipe.model
        return (
            f"Model({self.num_weights:,} weights, {spec.num_layers} layers, "
            f"{spec.vocab_size:,} tokens, context {spec.context}, {self.runtime.device})"
        )

    @property
    def recipe(self) -> Recipe:
        """The recipe that the model was trained with."""
        return self.artifact.recipe

    @property
    def num_weights(self) -> int:
        """Weights in the artifact."""
        return sum(int(np.prod(tensor.shape)) for tensor in self.artifact.tensors.values())

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to tokens and back: `encode(bytes)`, `decode(ids)`, `pieces`, `vocab_size`."""
        return self.codec.tokenizer

    @property
    def predictor(self) -> Predictor:
        """Log-probabilities as tensors, for any pack of tokens."""
        return self.codec.predictor

    def score(self, texts: Text | Iterable[Text], adapt: bool = False) -> Score:
        """Bits of one text or of many; `.bpb` is bits per byte, `.entries` has one entry per text.

        Each text is a document, and its end is priced too. With `adapt` the scoring levers of the
        recipe learn from what was priced, as in `underpar score --adapt`; the model itself stays.
        """
        return self._score([texts] if isinstance(texts, Text) else list(texts), adapt)

    def log_probs(self, text: Text, adapt: bool = False) -> list[TokenLogProb]:
        """Every token of `text` with its log-probability; the last token ends the document."""
        nats: list[np.ndarray] = []
        self._score([text], adapt, lambda document, first, part: nats.append(part))
        ids = [*self.tokenizer.encode(_raw(text)).tolist(), self.tokenizer.bos_id]
        log_probs = (-np.concatenate(nats)).tolist()
        return [self._token(*pair) for pair in zip(ids, log_probs, strict=True)]

    def next_tokens(self, prompt: Text = "", count: int = 10) -> list[TokenLogProb]:
        """The `count` likeliest tokens after `prompt`, the likeliest first."""
        ids = self.tokenizer.encode(_raw(prompt)).tolist()
        log_probs = LaneReader(self.predictor, [self.tokenizer.bos_id, *ids]).log_probs
        values, tokens = log_probs.sort(descending=True)
        pairs = zip(tokens[:count].tolist(), values[:count].tolist(), strict=True)
        return [self._token(*pair) for pair in pairs]

    def stream(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 200,
        temperature: float = 0.8,
        top_p: float = 0.95,
        top_k: int = 0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
    ) -> Iterator[str]:
        """Text after `prompt`, piece by piece. `Sampling` explains the options."""
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = Sampling(max_tokens, temperature, top_p, seed, top_k, stops)
        return generate(self.predictor, self.tokenizer, prompt, sampling)

    def generate(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 200,
        temperature: float = 0.8,
        top_p: float = 0.95,
        top_k: int = 0,
        stop: str | Sequence[str] = (),
        seed: int = 0,
    ) -> str:
        """Text after `prompt`. `Sampling` explains the options."""
        return "".join(
            self.stream(
                prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                stop=stop,
                seed=seed,
            )
        )

    def compress(self, data: Text) -> bytes:
        """Compress any bytes, or a `str` as UTF-8; text gets smaller."""
        return self.codec.compress(_raw(data))

    def decompress(self, data: bytes, any_machine: bool = False) -> bytes:
        """The bytes that `compress` was given.

        Data of another machine or version of torch is refused, because its floats may differ;
        `any_machine` tries all the same.
        """
        return self.codec.decompress(data, any_machine)

    def _token(self, token: int, log_prob: float) -> TokenLogProb:
        return TokenLogProb(token, self.tokenizer.written([token]), log_prob)

    def _score(
        self, texts: Sequence[Text], adapt: bool, on_commit: OnCommit | None = None
    ) -> Score:
        method, recipe = open_method(self.recipe, ADAPT if adapt else PLAIN)
        # Adapters change the model, so they get one of their own.
        own = None if adapt else (lambda *_: self.predictor)
        request = ScoringRequest(method, self.runtime, on_commit=on_commit, open_predictor=own)
        shard = _shard_of(texts, self.tokenizer)
        score = run_method(replace(self.artifact, recipe=recipe), shard, request)
        return replace(score, entries=score.entries[: len(texts)])


def _raw(text: Text) -> bytes:
    """The bytes of a text."""
    try:
        return text.encode() if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError as error:
        raise DataError(f"text has a lone surrogate at character {error.start}") from error


def _shard_of(texts: Sequence[Text], tokenizer: Tokenizer) -> Shard:
    """Texts as the documents of a shard, and a last document of a BOS alone.

    What follows a document says that it ends, so the last text needs something that follows it.
    """
    raws = [_raw(text) for text in texts]
    if not raws or not all(raws):
        raise DataError("cannot score an empty text: there are no bytes to divide by")
    bos = [tokenizer.bos_id]
    documents = [np.concatenate((bos, tokenizer.encode(raw))) for raw in raws] + [np.array(bos)]
    lengths = np.array([len(document) for document in documents])
    hashes = b"".join(hashlib.sha256(raw).digest() for raw in [*raws, b""])
    return Shard(
        tokens=np.concatenate(documents).astype(np.int64),
        starts=np.cumsum(lengths) - lengths,
        doc_bytes=np.array([*map(len, raws), 0]),
        doc_hashes=np.frombuffer(hashes, dtype=np.uint8).reshape(-1, 32),
        flags=np.zeros(len(documents), dtype=np.uint8),
    )
