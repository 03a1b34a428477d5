"""Documents <-> range-coded bytes, with adapters that learn from what was coded.

The loop is that of `underpar score --adapt` in the order of the stream (`score/ttt/loop.py`): the
same lanes, chunks, adapters and global phases. Inside a chunk both directions step token by token.
A chunk that is coded is read again as a whole, with gradients, as a score reads it; its keys and
values replace those of the single steps. So the bits are those of the score, up to how the sums of
single steps are rounded.

One class serves both directions, as in `lanes.py`: only the `code` of a token differs. It knows
nothing of a document but the tokens that were coded before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from underpar.codec.lanes import (
    NUM_THREADS,
    Bound,
    Code,
    OnShare,
    decode_by,
    encode_by,
    frequencies,
)
from underpar.codec.range_coder import quantize
from underpar.core.runtime import Clock, Runtime, fix_matmul_workspace, threads
from underpar.errors import CodecError
from underpar.infer.experts import Expert, Proposals
from underpar.infer.lora import LoraSettings
from underpar.infer.predictor import Predictor, log_probs_of
from underpar.infer.tilt import Mixture, join
from underpar.kernels.attention.select import backend_of, set_backend
from underpar.model.chunk_cache import ChunkCache
from underpar.model.network import products
from underpar.score.ttt.lanes import LaneBatch
from underpar.score.ttt.loop import DocumentLoop
from underpar.score.ttt.reading import KeptLanes, Reading, upload
from underpar.score.ttt.schedule import Chunk, stream_schedule
from underpar.seams import BOS_ID, Phases

# More targets than any document has.
UNKNOWN = 1 << 62


@dataclass(frozen=True)
class Adaptation:
    """How a predictor learns from what was coded: that of `underpar score --adapt`."""

    open_predictor: Callable[[], Predictor]
    """Builds a predictor that has learned nothing: a global phase changes its weights."""
    settings: LoraSettings
    phases: Phases | None
    runtime: Runtime
    digest: str
    """Names all settings: a decoder with other settings would read other tokens."""
    experts: Sequence[Expert] = ()
    """They forget everything when a pass begins."""

    @cached_property
    def predictor(self) -> Predictor:
        """The predictor before it learns."""
        return self.open_predictor()

    def lanes_for(self, num_documents: int) -> int:
        """Lanes that as many documents use."""
        return min(self.settings.lanes, num_documents)


@contextmanager
def deterministic(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Inside, operations on the same GPU give the same bits in every process.

    A CPU with a fixed number of threads does so anyway. Of the kernels of attention only those of
    torch have a backward pass that adds in a fixed order.
    """
    if device.type != "cuda":
        yield
        return
    fix_matmul_workspace()
    attention = backend_of(device, dtype)
    before = torch.are_deterministic_algorithms_enabled()
    mode: Any = torch.utils.deterministic
    filled = mode.fill_uninitialized_memory
    set_backend("flash" if dtype != torch.float32 else "reference", device, dtype)
    torch.use_deterministic_algorithms(True)
    # Nothing reads memory before it is written; filling it takes time.
    mode.fill_uninitialized_memory = False
    try:
        yield
    finally:
        mode.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before)
        set_backend(attention, device, dtype)


class SteppedLanes(KeptLanes):
    """Lanes that read the tokens of a chunk one by one before they read it as a whole."""

    def trial(self) -> AbstractContextManager[None]:
        """Inside, lanes move on with every token; afterwards they are where they were."""
        return trial_of(self._cache)

    def token_cache(self, active: np.ndarray, place: int) -> ChunkCache:
        """The cache, ready for one token in the active lanes (L,), number `place` of the chunk."""
        held = np.array(self._held) * active
        self._farthest = max(self._farthest, int(held.max()) + place + 1)
        self._cache.begin(upload(active.astype(np.int64), self._device), 1, self._farthest)
        return self._cache


@contextmanager
def trial_of(cache: ChunkCache) -> Iterator[None]:
    """Inside, lanes move on with every step; afterwards they are where they were.

    The keys and values that the steps wrote stay, until other steps overwrite them.
    """
    lengths, chunks = cache.lengths.clone(), cache.chunks
    last = {name: tensor.clone() for name, tensor in cache._last.items()}
    with nullcontext() if chunks is None else trial_of(chunks):
        yield
    cache.chunks = chunks
    cache.lengths.copy_(lengths)
    for name, tensor in cache._last.items():
        tensor.copy_(last.get(name, torch.zeros_like(tensor)))


class Texts:
    """Tokens of documents, BOS first, as far as they are known."""

    def __init__(self) -> None:
        self._tokens: dict[int, np.ndarray] = {}
        self._lengths: dict[int, int] = {}

    def of(self, document: int) -> np.ndarray:
        """The tokens so far; at least the BOS."""
        if document not in self._tokens:
            self._tokens[document] = np.full(64, BOS_ID, dtype=np.int64)
            self._lengths[document] = 1
        return self._tokens[document][: self._lengths[document]]

    def append(self, document: int, token: int) -> None:
        """The next token of a document; its array doubles when it is full."""
        tokens, length = self._tokens[document], self._lengths[document]
        if length == len(tokens):
            tokens = self._tokens[document] = np.concatenate((tokens, np.zeros_like(tokens)))
        tokens[length] = token
        self._lengths[document] = length + 1


class DocumentCoder(DocumentLoop):
    """One pass over documents, in either direction."""

    def __init__(
        self,
        adaptation: Adaptation,
        num_documents: int,
        code: Code,
        num_in_all: int = 0,
        num_targets: int = 0,
    ) -> None:
        """`num_in_all`: of a text whose first documents alone are coded; 0: these are all.

        Experts need the number of targets, the ends of documents among them.
        """
        super().__init__(
            adaptation.open_predictor(),
            num_in_all or num_documents,
            adaptation.runtime,
            Clock(),
            adaptation.settings,
            Mixture(adaptation.experts),
            adaptation.phases,
        )
        self.mixture.open(self._num_lanes, num_targets)
        self._targets_left = num_targets
        # What experts guessed in this step, by row, with the targets and their prices before.
        self._guessed: dict[int, list[tuple[Proposals, int, np.ndarray]]] = {}
        self.texts = Texts()
        self._num_targets = [UNKNOWN] * num_documents
        self._code = code

    def run(self) -> None:
        """Code every document to its end."""
        with threads(NUM_THREADS), deterministic(self.predictor.device, self.predictor.dtype):
            self.run_stream(stream_schedule(self._num_targets, self._num_lanes, self._sizes))

    def text_of(self, document: int) -> np.ndarray:
        """The tokens that are coded, and the BOS at the end if it is coded."""
        return self.texts.of(document)

    def doc(self, document: int) -> np.ndarray:
        """A document that is coded, without the BOS at its end."""
        return self.texts.of(document)[:-1]

    def note(self, kind: str, first: int, last: int) -> None:
        """No ledger."""

    def price(self, batch: LaneBatch, chunks: Sequence[Chunk], adapted: bool) -> Sequence[Chunk]:
        """Code the chunks token by token, then read them as a whole."""
        rows = batch.rows_of(chunks)
        batch.begin(rows)
        batch.reread(rows)
        self._code_tokens(batch, rows)
        coded = [self._as_coded(chunk) for chunk in chunks]
        rows = batch.rows_of(coded)
        # The prices are those of the single tokens.
        batch.price(rows, {chunk.lane: np.empty((chunk.count, 0)) for chunk in coded})
        if self.mixture.experts:
            self._settle(rows)
        return coded

    def _code_tokens(self, batch: LaneBatch, rows: Sequence[Chunk]) -> None:
        reading, predictor = batch.reading, self.predictor
        assert isinstance(reading, SteppedLanes)
        going = list(rows)
        with torch.no_grad(), batch.adapters(), reading.trial():
            for place in range(max(chunk.count for chunk in rows)):
                going = [chunk for chunk in going if place < chunk.count]
                tokens = np.full(len(batch.lanes), BOS_ID)
                active = np.zeros(len(batch.lanes), dtype=np.bool_)
                for chunk in going:
                    tokens[chunk.lane] = self.texts.of(chunk.document)[-1]
                    active[chunk.lane] = True
                if not going:
                    return
                cache = reading.token_cache(active, place)
                with products(predictor.device, predictor.dtype):
                    hidden = predictor.model.hidden(upload(tokens, predictor.device), cache)
                    log_probs = log_probs_of(predictor.model, hidden)
                cache.commit()
                if self.mixture.experts:
                    rows_of_all = log_probs.double().cpu().numpy()
                    going = [
                        c for c in going if self._guess(c, batch.lanes[c.lane], rows_of_all[c.lane])
                    ]
                else:
                    freqs = frequencies(log_probs)
                    going = [c for c in going if self._next(c.document, freqs[c.lane]) != BOS_ID]

    def _next(self, document: int, freqs: np.ndarray) -> int:
        """Code the next token of a document; BOS is its end."""
        token = self._code(document, freqs)
        self.texts.append(document, token)
        if token == BOS_ID:
            self._num_targets[document] = len(self.texts.of(document)) - 1
        return token

    def _guess(self, chunk: Chunk, lane: int, log_p: np.ndarray) -> bool:
        """Code the next token of a chunk with the experts' help; false at its document's end.

        `log_p` (V,) are the network's log-probabilities. Experts learn a token before they guess
        the next one of any lane, as in a score.
        """
        said = self.mixture.guess(lane)
        probs = np.exp(self.mixture.distribution(said, log_p))
        [freqs] = quantize(probs[None] / probs.sum())
        token = self._next(chunk.document, freqs)
        is_end = token == BOS_ID
        # A score has no target there.
        if not (is_end and chunk.document == len(self._num_targets) - 1):
            self._targets_left -= 1
            if self._targets_left < 0:
                raise CodecError("compressed stream holds more tokens than it says: damaged")
            self.mixture.propose(lane, np.array([token]))
        columns = log_p[np.append(token, said.hints[0])]
        self._guessed.setdefault(chunk.lane, []).append((said, token, columns))
        return not is_end

    def _settle(self, rows: Sequence[Chunk]) -> None:
        """Strengths learn from a step whose tokens are coded, in the order of a score."""
        seen = [guessed for chunk in rows for guessed in self._guessed[chunk.lane]]
        said, tokens, columns = zip(*seen, strict=True)
        self.mixture.price(join(said), np.array(tokens), np.stack(columns))
        self.mixture.settle()
        self._guessed = {}

    def _as_coded(self, chunk: Chunk) -> Chunk:
        left = self._num_targets[chunk.document] - chunk.first
        return replace(chunk, count=min(chunk.count, left), is_last=left <= chunk.count)

    def _stream_reading(self) -> Reading:
        spec, device = self.predictor.model.spec, self.predictor.device
        if self.settings.keys != "kept":
            raise CodecError(
                f"levers.lora_ttt.keys = {self.settings.keys!r}: files are coded with 'kept' only"
            )
        lanes = self._num_lanes
        return SteppedLanes(spec, self.text_of, self._sizes.by_position, lanes, device)


def encode_adapted(
    adaptation: Adaptation,
    documents: Sequence[np.ndarray],
    on_share: OnShare | None = None,
    num_in_all: int = 0,
) -> bytes:
    """`encode_by` with a predictor that learns; with experts a u32 of targets comes first."""
    num_targets = sum(len(document) + 1 for document in documents) - 1

    def run(code: Code) -> None:
        DocumentCoder(adaptation, len(documents), code, num_in_all, num_targets).run()

    begin = num_targets.to_bytes(4, "little") if adaptation.experts else b""
    return begin + encode_by(run, documents, on_share)


def decode_adapted(
    adaptation: Adaptation,
    payload: bytes,
    num_documents: int,
    bound: Bound,
    on_share: OnShare | None = None,
    num_in_all: int = 0,
) -> list[list[int]]:
    """What `encode_adapted` was given; a stream that holds more than its `bound` is refused."""
    num_targets, size = 0, 4 if adaptation.experts else 0
    if adaptation.experts:
        num_targets = int.from_bytes(payload[:size], "little")
        if num_targets >= bound.most + num_documents:
            raise CodecError("compressed stream says that it holds more text than its header says")

    def run(code: Code) -> None:
        DocumentCoder(adaptation, num_documents, code, num_in_all, num_targets).run()

    return decode_by(run, payload[size:], num_documents, bound, on_share)
