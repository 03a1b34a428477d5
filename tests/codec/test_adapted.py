"""The adapted codec: a file has the bits of the adapted score, and comes back without lengths."""

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lane_runs import ALONE, BYTES, RICH, SETTINGS, SHARD, VOCAB, Run, make_shard
from lever_stacks import CPU, randomized
from underpar.codec import adapted
from underpar.codec.adapted import Adaptation, decode_adapted, encode_adapted
from underpar.codec.lanes import Bound
from underpar.data.shards import Shard
from underpar.errors import CodecError
from underpar.infer.predictor import Predictor
from underpar.levers import phased_sgd
from underpar.recipe import Recipe

PHASES = phased_sgd.PhasedSGD(phased_sgd.Settings(prefix=0.5, phases=2, lr=0.1, chunk_tokens=16))
MOST = 1000


def adaptation(settings: Any = SETTINGS, phases: Any = None, recipe: Recipe = RICH) -> Adaptation:
    def open_predictor() -> Predictor:
        return Predictor(randomized(recipe), CPU, [])

    return Adaptation(open_predictor, settings, phases, ALONE, "")


def bodies(shard: Shard) -> list[np.ndarray]:
    return [np.array(shard.doc(i)[1:], dtype=np.int64) for i in range(shard.num_documents)]


WAYS: list[dict[str, Any]] = [
    {},
    {"chunk": 5, "short": ("8:2", "24:3")},
    {"lanes": 1, "warm": True},
    {"lanes": 64, "chunk": 16},
    {"decay_all": True, "warm": True, "lanes": 2},
]
CASES = pytest.mark.parametrize(
    ("recipe", "changes", "phases"),
    [
        *((RICH, changes, phases) for changes in WAYS for phases in (None, PHASES)),
        (BYTES, WAYS[1], None),
        (BYTES, WAYS[4], PHASES),
    ],
)


@CASES
def test_documents_come_back(recipe: Recipe, changes: dict[str, Any], phases: Any) -> None:
    how = adaptation(replace(SETTINGS, **changes), phases, recipe)
    documents = bodies(SHARD)
    payload = encode_adapted(how, documents)
    assert decode_adapted(how, payload, len(documents), Bound(MOST)) == [
        d.tolist() for d in documents
    ]


@CASES
def test_the_payload_is_the_score(recipe: Recipe, changes: dict[str, Any], phases: Any) -> None:
    settings = replace(SETTINGS, **changes)
    shard = make_shard([40, 90, 3, 75, 60, 33, 120, 51, 80, 2], seed=1)
    scored = Run(shard, settings, phases=phases, model=randomized(recipe)).go()
    bits: list[float] = []

    def watch(document: int, freqs: np.ndarray) -> int:
        token = next(queues[document])
        bits[document] += 32 - np.log2(freqs[token])
        return token

    documents = bodies(shard)
    bits = [0.0] * len(documents)
    queues = [iter([*document.tolist(), 1]) for document in documents]
    adapted.DocumentCoder(adaptation(settings, phases, recipe), len(documents), watch).run()
    # A score does not price the end of its last document: nothing comes after it.
    assert bits[:-1] == pytest.approx(scored.bits[:-1], rel=1e-4)
    num_bits = 8 * len(encode_adapted(adaptation(settings, phases, recipe), documents))
    # A stream ends with the fewest bytes that name its interval: some bits fewer, by luck.
    assert -8 < num_bits - sum(bits) < 9


@pytest.mark.parametrize("recipe", [RICH, BYTES])
def test_what_is_learned_shortens_text_that_repeats(recipe: Recipe) -> None:
    text = np.tile(np.random.default_rng(0).integers(4, VOCAB, 12), 30)
    learning, frozen = (
        len(encode_adapted(adaptation(replace(SETTINGS, lr=lr, decay=0.0), None, recipe), [text]))
        for lr in (0.05, 0.0)
    )
    assert learning < 0.8 * frozen


def test_a_stream_that_goes_on_is_refused() -> None:
    documents = bodies(SHARD)
    payload = encode_adapted(adaptation(), documents)
    with pytest.raises(CodecError, match="more text than its header"):
        decode_adapted(adaptation(), payload, len(documents), Bound(40))


def test_other_settings_give_other_tokens() -> None:
    documents = bodies(SHARD)
    payload = encode_adapted(adaptation(), documents)
    other = adaptation(replace(SETTINGS, lr=0.02))
    with contextlib.suppress(CodecError):
        assert decode_adapted(other, payload, len(documents), Bound(MOST)) != documents
