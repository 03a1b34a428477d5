"""A tiny model, a few random documents, and one scoring of them by lanes, for tests of these."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lever_stacks import CPU, randomized
from underpar.core.runtime import Clock, Runtime
from underpar.data.shards import Shard
from underpar.infer.lora import SITES
from underpar.infer.predictor import Predictor
from underpar.infer.tilt import Mixture
from underpar.levers.lora_ttt import Settings
from underpar.model.network import Network
from underpar.recipe import load_recipe
from underpar.score.ledger import Score
from underpar.score.method import PUBLISHED, Method
from underpar.score.ttt.scorer import DocumentScorer

CONTEXT, VOCAB = 16, 64
SIZES = {"vocab_size": VOCAB, "dim": 32, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 32}
SIZES |= {"num_layers": 2, "context": CONTEXT}
MODEL = [f"model.{key}={value}" for key, value in SIZES.items()]
PLAIN = load_recipe("cpu", MODEL)
# Levers that look one token back.
LOOKS_BACK = ["levers.smear.init=0.5", "levers.bigram={buckets=50, width=8}"]
RICH = load_recipe("cpu", [*MODEL, *LOOKS_BACK])
# A network of bytes whose chunks end where it decides.
BYTES = load_recipe(
    "hnet-m2+cpu",
    [
        *MODEL,
        "hnet.dim=16",
        "hnet.num_heads=2",
        "hnet.mlp_dim=16",
        *(f"{where}levers.partial_rope.dims=4" for where in ("", "hnet.")),
    ],
)

# Learning shows within a chunk or two; A is cold, so that documents do not meet.
SETTINGS = Settings(sites=SITES, rank=3, alpha=6.0, lr=0.01, chunk=4, short=(), lanes=3, warm=False)
STREAM, SORTED = Method(), Method(order=PUBLISHED)
ALONE = Runtime(CPU)


def make_shard(lengths: Sequence[int], seed: int = 0) -> Shard:
    """Random documents of so many tokens."""
    rng = np.random.default_rng(seed)
    return _of_texts([np.append(1, rng.integers(4, VOCAB, length - 1)) for length in lengths])


def _of_texts(texts: Sequence[np.ndarray]) -> Shard:
    num, lengths = len(texts), np.array([len(text) for text in texts])
    return Shard(
        tokens=np.concatenate(texts).astype(np.uint16),
        starts=np.cumsum(lengths) - lengths,
        doc_bytes=np.full(num, 10),
        doc_hashes=np.zeros((num, 32), dtype=np.uint8),
        flags=np.zeros(num, dtype=np.uint8),
    )


# From a BOS alone to several windows; the last document has no target at all.
SHARD = make_shard([1, 17, 2, 30, 16, 5, 50, 1])
NUM_TARGETS = [1, 17, 2, 30, 16, 5, 50, 0]
LONG = 6


@dataclass
class Run:
    """One score: its inputs, the prices that were entered, and the result."""

    shard: Shard = SHARD
    settings: Settings = SETTINGS
    method: Method = STREAM
    mixture: Mixture = field(default_factory=lambda: Mixture([]))
    phases: Any = None
    runtime: Runtime = ALONE
    model: Network = field(default_factory=lambda: randomized(RICH))
    partial: Any = None
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.predictor = Predictor(self.model, self.runtime.device, [])
        self.clock = Clock("load")
        self.commits: list[tuple[int, int, np.ndarray]] = []

    def go(self) -> "Run":
        """Score the shard."""
        scorer = DocumentScorer(
            self.predictor,
            self.shard,
            self.runtime,
            self.clock,
            self.settings,
            self.method,
            self.mixture,
            self.phases,
            on_commit=lambda *commit: self.commits.append(commit),
            partial=self.partial,
            now=self.now,
        )
        self.score: Score = scorer.run()
        return self

    def nats(self, document: int) -> np.ndarray:
        """The prices of a document that were entered."""
        prices = [nats for owner, _, nats in self.commits if owner == document]
        return np.concatenate([np.zeros(0), *prices])

    @property
    def bits(self) -> list[float]:
        """Of each document."""
        return [entry.bits for entry in self.score.entries]


def changed(shard: Shard, is_kept: Callable[[int, int], bool]) -> Shard:
    """Other tokens, but for BOS and for those that `is_kept` says, by document and place."""
    tokens = shard.tokens.copy()
    for document, begin in enumerate(shard.starts):
        for place in range(1, len(shard.doc(document))):
            if not is_kept(document, place):
                tokens[begin + place] = 4 + (tokens[begin + place] + 3) % (VOCAB - 4)
    return replace(shard, tokens=tokens)


def shortened(shard: Shard, document: int, length: int) -> Shard:
    """One document ends after so many tokens."""
    texts = [shard.doc(i) for i in range(shard.num_documents)]
    texts[document] = texts[document][:length]
    return _of_texts(texts)


def without(shard: Shard, *documents: int) -> Shard:
    """Some documents left out."""
    return _of_texts([shard.doc(i) for i in range(shard.num_documents) if i not in documents])


def ticks() -> Callable[[], float]:
    """A clock whose every reading is one second later: 1, 2, ..."""
    return map(float, itertools.count(1)).__next__


def stop_after(num_steps: int, order: str = STREAM.order) -> dict[str, Any]:
    """Arguments of a run whose time is over after so many steps."""
    # The clock is read at the start, and before each step.
    return {"method": Method(order=order, seconds=num_steps + 0.5), "now": ticks()}
