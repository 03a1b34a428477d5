"""Documents <-> range-coded bytes, many lanes at a time.

One loop, `drive`, serves both directions: it steps the predictor and calls `code` for each token.
The encoder's `code` looks the token up and writes it; the decoder's `code` reads it. So both see
the same floats, from the same shapes, in the same order. Decoding needs nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from underpar.codec import range_coder
from underpar.core.runtime import threads
from underpar.errors import CodecError
from underpar.infer.predictor import Predictor
from underpar.seams import BOS_ID

# code(document, freqs of the next token (V,)) -> the token; BOS ends the document.
Code = Callable[[int, np.ndarray], int]
# on_tokens(number of tokens just coded)
OnTokens = Callable[[int], None]

# Progress is told after this many tokens.
SHOW_EVERY = 64

# Tokens of two lanes in two steps; every vocabulary has these ids.
PROBE_TOKENS = ([BOS_ID, BOS_ID], [BOS_ID + 1, BOS_ID + 2])

# A lane without a document.
IDLE = -1

# Fixed, because sums may round differently on another number of threads. One, because threads wait
# for each other in every operation: beside other work on all cores, a step of a tiny model took
# 9.5 ms with one thread and 160 ms with two, a step of 36 M weights 84 and 460 ms.
NUM_THREADS = 1


def drive(predictor: Predictor, num_documents: int, num_lanes: int, code: Code) -> None:
    """Run every document through a lane; a lane that ends a document takes the next one.

    Idle lanes stay in the batch until half of it is idle; then they are dropped. So the shape of
    each step follows from the tokens coded before it, and both directions use the same shapes.
    """
    with threads(NUM_THREADS):
        _drive(predictor, num_documents, num_lanes, code)


def _drive(predictor: Predictor, num_documents: int, num_lanes: int, code: Code) -> None:
    stepper = predictor.stepper(num_lanes)
    documents = [lane if lane < num_documents else IDLE for lane in range(num_lanes)]
    waiting = iter(range(num_lanes, num_documents))
    tokens = np.full(num_lanes, BOS_ID)
    while active := [lane for lane, document in enumerate(documents) if document != IDLE]:
        if len(active) <= len(documents) // 2:
            stepper.keep(torch.tensor(active, device=predictor.device))
            documents, tokens = [documents[lane] for lane in active], tokens[active]
            active = list(range(len(documents)))
        log_probs = stepper.step(torch.from_numpy(tokens).to(predictor.device))
        freqs = frequencies(log_probs)
        for lane in active:
            tokens[lane] = code(documents[lane], freqs[lane])
            if tokens[lane] == BOS_ID:
                documents[lane] = next(waiting, IDLE)
        stepper.reset(torch.from_numpy(tokens == BOS_ID).to(predictor.device))


def hash_step(predictor: Predictor) -> str:
    """Eight hex digits that differ where the floats of a step differ, and the threads in use.

    Two lanes take two steps with fixed tokens. Libraries, their settings and the processor decide
    how sums are rounded; the hash is of the result.
    """
    with threads(NUM_THREADS):
        stepper = predictor.stepper(2)
        steps = [stepper.step(torch.tensor(t, device=predictor.device)) for t in PROBE_TOKENS]
        digest = hashlib.sha256(b"".join(s.cpu().numpy().tobytes() for s in steps))
        granted = torch.get_num_threads()
    return f"threads {granted} step {digest.hexdigest()[:8]}"


def probabilities(log_probs: torch.Tensor) -> torch.Tensor:
    """Probabilities (L, V) in float64, each row summing to 1 to the last bits."""
    # Computed by torch, because the compressed file names its version. Integer arithmetic after
    # this is the same on every machine.
    probs = log_probs.double().exp()
    return probs / probs.sum(dim=1, keepdim=True)


def frequencies(log_probs: torch.Tensor) -> np.ndarray:
    """Frequencies (L, V) of a step's tokens, out of 2^FREQ_BITS, on the host."""
    if log_probs.device.type != "cuda":
        # Some devices have no float64.
        return range_coder.quantize(probabilities(log_probs.cpu()).numpy())
    return quantize_there(probabilities(log_probs)).cpu().numpy()


def quantize_there(probs: torch.Tensor) -> torch.Tensor:
    """`range_coder.quantize` on the device of the probabilities (L, V): a host takes longer."""
    room = range_coder.TOTAL - probs.shape[1]
    freqs = (probs * float(room)).long() + 1
    rows, best = torch.arange(len(probs), device=probs.device), probs.argmax(dim=1)
    freqs[rows, best] += range_coder.TOTAL - freqs.sum(dim=1)
    if not bool(probs.isfinite().all() & (freqs > 0).all()):
        raise CodecError("probabilities of a step are not finite or do not sum to 1")
    return freqs


# drive(code): run every document, each token by `code`.
Drive = Callable[[Code], None]
# on_share(share of the work that is done)
OnShare = Callable[[float], None]


@dataclass(frozen=True)
class Bound:
    """The most that a stream may hold, as its header says: tokens, each counted by its size."""

    most: int
    # By token; None: 1 each.
    sizes: np.ndarray | None = None


def encode_by(
    drive: Drive, documents: Sequence[np.ndarray], on_share: OnShare | None = None
) -> bytes:
    """Range-coded tokens of the documents (without their BOS), each with a BOS as its end."""
    coder = range_coder.Encoder()
    queues = [iter([*doc.tolist(), BOS_ID]) for doc in documents]
    total, done = sum(len(doc) + 1 for doc in documents), 0

    def code(document: int, freqs: np.ndarray) -> int:
        nonlocal done
        token = int(next(queues[document]))
        coder.encode(*range_coder.interval(freqs, token))
        done += 1
        if on_share and done % SHOW_EVERY == 0:
            on_share(done / total)
        return token

    drive(code)
    return coder.finish()


def decode_by(
    drive: Drive,
    payload: bytes,
    num_documents: int,
    bound: Bound,
    on_share: OnShare | None = None,
) -> list[list[int]]:
    """What `encode_by` was given; a stream that holds more than its `bound` is refused."""
    coder = range_coder.Decoder(payload)
    documents: list[list[int]] = [[] for _ in range(num_documents)]
    done, left = 0, bound.most + num_documents

    def code(document: int, freqs: np.ndarray) -> int:
        nonlocal done, left
        token, start, freq = range_coder.locate(freqs, coder.target())
        coder.advance(start, freq)
        left -= 1 if bound.sizes is None else int(bound.sizes[token])
        if left < 0:
            raise CodecError("compressed stream holds more text than its header says: damaged")
        if token != BOS_ID:
            documents[document].append(token)
        done += 1
        if on_share and done % SHOW_EVERY == 0:
            on_share(coder.share)
        return token

    drive(code)
    coder.finish()
    return documents


def encode_documents(
    predictor: Predictor,
    documents: Sequence[np.ndarray],
    num_lanes: int,
    on_share: OnShare | None = None,
) -> bytes:
    """`encode_by` with a predictor that does not learn."""
    num = len(documents)
    return encode_by(lambda code: drive(predictor, num, num_lanes, code), documents, on_share)


def decode_documents(
    predictor: Predictor,
    payload: bytes,
    num_documents: int,
    num_lanes: int,
    bound: Bound,
    on_share: OnShare | None = None,
) -> list[list[int]]:
    """What `encode_documents` was given; a stream that holds more than its `bound` is refused."""

    def run(code: Code) -> None:
        drive(predictor, num_documents, num_lanes, code)

    return decode_by(run, payload, num_documents, bound, on_share)
