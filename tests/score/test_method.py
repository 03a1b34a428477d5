"""Methods: their labels, what they refuse, and their way through a file."""

import json
from typing import Any

import pytest

from underpar.errors import RuleError
from underpar.score.method import ADAPT, PLAIN, PUBLISHED, Method, method_from_dict

WHOLE = Method(("lora_ttt", "tilt"), 64, True, PUBLISHED, 2.5, "mine")


@pytest.mark.parametrize(
    ("method", "label"),
    [
        (PLAIN, "plain"),
        (ADAPT, "adapt"),
        (Method(stride=64), "sliding64"),
        (Method(stride=64, flat=True), "sliding64+flat"),
        (Method(("lora_ttt", "tilt")), "lora_ttt+tilt"),
        (Method(("lora_ttt",), order=PUBLISHED, seconds=9.0), "lora_ttt+published"),
        (WHOLE, "mine"),
    ],
)
def test_a_label_names_the_parts(method: Method, label: str) -> None:
    assert method.label == label


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"order": "sorted"}, "order 'sorted': expected stream or published"),
        ({"stride": -1}, "stride -1, seconds 0: expected 0 or more"),
        ({"seconds": -0.5}, "seconds -0.5"),
        ({"seconds": float("nan")}, "seconds nan"),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(RuleError, match=words):
        Method(**wrong)


@pytest.mark.parametrize("method", [PLAIN, ADAPT, WHOLE])
def test_a_method_survives_its_file(method: Method) -> None:
    assert method_from_dict(json.loads(json.dumps(method.as_dict()))) == method


def test_an_empty_table_is_the_plain_method() -> None:
    assert method_from_dict({}) == PLAIN


@pytest.mark.parametrize("tree", [{"speed": 3}, {"levers": 3}, {"stride": "64"}])
def test_another_table_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(RuleError, match="not a way to score"):
        method_from_dict(tree)
