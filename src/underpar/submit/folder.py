"""The folder of a submission (rule R19): the names of its files, its README and requirements.

The contest asks for README.md, submission.json, a train log per run, the script and what the script
depends on (parameter-golf README, "Submission Process").
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import packages_distributions, version
from sys import stdlib_module_names
from typing import Any, Protocol

from underpar.build.levers import find_lever
from underpar.recipe import Recipe
from underpar.submit.bundle import module_path, modules_of
from underpar.submit.train_script import TRAIN_ENTRY

README, SUBMISSION, SCRIPT = "README.md", "submission.json", "train_gpt.py"
REQUIREMENTS = "requirements.txt"


class Ruling(Protocol):
    """A rule of an audit, its verdict, and the numbers behind it in a sentence."""

    @property
    def rule(self) -> str:
        """Name of the rule."""

    @property
    def verdict(self) -> str:
        """Pass, fail or not shown."""

    @property
    def summary(self) -> str:
        """What was seen."""


def requirements(recipe: Recipe, submission: Mapping[str, Any]) -> str:
    """What train_gpt.py imports and this machine has, with versions; torch as it trained."""
    sources = (module_path(module).read_text() for module in modules_of(recipe, TRAIN_ENTRY))
    packages = set().union(*map(_foreign_packages, sources))
    distributions = packages_distributions()
    installed = {distributions[package][0] for package in packages if package in distributions}
    versions = {name: version(name) for name in installed}
    versions["torch"] = str(submission["pytorch_version"])
    # A local version, as in 2.13.0+cpu, is not on the package index.
    lines = (f"{name}=={number.partition('+')[0]}\n" for name, number in sorted(versions.items()))
    return "".join(lines)


@cache
def _foreign_packages(source: str) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    tops = frozenset(name.partition(".")[0] for name in names)
    return tops - stdlib_module_names - {"underpar"}


def readme(
    submission: Mapping[str, Any], recipe: Recipe, audits: Mapping[int, Sequence[Ruling]]
) -> str:
    """README.md from submission.json, the recipe and the findings of each seed's audit."""
    return (
        "\n\n".join(
            [
                f"# {submission['name']}",
                _headline(submission),
                _results(submission),
                "## What is counted\n\n" + _counted(submission),
                "## What it is\n\n" + _method(submission, recipe),
                "## Run it\n\n" + _run(submission),
                "## Audit\n\n" + _audit(audits),
                "## Files\n\n" + _files(submission),
            ]
        )
        + "\n"
    )


def _headline(tree: Mapping[str, Any]) -> str:
    number, deviation = len(tree["seeds"]), tree["val_bpb_std"]
    seeds = (
        f"mean of {number} seeds, standard deviation {deviation:.6f}" if deviation else "one run"
    )
    text = f"**val_bpb {tree['val_bpb']:.6f}** ({seeds}), val_loss {tree['val_loss']:.6f} nats per "
    text += f"token, {tree['bytes_total']:,} bytes, {tree['hardware']}. {tree['blurb']}."
    if tree["track"] != "10min_16mb":
        text += (
            "\n\nThis is a non-record submission: it was not trained and scored on eight H100 "
            "within 600 seconds each."
        )
    return text


def _results(tree: Mapping[str, Any]) -> str:
    columns = ["seed", "val_bpb", "val_loss", "before rounding", "steps", "train s", "eval s"]
    columns += ["model bytes", "with code", "audit"]
    rows = [
        f"| {seed} | {r['val_bpb']:.6f} | {r['val_loss']:.6f} | {r['pre_quant_val_bpb']:.6f} | "
        f"{r['steps']:,} | {r['train_seconds']:.1f} | {r['eval_seconds']:.1f} | "
        f"{r['bytes_model']:,} | {r['artifact_bytes']:,} | {r['audit']} |"
        for seed, r in tree["seed_results"].items()
    ]
    return "\n".join([f"| {' | '.join(columns)} |", "|---|" + "---:|" * 8 + "---|", *rows])


def _counted(tree: Mapping[str, Any]) -> str:
    return (
        f"The counted code is `{SCRIPT}` as it lies here, {tree['bytes_code']:,} bytes, with all "
        "code of training, packing and scoring and with the recipe. The model file holds the "
        f"quantized weights and the tokenizer; the largest has {tree['bytes_model']:,} bytes. "
        f"Together they are {tree['bytes_total']:,} bytes. `{SCRIPT}` needs no other file of this "
        "project, and no other code is left out of the count. Imported packages are in "
        f"`{REQUIREMENTS}`."
    )


def _method(tree: Mapping[str, Any], recipe: Recipe) -> str:
    spec = recipe.model
    widths = ", ".join(str(width) for width in dict.fromkeys(spec.mlp_dims))
    lines = [
        f"{spec.num_layers} layers, width {spec.dim}, {spec.num_heads} heads and "
        f"{spec.num_kv_heads} of keys and values, MLP {widths}, {spec.vocab_size} tokens, "
        f"context {spec.context}. Quantization rules, the first match counts: "
        + ", ".join(f"`{rule}`" for rule in recipe.quant.rules)
        + f". The score is `{tree['score_method']}`.",
        "",
    ]
    for name in recipe.levers:
        about = (find_lever(name).__doc__ or "").splitlines()[0]
        lines.append(f"- `{name}`: {about}")
    lines += ["", f"`underpar unbundle {SCRIPT} --out sources` gives the sources and the recipe."]
    return "\n".join(lines)


def _run(tree: Mapping[str, Any]) -> str:
    ranks, seed = tree["hardware"].partition("x")[0], tree["seeds"][0]
    return (
        "```\n"
        f"pip install -r {REQUIREMENTS}\n"
        f"DATA_PATH=DATA TOKENIZER_PATH=MODEL SEED={seed} torchrun --standalone "
        f"--nproc_per_node={ranks} {SCRIPT}\n"
        "```\n\n"
        "DATA holds published token files (`fineweb_train_*.bin`, `fineweb_val_*.bin`), which are "
        "imported first, or is a data folder of `underpar data build`. The run leaves the model, "
        f"its score and the log in `run_seed{seed}`. Data identity of the runs here: "
        f"`{tree['data_identity']}`. The runs were made with {tree['tool']}, whose modules "
        f"`{SCRIPT}` contains. `underpar submit --verify FOLDER` trains {SCRIPT} at tiny size "
        "from an empty folder and compares model and score with those of the package."
    )


def _audit(audits: Mapping[int, Sequence[Ruling]]) -> str:
    seeds = list(audits)
    lines = [
        f"| rule | {' | '.join(f'seed {seed}' for seed in seeds)} | evidence, seed {seeds[0]} |",
        "|---|" + "---|" * (len(seeds) + 1),
    ]
    for ruling in audits[seeds[0]]:
        verdicts = [
            next((r.verdict for r in audits[seed] if r.rule == ruling.rule), "not judged")
            for seed in seeds
        ]
        evidence = ruling.summary.replace("|", "/")
        lines.append(f"| {ruling.rule} | {' | '.join(verdicts)} | {evidence} |")
    return "\n".join(lines)


def _files(tree: Mapping[str, Any]) -> str:
    logs = ", ".join(f"`train_seed{seed}.log`" for seed in tree["seeds"])
    return (
        f"`{SCRIPT}` (SHA-256 `{tree['code_sha256']}`), `{SUBMISSION}`, `{REQUIREMENTS}`, {logs}."
    )
