"""The benchmarks: each has two variants of the same work and a check that they agree."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike

from underpar.artifact.array_decoder import decode
from underpar.artifact.array_encoder import encode
from underpar.artifact.frequencies import normalize_counts
from underpar.build.levers import resolve_levers
from underpar.build.model import build_model
from underpar.codec.exact_streams import decode_streams, encode_streams
from underpar.codec.lanes import Bound, decode_documents, encode_documents
from underpar.core.runtime import Runtime
from underpar.errors import BenchError
from underpar.infer.exact_mode import ExactPowers
from underpar.infer.exact_predictor import ExactPredictor
from underpar.infer.experts import Ints, Proposals
from underpar.infer.ngram import CountExpert, Gate
from underpar.infer.predictor import Predictor
from underpar.infer.strengths import Steady
from underpar.kernels.attention import attend, backend_of
from underpar.kernels.attention.reference import REFERENCE
from underpar.lab.bench import Bench
from underpar.lab.data_benches import data, data_cores
from underpar.model.network import Network
from underpar.recipe import load_recipe, nearest
from underpar.train.muon import orthogonalize


def coder(runtime: Runtime) -> Bench:
    """Decoding a million quantized weights: LZMA against our rANS."""
    rng = np.random.default_rng(0)
    codes = np.clip(np.rint(rng.standard_normal(1 << 20) * 31 / 12.85), -31, 31).astype(np.int8)
    symbols = codes.astype(np.int64) + 31
    freqs = normalize_counts(np.bincount(symbols, minlength=63))
    squeezed, coded = lzma.compress(codes.tobytes(), preset=9), encode(symbols, freqs)

    def check() -> None:
        np.testing.assert_array_equal(decode(coded, freqs, len(symbols)), symbols)
        assert len(coded) < len(squeezed), "rANS came out larger"

    return Bench(
        name="coder",
        what=f"decode 1 M int6 weights ({len(squeezed)} bytes of LZMA, {len(coded)} of rANS)",
        a=lambda: lzma.decompress(squeezed),
        b=lambda: decode(coded, freqs, len(symbols)),
        label_a="lzma",
        label_b="rans",
        check=check,
    )


def muon(runtime: Runtime) -> Bench:
    """Orthogonalizing eight equal matrices: one by one against one batch."""
    updates = torch.randn(8, 128, 256, device=runtime.device)

    def one_by_one() -> torch.Tensor:
        return torch.cat([orthogonalize(u[None]) for u in updates])

    return Bench(
        name="muon",
        what="orthogonalize 8 matrices of 128 x 256",
        a=one_by_one,
        b=lambda: orthogonalize(updates),
        label_a="one by one",
        label_b="batched",
        synchronize=runtime.synchronize,
        check=lambda: torch.testing.assert_close(
            one_by_one(), orthogonalize(updates), rtol=1e-3, atol=1e-3
        ),
    )


def attention(runtime: Runtime) -> Bench:
    """Packed documents: attention by its definition against the backend in use."""
    device = runtime.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lengths = np.random.default_rng(0).integers(64, 257, 16)
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    num, longest, chosen = int(lengths.sum()), int(lengths.max()), backend_of(device, dtype)
    q, k, v = (torch.randn(num, heads, 32, device=device, dtype=dtype) for heads in (4, 2, 2))
    # Tolerance for rounding: outputs are means of values of unit variance.
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-3

    def run(backend: str) -> torch.Tensor:
        return attend(q, k, v, cu, longest, backend=backend)

    return Bench(
        name="attention",
        what=f"causal attention over {num} tokens in 16 documents",
        a=lambda: run(REFERENCE.name),
        b=lambda: run(chosen),
        label_a=REFERENCE.name,
        label_b=chosen,
        synchronize=runtime.synchronize,
        check=lambda: torch.testing.assert_close(
            run(REFERENCE.name), run(chosen), rtol=tolerance, atol=tolerance
        ),
    )


def ngram(runtime: Runtime) -> Bench:
    """Proposals of the order-16 expert: the scan as it is written against the compiled one."""
    # Tokens follow Zipf's law, and the second half repeats the first.
    tokens = np.tile(np.random.default_rng(0).zipf(1.3, 1 << 14) % 8192, 2)
    gate = Gate(min_count=1, min_confidence=0.8, prior=0.0)

    def run(plain: bool) -> Proposals:
        expert = CountExpert((15,), gate, Steady(2.625), plain)
        expert.open(1, len(tokens))
        return expert.propose(0, tokens)

    def check() -> None:
        plain, fast = run(True), run(False)
        np.testing.assert_array_equal(plain.hints, fast.hints)
        np.testing.assert_array_equal(plain.confidence, fast.confidence)
        assert (fast.hints >= 0).any(), "nothing was proposed"

    return Bench(
        name="ngram",
        what=f"propose {len(tokens)} tokens from the 15 before each",
        a=lambda: run(True),
        b=lambda: run(False),
        label_a="plain",
        label_b="compiled, where Numba is installed",
        check=check,
    )


def lanes(runtime: Runtime) -> Bench:
    """Decoding 32 documents in floats: a loop over them against lanes side by side."""
    predictor = Predictor(_demo_network(), runtime.device, [])
    documents = _made_up_documents()
    alone = [encode_documents(predictor, [document], 1) for document in documents]
    together = encode_documents(predictor, documents, len(documents))

    def decode(payload: bytes, num: int) -> list[list[int]]:
        return decode_documents(predictor, payload, num, num, Bound(_MADE_UP_TOKENS))

    def one_by_one() -> list[list[int]]:
        return [decode(payload, 1)[0] for payload in alone]

    return _lanes_bench(
        "lanes", runtime, documents, one_by_one, lambda: decode(together, len(documents))
    )


def exact_lanes(runtime: Runtime) -> Bench:
    """Decoding 32 documents in exact mode: a loop over them against lanes side by side."""
    with ExactPowers():
        predictor = ExactPredictor(_demo_network(), runtime.device)
    documents = _made_up_documents()
    lengths = [len(document) for document in documents]
    alone = [encode_streams(predictor, [document])[0] for document in documents]
    together = encode_streams(predictor, documents)[0]

    def one_by_one() -> list[Ints]:
        pairs = zip(alone, lengths, strict=True)
        return [decode_streams(predictor, payload, [length])[0] for payload, length in pairs]

    return _lanes_bench(
        "exact_lanes",
        runtime,
        documents,
        one_by_one,
        lambda: decode_streams(predictor, together, lengths),
    )


def _lanes_bench(
    name: str,
    runtime: Runtime,
    documents: Sequence[Ints],
    one_by_one: Callable[[], Sequence[ArrayLike]],
    together: Callable[[], Sequence[ArrayLike]],
) -> Bench:
    def check() -> None:
        for decoded in (one_by_one(), together()):
            assert all(map(np.array_equal, decoded, documents)), "a document did not come back"

    return Bench(
        name=name,
        what=f"decode {len(documents)} documents, {_MADE_UP_TOKENS} tokens, by the demo's network",
        a=one_by_one,
        b=together,
        label_a="one by one",
        label_b="lanes",
        synchronize=runtime.synchronize,
        check=check,
    )


def _demo_network() -> Network:
    """The network of the demo at its start: speed does not depend on weights."""
    return build_model(resolve_levers(load_recipe("demo"))).eval()


def _made_up_documents() -> list[Ints]:
    lengths = np.random.default_rng(0).multinomial(_MADE_UP_TOKENS - 32 * 8, [1 / 32] * 32) + 8
    return [np.random.default_rng(i).integers(4, 1000, length) for i, length in enumerate(lengths)]


# Of the documents that lanes decode.
_MADE_UP_TOKENS = 1024

BENCHES: dict[str, Callable[[Runtime], Bench]] = {
    "attention": attention,
    "coder": coder,
    "exact_lanes": exact_lanes,
    "lanes": lanes,
    "muon": muon,
    "ngram": ngram,
}
# These read a corpus file, by default the embedded corpus.
DATA_BENCHES: dict[str, Callable[[Path | None], Bench]] = {"data": data, "data_cores": data_cores}
# This one takes an artifact and texts: `lab/codec_table.py` has it.
OF_FILES = {"codec": "Compressed files of an artifact beside those of xz, zstd, PPMd and others."}
# These take recipes: `lab/step_bench.py` and `lab/roofline.py` have them.
OF_RECIPES = {
    "step": "Training steps of two recipes, candidates, compile modes or backends of attention.",
    "operator": "One part of two networks: attention, loss, mlp, muon, qkv or xsa.",
    "scoring": "Prices of one batch of scoring by two networks.",
    "ceilings": "What this device reaches in products of matrices and in copies.",
    "roofline": "Where a training step of one recipe spends its time, beside the ceilings.",
}


def describe_benches() -> dict[str, str]:
    """Name -> description of every benchmark."""
    table: dict[str, Callable[..., Bench]] = {**BENCHES, **DATA_BENCHES}
    docs = {name: (make.__doc__ or "").strip() for name, make in table.items()}
    return dict(sorted((docs | OF_RECIPES | OF_FILES).items()))


def refuse_options(name: str, options: Mapping[str, Sequence[str]]) -> None:
    """Refuse what a benchmark does not read: all of `options`, which are for recipes."""
    for option, values in options.items():
        if values:
            raise BenchError(
                f"benchmark {name!r} takes no {option} ({values[0]!r}): 'bench step A B' does"
            )


def find_bench(name: str, runtime: Runtime, source: Path | None = None) -> Bench:
    """A benchmark, ready to run; `source` is the corpus of a data benchmark."""
    if name in DATA_BENCHES:
        return DATA_BENCHES[name](source)
    if name not in BENCHES:
        raise BenchError(f"no benchmark {name!r}{nearest(name, [*describe_benches()])}")
    if source is not None:
        raise BenchError(f"benchmark {name!r} reads no corpus; leave --input out")
    return BENCHES[name](runtime)
