"""The page of demands: every row has an answer, every answer a test that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "demands.md").read_text()
# Number, demand, where, answered, how, shown by.
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split(" | ")]
    for line in re.sub(r" \| \|$", " |  |", PAGE, flags=re.MULTILINE).splitlines()
    if re.match(r"\| D\d", line)
]


def test_all_demands_are_listed_with_a_source_and_an_answer() -> None:
    assert [row[0].strip("| ") for row in ROWS] == [f"D{number}" for number in range(1, 42)]
    assert all(len(row) == 6 and row[1] and row[2] and row[4] for row in ROWS)


def test_the_first_sentence_counts_the_answers() -> None:
    counts = {kind: sum(row[3] == kind for row in ROWS) for kind in ("yes", "partly", "no")}
    assert sum(counts.values()) == len(ROWS)
    stated = re.search(r"(\d+) are answered, (\d+) partly, (\d+) not", PAGE)
    assert stated and [int(n) for n in stated.groups()] == list(counts.values())
    # What is not answered is listed again at the end, with what it would take.
    missing = set(re.findall(r"\bD\d+", PAGE.partition("## What is missing")[2]))
    assert missing == {row[0].strip("| ") for row in ROWS if row[3] != "yes"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip("| "))
def test_what_is_answered_is_shown_by_a_test(row: list[str]) -> None:
    if row[3] == "no":
        assert not row[5]
        return
    path, _, name = row[5].strip("`").partition("::")
    tree = ast.parse((ROOT / "tests" / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
