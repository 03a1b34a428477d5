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
from underpar.codec.lanes import Bound, Code, Drive, encode_by
from underpar.data.shards import Shard
from underpar.errors import CodecError
from underpar.infer.experts import Expert
from underpar.infer.ngram import CountExpert, Gate, MatchExpert, WordExpert
from underpar.infer.panel import Panel
from underpar.infer.predictor import Predictor
from underpar.infer.strengths import Hedge, Steady
from underpar.infer.tilt import Mixture
from underpar.levers import phased_sgd
from underpar.recipe import Recipe

PHASES = phased_sgd.PhasedSGD(phased_sgd.Settings(prefix=0.5, phases=2, lr=0.1, chunk_tokens=16))
MOST = 1000


def adaptation(
    settings: Any = SETTINGS, phases: Any = None, experts: Any = (), recipe: Recipe = RICH
) -> Adaptation:
    def open_predictor() -> Predictor:
        return Predictor(randomized(recipe), CPU, [])

    return Adaptation(open_predictor, settings, phases, ALONE, "", experts)


def make_experts() -> list[Expert]:
    """Experts of every kind; one learns its strength."""
    gate = Gate(min_count=1, min_confidence=0.0, prior=0.5)
    words = WordExpert(0, gate, Steady(0.5))
    words.read_pieces([b" a" if token % 5 == 0 else b"a" for token in range(VOCAB)])
    tokens = CountExpert((1, 2, 3), gate, Steady(1.0))
    return [Panel([tokens, words], 1.0, 0.5), MatchExpert((2, 4), Hedge())]


def bodies(shard: Shard) -> list[np.ndarray]:
    return [np.array(shard.doc(i)[1:], dtype=np.int64) for i in range(shard.num_documents)]


WAYS: list[dict[str, Any]] = [
    {},
    {"chunk": 5, "short": ("8:2", "24:3")},
    {"lanes": 1, "warm": True},
    {"lanes": 64, "chunk": 16},
    {"decay_all": True, "warm": True, "lanes": 2},
]
HELPERS = [(None, []), (PHASES, []), (PHASES, make_experts())]


@pytest.mark.parametrize(
    ("recipe", "changes", "phases", "experts"),
    [
        *((RICH, changes, *helpers) for changes in WAYS for helpers in HELPERS),
        (BYTES, WAYS[1], None, []),
        (BYTES, WAYS[4], *HELPERS[2]),
    ],
)
def test_the_payload_is_the_score_and_comes_back(
    recipe: Recipe,
    changes: dict[str, Any],
    phases: Any,
    experts: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = replace(SETTINGS, **changes)
    shard = make_shard([1, 40, 90, 3, 75, 60, 33, 120, 51, 80, 2], seed=1)
    # A passage that comes back in other documents.
    shard.tokens[60:80] = shard.tokens[150:170] = shard.tokens[310:330] = shard.tokens[2:22]
    mixture, model = Mixture(experts), randomized(recipe)
    scored = Run(shard, settings, phases=phases, mixture=mixture, model=model).go()
    how, documents = adaptation(settings, phases, experts, recipe), bodies(shard)
    bits = [0.0] * len(documents)

    def encode_watched(drive: Drive, *given: Any) -> bytes:
        def drive_watched(code: Code) -> None:
            def watch(document: int, freqs: np.ndarray) -> int:
                token = code(document, freqs)
                bits[document] += 32 - np.log2(freqs[token])
                return token

            drive(watch)

        return encode_by(drive_watched, *given)

    monkeypatch.setattr(adapted, "encode_by", encode_watched)
    payload = encode_adapted(how, documents)
    # A score does not price the end of its last document: nothing comes after it.
    assert bits[:-1] == pytest.approx(scored.bits[:-1], rel=1e-4)
    # Experts need the number of targets, 32 bits.
    num_bits = 8 * len(payload) - 32 * bool(experts)
    # The last byte may be too much, or left out, because a decoder reads zeros after the end.
    assert -8 < num_bits - sum(bits) < 9
    back = decode_adapted(how, payload, len(documents), Bound(MOST))
    assert back == [document.tolist() for document in documents]


def test_experts_shorten_passages_that_come_back_in_other_lanes() -> None:
    documents = [np.random.default_rng(0).integers(4, VOCAB, 30)] * 3
    settings = replace(SETTINGS, lr=0.0, lanes=1)
    with_experts = len(encode_adapted(adaptation(settings, None, make_experts()), documents))
    assert with_experts < 0.6 * len(encode_adapted(adaptation(settings), documents))


def test_another_number_of_targets_is_refused() -> None:
    how, documents = adaptation(experts=make_experts()), bodies(SHARD)
    payload = encode_adapted(how, documents)
    num = int.from_bytes(payload[:4], "little")
    assert num == sum(map(len, documents)) + len(documents) - 1
    with pytest.raises(CodecError, match="more tokens than it says"):
        decode_adapted(
            how, (num - 9).to_bytes(4, "little") + payload[4:], len(documents), Bound(MOST)
        )
    with pytest.raises(CodecError, match="more text than its header"):
        decode_adapted(how, b"\xff\xff\xff\xff" + payload[4:], len(documents), Bound(MOST))


def test_what_is_learned_shortens_text_that_repeats() -> None:
    text = np.tile(np.random.default_rng(0).integers(4, VOCAB, 12), 30)
    learning, frozen = (
        len(encode_adapted(adaptation(replace(SETTINGS, lr=lr, decay=0.0)), [text]))
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
