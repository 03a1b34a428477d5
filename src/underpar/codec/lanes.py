"""Documents <-> range-coded bytes, many lanes at a time.

One loop, `drive`, serves both directions: it steps the predictor and asks `code` for each token.
The encoder's `code` looks the token up and writes it, the decoder's reads it. Both therefore see
the same floats from the same shapes in the same order, which is all that decoding needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from underpar.codec import range_coder
from underpar.errors import CodecError
from underpar.infer.predictor import Predictor

# code(document, freqs of the next token (V,)) -> the token; BOS ends the document.
Code = Callable[[int, np.ndarray], int]
OnStep = Callable[[int], None]


def drive(
    predictor: Predictor,
    num_documents: int,
    num_lanes: int,
    bos: int,
    code: Code,
    on_tokens: OnStep | None = None,
) -> None:
    """Run every document through a lane; a lane that ends one takes the next.

    Lanes without a document stay in the batch, so that its shape never changes.
    """
    stepper = predictor.stepper(num_lanes)
    documents = list(range(min(num_lanes, num_documents)))
    documents += [-1] * (num_lanes - len(documents))
    waiting = min(num_lanes, num_documents)
    tokens = np.full(num_lanes, bos)
    while max(documents) >= 0:
        log_probs = stepper.step(torch.from_numpy(tokens).to(predictor.device))
        freqs = range_coder.quantize(probabilities(log_probs))
        ended = np.zeros(num_lanes, dtype=bool)
        for lane, document in enumerate(documents):
            if document < 0:
                ended[lane] = True
                continue
            tokens[lane] = code(document, freqs[lane])
            if tokens[lane] == bos:
                ended[lane] = True
                documents[lane] = waiting if waiting < num_documents else -1
                waiting += documents[lane] >= 0
        stepper.reset(torch.from_numpy(ended).to(predictor.device))
        if on_tokens:
            on_tokens(num_lanes - documents.count(-1))


def probabilities(log_probs: torch.Tensor) -> np.ndarray:
    """Probabilities (L, V) in float64, each row summing to 1 to the last bits."""
    probs = log_probs.cpu().double().numpy()
    np.exp(probs, out=probs)
    return probs / probs.sum(axis=1, keepdims=True)


def encode_documents(
    predictor: Predictor,
    documents: Sequence[np.ndarray],
    num_lanes: int,
    bos: int,
    on_tokens: OnStep | None = None,
) -> bytes:
    """Range-coded tokens of the documents (without their BOS), each with its end."""
    coder = range_coder.Encoder()
    queues = [iter([*doc.tolist(), bos]) for doc in documents]

    def code(document: int, freqs: np.ndarray) -> int:
        token = int(next(queues[document]))
        start = int(freqs[:token].sum())
        coder.encode(start, int(freqs[token]))
        return token

    drive(predictor, len(documents), num_lanes, bos, code, on_tokens)
    return coder.finish()


def decode_documents(
    predictor: Predictor,
    payload: bytes,
    num_documents: int,
    num_lanes: int,
    bos: int,
    max_tokens: int,
) -> list[list[int]]:
    """What `encode_documents` was given; a stream that runs past `max_tokens` is refused."""
    coder = range_coder.Decoder(payload)
    documents: list[list[int]] = [[] for _ in range(num_documents)]
    left = max_tokens + num_documents

    def code(document: int, freqs: np.ndarray) -> int:
        nonlocal left
        token, start, freq = range_coder.locate(freqs, coder.target())
        coder.advance(start, freq)
        left -= 1
        if left < 0:
            raise CodecError("compressed stream holds more text than its header says: damaged")
        if token != bos:
            documents[document].append(token)
        return token

    drive(predictor, num_documents, num_lanes, bos, code)
    coder.finish()
    return documents
