"""Variants: which runs are made, that equal ones are shared, continuing, failing, verdicts."""

from __future__ import annotations

import json
import math
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from underpar.build.levers import lever_names
from underpar.build.model import build_model
from underpar.build.recipe import load_checked
from underpar.core.run_folder import RunFolder
from underpar.data.batch import pack_documents
from underpar.data.folder import data_identity, load_data
from underpar.errors import BenchError, RecipeError, RunError
from underpar.lab import runs
from underpar.lab.claims import VARIANTS, Claim, read_claims
from underpar.lab.lever_cards import Effect, read_effects
from underpar.lab.lever_docs import claims_section
from underpar.lab.measurement import Measurement, read_known
from underpar.lab.variants import (
    OPEN,
    OTHER,
    SAME,
    Comparison,
    Request,
    compare,
    make_cells,
    run_variants,
    values_beside,
    verdict_of,
)
from underpar.schema import BYTE_IDS
from underpar.train.meter import network_flops
from underpar.train.step import mean_loss

CLAIMS = """
[gain]
lever = "qk_gain"
claim = "a gain of 4"
published = "2 mBPB better"
source = "PR 1"
base = "{base}"
figure = "before"
best = "four"
variants = {{ four = {{ set = ["levers.qk_gain.init=4.0"] }}, none = {{ set = [] }} }}

[bias]
lever = "adapt_bias"
claim = "a bias that adapts"
published = "better"
source = "PR 2"
base = "{base}"
figure = "scored"
best = "on"
[bias.variants]
on = {{ score = {{ levers = ["adapt_bias"] }} }}
off = {{ score = {{}} }}

[told]
lever = "smear"
claim = "without variants"
published = "1 mBPB better"
source = "PR 3"
"""


def bpb_of(result: dict[str, Any], name: str) -> dict[str, list[float]]:
    """Bits per byte of each variant of a claim, in the order of the seeds."""
    return {key: [*row["bpb"].values()] for key, row in result["claims"][name].items()}


class Ended:
    """A process that has ended."""

    def __init__(self, code: int) -> None:
        self.code = code

    def poll(self) -> int:
        return self.code

    def terminate(self) -> None:
        pass

    def wait(self) -> int:
        return self.code


class Machine:
    """Does what `underpar train`, `pack` and `score` leave, with made-up figures."""

    def __init__(self, identity: str, failing: Sequence[str] = ()) -> None:
        self.identity, self.failing = identity, failing
        self.words: list[list[str]] = []

    def __call__(self, words: Sequence[str], path: Path) -> Any:
        self.words.append(list(words))
        folder = RunFolder(path)
        path.mkdir(parents=True, exist_ok=True)
        (path / runs.LOG).write_text("the log's last line\n")
        if words[0] in self.failing:
            return Ended(3)
        if words[0] == "train":
            bpb = 2.0 if "levers.qk_gain.init=4.0" in words else 2.004
            seed = next(int(w.split("=")[1]) for w in words if w.startswith("train.seed="))
            values = {"average_bpb": None, "live_bpb": bpb + 1e-5 * (seed % 10), "tokens": 1}
            name = path.name.rpartition("-")[2]
            about = {"recipe_hash": name, "data_identity": self.identity}
            folder.about_file.write_text(json.dumps(about))
            folder.validation_file.write_text(json.dumps(values))
        if words[0] == "pack":
            folder.artifact_file.write_bytes(b"")
            folder.budget_file.write_text('{"artifact_sha256": "a"}')
        if words[0] == "score":
            label = "adapt_bias" if "adapt_bias" in words else "plain"
            tree = {"artifact_sha256": "a", "bpb": 1.9 if label == "adapt_bias" else 1.91}
            folder.score_file(label).write_text(json.dumps(tree))
        return Ended(0)

    def stages(self) -> list[str]:
        return [words[0] for words in self.words]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "POLL_SECONDS", 0.0)


@pytest.fixture
def file(tmp_path: Path, tiny_recipe: Any) -> Path:
    from underpar.recipe import to_toml

    base = tmp_path / "base.toml"
    base.write_text(to_toml(tiny_recipe))
    path = tmp_path / "variants.toml"
    path.write_text(CLAIMS.format(base=base))
    return path


@pytest.fixture
def machine(tiny_data: Path) -> Machine:
    return Machine(data_identity(load_data(tiny_data)))


def test_equal_recipes_share_one_run(
    file: Path, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    out = tmp_path / "out"
    result, failed = run_variants(Request(file), tiny_data, out, "cpu", start_words=machine)
    assert sum(path.is_dir() for path in out.iterdir()) == 2
    # `none` of the gain, and both ways to score the bias, are one run.
    assert machine.stages() == ["train", "train", "pack", "score", "score"] and not failed
    assert bpb_of(result, "bias") == {"on": [1.9], "off": [1.91]}
    assert bpb_of(result, "gain")["none"] == [pytest.approx(2.004, abs=1e-4)]
    scored = machine.words[3]
    assert scored[-4:] == ["--with", "adapt_bias", "--device", "cpu"]
    page = (tmp_path / "out" / "variants.md").read_text()
    assert "| none | 1 |" in page and "| +4.00 |  | same direction |" in page
    assert "Published: 2 mBPB better." in page


def test_what_is_finished_is_not_done_again(
    file: Path, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    out = tmp_path / "out"
    first, _ = run_variants(Request(file), tiny_data, out, "cpu", start_words=machine)
    machine.words.clear()
    again, _ = run_variants(Request(file), tiny_data, out, "cpu", start_words=machine)
    assert again == first and machine.words == []
    # A second seed of one claim: two runs more, and its figures are added.
    more, _ = run_variants(
        Request(file, ("gain",), (), 2), tiny_data, out, "cpu", start_words=machine
    )
    assert machine.stages() == ["train", "train"]
    assert [len(values) for values in bpb_of(more, "gain").values()] == [2, 2]
    # What was known of the other claim stays.
    assert bpb_of(more, "bias")["on"] == [1.9]


def test_known_figures_of_another_folder_count(
    file: Path, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    run_variants(Request(file), tiny_data, tmp_path / "a", "cpu", start_words=machine)
    machine.words.clear()
    known = tmp_path / "a" / "variants.json"
    shutil.copy(known, tmp_path / "known.json")
    known = tmp_path / "known.json"
    result, _ = run_variants(
        Request(file), tiny_data, tmp_path / "b", "cpu", known=known, start_words=machine
    )
    assert machine.words == [] and bpb_of(result, "bias")["on"] == [1.9]
    with pytest.raises(RunError, match="has device"):
        read_known(known, {"device": "another"})
    with pytest.raises(RunError, match="does not exist"):
        read_known(tmp_path / "none.json", {})


def test_a_stage_that_fails_is_said_and_the_rest_goes_on(
    file: Path, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    machine.failing = ("pack",)
    result, failed = run_variants(
        Request(file), tiny_data, tmp_path / "out", "cpu", start_words=machine
    )
    assert list(failed.values()) == ["pack: exit code 3"]
    assert bpb_of(result, "bias") == {"on": [], "off": []}
    assert len(bpb_of(result, "gain")["four"]) == 1
    page = (tmp_path / "out" / "variants.md").read_text()
    assert "Not measured" in page and "| four | 1 |" in page


def test_effects_are_entries_that_the_page_of_levers_reads(
    file: Path, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    run_variants(Request(file), tiny_data, tmp_path / "out", "cpu", start_words=machine)
    path, none = tmp_path / "out" / "effects.toml", tmp_path / "no-ablation"
    assert set(tomllib.loads(path.read_text())) == {"qk_gain", "adapt_bias"}
    effects = {name: read_effects(name, path, none) for name in ("qk_gain", "adapt_bias")}
    (gain,) = effects["qk_gain"]
    assert gain.claim == "gain" and gain.verdict == "helps"
    assert gain.figure == "four 2.0001 BPB, none +4.0 mBPB"
    rows = claims_section(list(read_claims(file).values()), effects).splitlines()
    (row,) = [line for line in rows if "a gain of 4" in line]
    assert "2 mBPB better | PR 1 |" in row and "none +4.0 mBPB | same direction | `gain` |" in row
    (row,) = [line for line in rows if "without variants" in line]
    assert row.endswith("| not measured yet |  |  |")


def test_the_first_effect_of_a_lever_stands_beside_a_claim_without_variants() -> None:
    effect = Effect("1.0 mBPB worse", "s", "w", "hurts")
    helps = Claim("x", "c", "1 mBPB better", "PR", "smear")
    hurts = Claim("x", "c", "1 mBPB worse", "PR", "smear", hurts=True)
    page = claims_section([helps, hurts], {"smear": [effect]})
    assert "1.0 mBPB worse | other direction" in page and "1.0 mBPB worse | same direction" in page


def claim() -> Claim:
    return Claim("c", "", "", "", "loop", best="a")


def rows_of(bpb: dict[str, list[float]]) -> list[Comparison]:
    """The comparisons of variants, each with its figures by seed."""
    measured = {
        name: {"treatment": f"t-{name}", "bpb": {str(s): v for s, v in enumerate(values)}}
        for name, values in bpb.items()
    }
    return compare(claim(), measured, values_beside(claim(), {"c": claim()}, {"c": measured}))


def test_one_seed_shows_nothing_below_three_millibits() -> None:
    for other, verdict in ((2.0029, OPEN), (2.0031, SAME), (1.9969, OTHER)):
        first, row = rows_of({"b": [other], "a": [2.0]})
        assert (first.variant, row.verdict, row.noise_mbpb) == ("a", verdict, None)
    rows = rows_of({"a": [2.0], "b": [2.01], "c": [2.001]})
    assert verdict_of(rows) == OPEN and verdict_of(rows[:2]) == SAME
    assert verdict_of(rows_of({"a": [2.0], "b": [1.9], "c": [2.1]})) == OTHER
    assert rows_of({"a": [], "b": [2.0]}) == []


def test_seeds_are_judged_by_the_spread_of_their_differences() -> None:
    wide = {"a": [2.0, 2.01], "b": [2.008, 2.012]}
    narrow = {"a": [2.0, 2.01], "b": [2.002, 2.0121]}
    (_, row), (_, sure) = rows_of(wide), rows_of(narrow)
    assert row.difference_mbpb == pytest.approx(5) and row.verdict == OPEN
    # Both sides vary by 10 mBPB, and together: the luck of a seed is that of both.
    assert sure.difference_mbpb == pytest.approx(2.05) and sure.verdict == SAME
    assert row.noise_mbpb and sure.noise_mbpb and row.noise_mbpb > sure.noise_mbpb


def test_runs_of_one_base_tell_the_noise_together() -> None:
    def measured(name: str, gains: list[float]) -> dict[str, Any]:
        best = {"treatment": "base", "bpb": {"1": 2.0, "2": 2.01}}
        bpb = {str(i + 1): best["bpb"][str(i + 1)] + g for i, g in enumerate(gains)}
        return {"a": best, name: {"treatment": name, "bpb": bpb}}

    claims = {name: replace(claim(), name=name, base="b") for name in ("x", "y", "z")}
    gains = {"x": [-0.003, -0.0034], "y": [0.001, 0.0013], "z": [0.0, 0.0002]}
    all_measured = {name: measured(name, gains[name]) for name in claims}
    values = values_beside(claims["x"], claims, all_measured)
    # The runs without a change count once.
    assert len(values) == 8
    _, row = compare(claims["x"], all_measured["x"], values)
    alone = values_beside(claims["x"], {"x": claims["x"]}, all_measured)
    _, row_alone = compare(claims["x"], all_measured["x"], alone)
    assert row.difference_mbpb == pytest.approx(row_alone.difference_mbpb)
    assert row.noise_mbpb and row_alone.noise_mbpb and row.noise_mbpb < row_alone.noise_mbpb / 2
    scored = {name: replace(c, figure="scored") for name, c in claims.items()}
    assert len(values_beside(scored["x"], scored, all_measured)) == 4


def test_the_shipped_claims_can_be_measured() -> None:
    claims = read_claims()
    assert {"recurrence-start", "recurrence-kind", "qat-lite", "average", "window-and-lengths"} <= {
        *claims
    }
    assert {"n-gram-experts", "test-time-training"} <= {*claims}
    assert {claim.lever for claim in claims.values()} <= {*lever_names()}
    cells = make_cells(Request())
    by_name = {(cell.claim.name, cell.variant.name): cell for cell in cells}
    # The published start and kind are those of the recipe: one run for both claims.
    starts = by_name["recurrence-start", "0.42"], by_name["recurrence-kind", "AB"]
    assert starts[0].figure.job.name == starts[1].figure.job.name
    kinds = [by_name["recurrence-kind", name].figure for name in ("AB", "alpha", "plain")]
    levers = [{*figure.recipe.levers} for figure in kinds]
    assert levers[0] - levers[2] == {"recur_ab"} and levers[1] - levers[2] == {"recur_alpha"}
    lengths = by_name["window-and-lengths", "6,144 only"].figure
    assert lengths.recipe.train.contexts == ()


def test_two_runs_at_once_need_a_budget_of_steps(
    file: Path, tiny_data: Path, tmp_path: Path
) -> None:
    def open_with(num_at_once: int, *overrides: str) -> Measurement:
        cells = make_cells(Request(file, ("gain",), overrides))
        figures = [cell.figure for cell in cells]
        return Measurement(figures, tiny_data, tmp_path, "cpu", num_at_once)

    seconds, steps = "train.budget_seconds=9", "train.budget_seconds=0"
    with pytest.raises(BenchError, match="2 runs at once share the device"):
        open_with(2, seconds)
    open_with(2, steps)
    open_with(1, seconds)


def test_mistakes_are_named_before_anything_is_trained(
    file: Path, tiny_data: Path, tmp_path: Path, machine: Machine
) -> None:
    text = file.read_text()
    for old, new, kind, message in (
        ('"qk_gain"', '"qk_gian"', BenchError, "no lever 'qk_gian'; did you mean 'qk_gain'"),
        ('best = "four"', 'best = "five"', BenchError, "best = 'five' is none of four, none"),
        ('"before"', '"after"', BenchError, "figure 'after', expected before or scored"),
        ("set = []", "sets = []", BenchError, "unknown key 'sets'"),
        ("set = []", 'set = ["levers.nothing=true"]', RecipeError, "nothing"),
        ('["adapt_bias"]', '["smear"]', RecipeError, "it is no lever of scoring"),
    ):
        assert old in text
        file.write_text(text.replace(old, new, 1))
        with pytest.raises(kind, match=message):
            run_variants(Request(file), tiny_data, tmp_path / "out", "cpu", start_words=machine)
    file.write_text(text)
    with pytest.raises(BenchError, match=r"no variants 'told'"):
        make_cells(Request(file, ("told",)))
    with pytest.raises(BenchError, match="0 seeds measure nothing"):
        Request(file, num_seeds=0)
    with pytest.raises(BenchError, match="needs a vocabulary of 8,192"):
        run_variants(
            Request(VARIANTS, ("qat-lite",)),
            tiny_data,
            tmp_path / "out",
            "cpu",
            start_words=machine,
        )
    assert machine.words == []


@pytest.mark.slow
def test_real_runs_are_trained_packed_and_scored(
    file: Path, tiny_data: Path, tmp_path: Path
) -> None:
    steps = ("train.budget_seconds=0", "train.reserve_seconds=0", "train.budget_steps=3")
    request = Request(file, (), steps)
    result, failed = run_variants(request, tiny_data, tmp_path / "out", "cpu", num_at_once=2)
    assert not failed
    assert all(len(v) == 1 for name in ("gain", "bias") for v in bpb_of(result, name).values())
    (run,) = [path for path in (tmp_path / "out").iterdir() if (path / "model.upar").exists()]
    off = json.loads((run / "score-plain.json").read_text())["bpb"]
    assert bpb_of(result, "bias")["off"] == [off]


HNET = VARIANTS.with_name("hnet.toml")


def rows_of_hnet() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name -> base and changes of each recipe that the ablations of H-Net train."""
    rows = {}
    for claim in read_claims(HNET).values():
        for variant in claim.variants:
            rows[f"{claim.name}: {variant.name}"] = claim.base, variant.set
    return rows


@pytest.mark.parametrize("row", rows_of_hnet())
def test_a_row_of_hnet_can_be_trained(row: str) -> None:
    base, changes = rows_of_hnet()[row]
    full = load_checked(base, changes)
    small = load_checked(f"{base}+cpu", ["model.num_layers=2", *changes])
    torch.manual_seed(0)
    model = build_model(small).train()
    batch, _ = pack_documents([np.append(1, np.arange(4, 200)), np.array([1, 5])], 1, 64)
    for p in (0.0, 1.0):
        model.set_progress(p)
        loss = mean_loss(model, batch)
        assert loss.item() == pytest.approx(math.log(BYTE_IDS), abs=0.2)
        loss.backward()
    assert all(w.grad is not None and w.grad.isfinite().all() for w in model.parameters())
    # Rows share everything but what they are about.
    assert full.train == load_checked("hnet-m1-fixed").train
    assert full.model.context == 4096


def test_the_gate_of_hnet_is_fair() -> None:
    rows = rows_of_hnet()

    def flops_and_weights(row: str) -> tuple[float, int]:
        recipe = load_checked(*rows[f"gate: {row}"])
        with torch.device("meta"):
            model = build_model(recipe)
        return network_flops(model, 4096), sum(w.numel() for w in model.parameters())

    flops, weights = flops_and_weights("stride 4")
    assert flops_and_weights("flat, as many operations")[0] == pytest.approx(flops, rel=0.15)
    assert flops_and_weights("flat, as many parameters")[1] == pytest.approx(weights, rel=0.1)
    assert flops_and_weights("learned")[0] == pytest.approx(flops, rel=0.15)
