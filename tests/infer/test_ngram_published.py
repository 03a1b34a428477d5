"""The token expert on the validation text of the records, where it is at hand."""

import numpy as np
import pytest

from trained import published
from underpar.data.published.files import split_files
from underpar.data.value_files import open_values
from underpar.levers.tilt import Settings, plug
from underpar.recipe import ModelSpec

pytestmark = pytest.mark.fineweb

NUM_TARGETS = 47_853_343
# Targets with a hint (PR 2135). Its hash of a context has some 34 bits, ours 62: theirs collide in
# a fraction of a percent.
NUM_GATED = 628_156


def test_the_gate_opens_as_often_as_published() -> None:
    files = split_files(published("datasets/caseops"), "val")
    stream = np.concatenate([open_values(path) for path in files]).astype(np.int64)
    targets = stream[1:]
    assert len(targets) == NUM_TARGETS
    expert = plug(Settings(), ModelSpec())
    expert.open(1, NUM_TARGETS)
    num_gated = int((expert.propose(0, targets).hints >= 0).sum())
    assert num_gated == pytest.approx(NUM_GATED, rel=0.01)
