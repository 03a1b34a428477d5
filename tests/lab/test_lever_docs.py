"""docs/levers.md says what the levers say, and its figures are those of a hand count."""

import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from underpar.build.levers import find_lever, lever_names, resolve_levers
from underpar.cli import app
from underpar.errors import RecipeError
from underpar.kernels.attention import attend
from underpar.lab.claims import read_claims
from underpar.lab.flops import count_flops, count_keys
from underpar.lab.lever_cards import (
    EFFECTS,
    NOT_MEASURED,
    Effect,
    LeverCard,
    all_cards,
    cost_of,
    measured_text,
    parse_docstring,
    read_card,
    read_effects,
)
from underpar.lab.lever_docs import ablation_section, headline, meanings_of, to_markdown
from underpar.recipe import ModelSpec, from_tree, load_recipe

DOCS = Path(__file__).parents[2] / "docs" / "levers.md"

# The full size, spelled out: layers, width, query and key channels, MLP, context.
LAYERS, DIM, Q, K, MLP, CONTEXT = 11, 512, 512, 256, 2048, 2048
HEADS, KEY_HEADS = 8, 4


@pytest.fixture(scope="module")
def cards() -> dict[str, LeverCard]:
    return {card.name: card for card in all_cards()}


@pytest.fixture(scope="module")
def sections(cards: dict[str, LeverCard]) -> dict[str, str]:
    _, *parts = re.split(r"^## ", to_markdown(list(cards.values())), flags=re.MULTILINE)
    return {part.partition("\n")[0]: part for part in parts}


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["levers", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_file_is_what_the_levers_say(cards: dict[str, LeverCard]) -> None:
    now = to_markdown(list(cards.values()))
    hint = "a lever changed: run 'underpar levers --markdown > docs/levers.md'"
    assert DOCS.read_text() == now, hint


def test_every_lever_has_a_section_with_its_words(
    cards: dict[str, LeverCard], sections: dict[str, str]
) -> None:
    assert [name for name in sections if name in cards] == lever_names()
    for name, card in cards.items():
        assert card.source and card.legal and card.what.endswith(".")
        note, meanings = meanings_of(card)
        for words in (card.what, card.why, card.source, card.legal, card.cost, note):
            assert words in sections[name]
        assert card.cost.endswith(".")
        for s in card.settings:
            assert meanings[s.name].endswith(".")
            row = f"| `{s.name}` | {s.type} | `{s.default}` | {meanings[s.name]} |"
            assert row in sections[name]


def test_every_measurement_is_shown_with_its_setting_and_place(sections: dict[str, str]) -> None:
    table = sections["All levers"]
    [measured] = re.findall(r"^\| \[smear\].*\| (.*) \|$", table, re.MULTILINE)
    assert measured == headline(read_effects("smear"))
    for name in lever_names():
        effects = read_effects(name)
        assert (f"| {NOT_MEASURED} |" in re.findall(rf"^\| \[{name}\].*$", table, re.M)[0]) == (
            not effects
        )
        for effect in effects:
            assert f"  - {effect.figure}: {effect.setting} ({effect.where})\n" in sections[name]


def test_effects_are_of_levers_and_of_entries_of_the_log() -> None:
    entries = tomllib.loads(EFFECTS.read_text())
    assert set(entries) <= set(lever_names())
    days = re.findall(r"^## (\S+):", (DOCS.parents[1] / "LOG.md").read_text(), re.MULTILINE)
    for effect in (effect for name in entries for effect in read_effects(name)):
        day = re.match(r"LOG\.md (\S+), ", effect.where)
        assert day is None or day[1] in days, effect
        places = ("docs/", "underpar ablate", "underpar lab variants")
        assert day or effect.where.startswith(places), effect


def test_effects_of_claims_are_of_claims_about_their_lever() -> None:
    claims = read_claims()
    for name in lever_names():
        for effect in read_effects(name):
            assert not effect.claim or claims[effect.claim].lever == name, effect


def test_a_gain_is_the_difference_of_its_figures(tmp_path: Path) -> None:
    path, none = tmp_path / "effects.toml", tmp_path / "none"
    about = 'setting = "s"\nwhere = "w"\n'
    path.write_text(
        f'[[loop]]\nbpb = [1.25, 1.2375]\n{about}verdict = "helps"\n'
        f'[[loop]]\nbpb = [1.2375, 1.25]\n{about}verdict = "hurts"\n'
        f'[[loop]]\nbpb = [1.25, 1.25]\n{about}verdict = "none"\n'
        f'[[loop]]\ngain = 0.25\n{about}verdict = "helps"\n'
    )
    figures = [effect.figure for effect in read_effects("loop", path, none)]
    assert figures[0] == "12.5 mBPB better (1.2500 to 1.2375 BPB)"
    assert figures[1] == "12.5 mBPB worse (1.2375 to 1.2500 BPB)"
    assert figures[2].startswith("no change") and figures[3] == "0.2 mBPB better"
    assert read_effects("smear", path, none) == ()


def test_a_lever_that_lost_twice_and_never_helped_is_marked() -> None:
    hurt, helped = (Effect("f", "s", "w", verdict) for verdict in ("hurts", "helps"))
    assert headline([hurt, hurt]) == "lost twice: f; 1 more, 1 worse"
    assert measured_text([hurt, hurt]) == "lost twice: f (s; w); f (s; w)"
    assert headline([hurt, helped, hurt]) == "f; 2 more, 1 worse"
    assert headline([hurt]) == "f"
    assert headline([]) == measured_text([]) == NOT_MEASURED


def test_links_lead_to_sections(sections: dict[str, str]) -> None:
    pattern = r"\]\(#(\w+)\)"
    assert re.findall(pattern, sections["All levers"]) == lever_names()
    assert set(re.findall(pattern, "".join(sections.values()))) <= set(sections)


def test_needs_are_shown_and_not_counted(
    cards: dict[str, LeverCard], sections: dict[str, str]
) -> None:
    assert "**Needs**: loop" in sections["recur_ab"]
    assert "Needs" not in sections["loop"]
    # a * x + b * before at six visits; the loop itself is no part of it.
    assert cards["recur_ab"].flops_per_token == 6 * 3 * DIM


def test_the_example_of_the_document_is_a_recipe(sections: dict[str, str]) -> None:
    text = sections["How to switch one on"]
    [table] = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    overrides = re.findall(r"--set (\S+)", text)
    wanted = resolve_levers(from_tree(tomllib.loads(table))).levers
    assert len(overrides) == 2
    for override in overrides:
        levers = resolve_levers(load_recipe("baseline", [override])).levers
        assert levers.keys() == wanted.keys()
    assert levers == wanted


def ablation(loops_on: float | None) -> dict[str, object]:
    """What `underpar ablate` writes, with made-up values."""
    row = {"lever": "smear", "also_dropped": [], "loops_on": False, "bpb": 2.5}
    row |= {"difference_mbpb": 500.0, "noise_mbpb": 0.25, "beyond_noise": True}
    loop = {**row, "lever": "loop", "also_dropped": ["recur_ab"], "loops_on": True}
    loop |= {"difference_mbpb": -0.125, "beyond_noise": False}
    return {
        "recipe": "mine",
        "overrides": ["train.clip=1.0"],
        "recipe_hash": "0123456789",
        "tokens": 12_345_678,
        "device": "a device",
        "seeds": [7, 8],
        "baseline": {"bpb": [1.9, 2.1], "mean": 2.0, "sd": 0.14142},
        "loops_on": loops_on,
        "levers": [row] if loops_on is None else [row, loop],
    }


def test_an_ablation_is_a_section_where_there_is_one(
    cards: dict[str, LeverCard], tmp_path: Path
) -> None:
    some = [cards["smear"], cards["loop"]]
    path = tmp_path / "ablation.json"
    without = to_markdown(some, path)
    assert "One recipe without each lever" not in without
    path.write_text(json.dumps(ablation(1.875)))
    text = to_markdown(some, path)
    section = ablation_section(ablation(1.875))
    # Between the table of all levers and the first of them.
    assert text == without.replace("\n\n## smear\n", f"\n\n{section}\n\n## smear\n")
    assert "`mine` with `train.clip=1.0` (hash\n0123456789)" in section
    assert "12,345,678 tokens (a device) with the seeds 7, 8:\n2.0000 bits" in section
    assert "standard deviation of 141.42 mBPB" in section
    head, rule, *rows = section.split("\n\n")[-1].splitlines()
    assert head == "| without | bits per byte | difference, mBPB | noise, mBPB | beyond noise |"
    assert rule == "| --- | ---: | ---: | ---: | --- |"
    assert rows == [
        "| smear | 2.5000 | +500.00 | 0.25 | yes |",
        "| loop (and recur_ab, loops on) | 2.5000 | -0.12 | 0.25 | no |",
    ]
    assert "(1.8750 bits per byte)" in section


def test_a_section_speaks_of_loops_only_where_they_were_switched_on() -> None:
    text = ablation_section(ablation(None))
    assert "oops" not in text
    assert "\n\n\n" not in text
    assert "\n\n\n" not in ablation_section(ablation(1.875))


MARKED = {"source": "PR 1 (a: b).", "legal": "it is.", "cost": "two weights."}


@pytest.mark.parametrize("order", list(itertools.permutations(MARKED)), ids="-".join)
@pytest.mark.parametrize("gap", [" ", "\n", "\n\n"])
def test_marks_stand_in_any_order(order: tuple[str, ...], gap: str) -> None:
    marks = gap.join(f"{mark.capitalize()}: {MARKED[mark]}" for mark in order)
    parts = parse_docstring(f"It does.\n\nFor a\nreason.\n\nAnd more.{gap}{marks}\n")
    assert parts == {"what": "It does.", "why": "For a reason.\n\nAnd more.", **MARKED}


def test_marks_may_be_missing_or_said_twice() -> None:
    plain = {"why": "", "source": "", "legal": "", "cost": ""}
    assert parse_docstring("It does.") == {"what": "It does.", **plain}
    assert parse_docstring("") == {"what": "", **plain}
    twice = parse_docstring("It does.\n\nSource: PR 1. Legal: yes. Source:\nPR 2. Cost:")
    assert twice["source"] == "PR 1. PR 2."
    assert (twice["why"], twice["cost"]) == ("", "")
    # Words that only look like marks.
    other = parse_docstring("It does.\n\nResource: none. Cost there. Source: PR 1.")
    assert other["why"] == "Resource: none. Cost there."


def test_a_broken_docstring_line_is_one_paragraph(cards: dict[str, LeverCard]) -> None:
    assert "\n" in (find_lever("smear").__doc__ or "").split("Legal:")[1].strip()
    assert "\n" not in cards["smear"].legal


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("smear", 1 + 12),
        ("x0_mix", LAYERS * 2 * DIM),
        ("qk_gain", LAYERS * HEADS),
        ("sparse_attn_gate", LAYERS * HEADS * 12),
        # Frozen or not, a weight is packed.
        ("asym_softcap", 2),
        ("loop", 0),
        ("ema", 0),
        ("caseops", 0),
    ],
)
def test_parameters_by_hand(cards: dict[str, LeverCard], name: str, number: int) -> None:
    assert cards[name].num_parameters == number
    assert cards[name].num_bytes == 2 * number


def norm_flops(width: int, rows: int) -> int:
    """Square, mean and product for each element; epsilon and root for each row."""
    return 3 * width + 2 * rows


def block_flops(num_keys: float) -> float:
    """One visit of a block, a token, with `num_keys` seen by a query."""
    products = 2 * DIM * (Q + K + K + Q + MLP + MLP)
    norms = 2 * norm_flops(DIM, 1) + norm_flops(Q, HEADS) + norm_flops(K, KEY_HEADS)
    rotations = 3 * (Q + K)
    # Scales and sums of both branches, squared ReLU.
    pointwise = 4 * DIM + 2 * MLP
    return products + norms + rotations + pointwise + 4 * Q * num_keys


MEAN_KEYS = (CONTEXT + 1) / 2


def mudd_flops() -> int:
    """A small network in each layer, then one product and one sum for each source."""
    network = norm_flops(DIM, 1) + 2 * DIM * 16 + 16 + 2 * 16 * (LAYERS + 1) + (LAYERS + 1)
    return sum(network + 2 * DIM * (layer + 1) for layer in range(LAYERS))


def window_flops() -> float:
    """Five layers whose queries see 513 keys at most."""
    mean = sum(min(place, 513) for place in range(1, CONTEXT + 1)) / CONTEXT
    return 5 * 4 * Q * (mean - MEAN_KEYS)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("qk_gain", LAYERS * Q),
        ("mudd", mudd_flops()),
        ("loop", 6 * block_flops(MEAN_KEYS)),
        ("window", window_flops()),
        ("sparse_attn_gate", LAYERS * (2 * 12 * HEADS + 2 * HEADS + Q)),
        ("softcap", 0),
        ("adapt_scales", 0),
    ],
)
def test_operations_by_hand(cards: dict[str, LeverCard], name: str, flops: float) -> None:
    assert cards[name].flops_per_token == flops


def test_the_baseline_by_hand(cards: dict[str, LeverCard]) -> None:
    spec = ModelSpec()
    # The embedding's norm and the last; cosines and sines of 32 angles; the capped head.
    rest = 2 * norm_flops(DIM, 1) + 3 * 32 + spec.vocab_size * (2 * DIM + 3)
    plain = cost_of(())
    assert plain.flops_per_token == LAYERS * block_flops(MEAN_KEYS) + rest
    share = cards["loop"].flops_per_token / plain.flops_per_token
    assert cards["loop"].flops_percent == pytest.approx(100 * share)


@pytest.mark.parametrize("window", [0, 1, 5, 40])
def test_attention_is_counted_by_the_keys_it_sees(window: int) -> None:
    lengths = (16, 16)
    q, kv = torch.zeros(32, 4, 8), torch.zeros(32, 2, 8)
    cu = torch.tensor([0, 16, 32], dtype=torch.int32)
    reach = window or max(lengths)
    seen = sum(min(place, reach) + 1 for n in lengths for place in range(n))
    assert count_keys(32, 16, window) == seen
    assert count_flops(lambda: attend(q, kv, kv, cu, 16, window)) == 4 * 4 * 8 * seen


def test_only_arithmetic_counts() -> None:
    x, table = torch.ones(6, 4), torch.ones(100, 4)
    ids = torch.zeros(6, dtype=torch.int64)
    assert count_flops(lambda: torch.cat((x, x)).T[:2].to(torch.float64)) == 0
    assert count_flops(lambda: torch.nn.functional.embedding(ids, table)) == 0
    assert count_flops(lambda: (ids * 3 + 1) % 7) == 0
    assert count_flops(lambda: x > 0) == 0
    assert count_flops(lambda: x[0] * x) == 24
    assert count_flops(lambda: x.sum(-1)) == 24
    assert count_flops(lambda: x @ table.T) == 2 * 6 * 4 * 100
    assert count_flops(lambda: x @ x[0]) == 2 * 6 * 4
    assert count_flops(lambda: torch.addmm(x[:, :1], x, x.T)) == (2 * 4 + 1) * 36


def test_neutral_states_are_named(cards: dict[str, LeverCard]) -> None:
    assert cards["partial_rope"].neutral == "settings `dims = 0`"
    assert cards["norm_scale"].neutral == "settings `power = 0.0`"
    assert "one half" in cards["sparse_attn_gate"].neutral
    assert "twice the scale" in cards["sparse_attn_gate"].neutral
    assert cards["ema"].neutral == ""


def test_settings_are_read_as_a_recipe_writes_them(cards: dict[str, LeverCard]) -> None:
    by_name = {s.name: s for s in cards["adapt_scales"].settings}
    assert (by_name["lr"].type, by_name["lr"].default) == ("float", "0.5")
    assert by_name["patterns"].type == "list of str"
    for card in cards.values():
        table = {s.name: tomllib.loads(f"x = {s.default}")["x"] for s in card.settings}
        tree = {"levers": {card.name: table, **{need: {} for need in card.needs}}}
        kind = find_lever(card.name).Settings
        assert kind(**resolve_levers(from_tree(tree)).levers[card.name]) == kind()


def test_an_unknown_lever_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean 'smear'"):
        read_card("smeer")
    process = subprocess.run(
        [sys.executable, "-m", "underpar", "levers", "smeer"], capture_output=True, text=True
    )
    assert process.returncode == 2
    assert process.stderr == "error: unknown lever 'smeer'; did you mean 'smear'?\n"


def test_the_command_prints_table_card_and_document(cards: dict[str, LeverCard]) -> None:
    table = run()
    assert all(name in table for name in cards)
    card = run("recur_alpha")
    assert "PR 1894" in card and "loop" in card and "sites" in card
    assert "PR 1894" not in run("ema")
    assert run("--markdown") == to_markdown(list(cards.values()))


def test_the_command_prints_json(cards: dict[str, LeverCard]) -> None:
    everything = json.loads(run("--json"))
    assert list(everything) == lever_names()
    one = json.loads(run("mudd", "--json"))
    assert one == everything["mudd"]
    assert one["flops_per_token"] == mudd_flops()
    assert one["settings"] == [{"name": "width", "type": "int", "default": "16"}]


def test_help_teaches_with_examples() -> None:
    text = run("--help")
    assert "underpar levers --markdown > docs/levers.md" in text
    assert "--set levers.smear=true" in text
