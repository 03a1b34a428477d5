"""Price every document of a shard: predict, commit, and only then adapt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from underpar.data.loader import Batch, pack_documents
from underpar.data.shards import Shard
from underpar.errors import RuleError
from underpar.infer.predictor import Predictor
from underpar.recipe import ScorePart
from underpar.runtime import Clock, Runtime
from underpar.score.ledger import Entry, Score
from underpar.score.windows import chunk_documents
from underpar.train.dist import gather_objects

OnChunk = Callable[[float, float], None]


@dataclass
class Scorer:
    """Owns the loop, so that no adapter sees a token before it is priced."""

    predictor: Predictor
    shard: Shard
    runtime: Runtime
    clock: Clock
    entries: list[Entry] = field(default_factory=list)
    events: list[tuple[str, int, int]] = field(default_factory=list)

    def run(self, part: ScorePart, adapt: bool = False, on_chunk: OnChunk | None = None) -> Score:
        """The score of the whole shard; `adapt` learns from each chunk once it is priced.

        `on_chunk` gets (share of the documents done, bits per byte so far).
        """
        if adapt and not self.predictor.can_adapt:
            raise RuleError("this artifact's recipe names no adapter; add one under [levers]")
        if adapt and self.runtime.world > 1:
            raise RuleError("adapting follows one stream: score with --adapt on a single rank")
        method = "adapt" if adapt else "plain"
        lengths = np.diff(self.shard.starts, append=self.shard.num_tokens).tolist()
        chunk_tokens = part.adapt_tokens if adapt else part.batch_tokens
        bits, num_bytes = 0.0, 0
        for index, chunk in enumerate(chunk_documents(lengths, chunk_tokens)):
            if index % self.runtime.world != self.runtime.rank:
                continue
            with self.clock.phase("score"):
                batch = self.price(chunk)
            if adapt:
                with self.clock.phase("adapt"):
                    self.adapt(batch, chunk)
            bits += sum(e.bits for e in self.entries[-len(chunk) :])
            num_bytes += sum(e.num_bytes for e in self.entries[-len(chunk) :])
            if on_chunk:
                on_chunk(chunk.stop / self.shard.num_documents, bits / num_bytes)
        return self._merge(Score(method, self.entries, self.clock.read(), self.events))

    def price(self, documents: Sequence[int]) -> Batch:
        """Price consecutive documents and commit them to the ledger."""
        docs = [self.shard.doc(i) for i in documents]
        batch, owner = pack_documents(docs, int(docs[0][0]), self.predictor.context)
        nats = self.predictor.nll(batch).cpu().double().numpy()
        counted = np.ones(len(nats), dtype=bool)
        # The stream ends with its last document: nothing follows it, so nothing is predicted.
        counted[-1] = documents[-1] != self.shard.num_documents - 1
        bits = np.bincount(owner, weights=nats * counted) / math.log(2)
        targets = np.bincount(owner, weights=counted)
        for place, document in enumerate(documents):
            num_bytes = int(self.shard.doc_bytes[document])
            self.entries.append(Entry(document, float(bits[place]), num_bytes, int(targets[place])))
        self.events.append(("price", documents[0], documents[-1]))
        return batch

    def adapt(self, batch: Batch, documents: Sequence[int]) -> None:
        """Learn from the documents priced last."""
        self.predictor.adapt(batch)
        # A device works on behind the call; its time belongs here.
        self.runtime.synchronize()
        self.events.append(("adapt", documents[0], documents[-1]))

    def _merge(self, own: Score) -> Score:
        shares = gather_objects(own, self.runtime)
        score = own
        if len(shares) > 1:
            score = Score(own.method, [])
            for share in shares:
                assert isinstance(share, Score)
                score = score + share
        # The first token of the stream is an input only; everything else is a target.
        assert score.num_targets == self.shard.num_tokens - 1, "a target was missed or priced twice"
        return score
