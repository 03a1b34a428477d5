"""R01, R15, R16, R19: whether a submission folder is whole and its figures agree, from its files.

Nothing in the folder is executed. Whether the script trains to what the package trains to is shown
by `stages/prove.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from underpar.audit.finding import Finding, apply_rule, judge, not_shown
from underpar.errors import RuleError
from underpar.recipe import Recipe, from_tree, to_toml
from underpar.submit.folder import README, REQUIREMENTS, SCRIPT, SUBMISSION
from underpar.submit.log import log_name
from underpar.submit.train_script import RECIPE_FILE, TRAIN_ENTRY
from underpar.submit.unbundle import read_bundle

# Runs that a claim normally needs (rule R15).
NUM_SEEDS = 3
MAX_FILE_BYTES = 1 << 26
# What the contest asks for by name, and what this project's figures need.
TEXTS = ("author", "github_id", "name", "blurb", "date", "track")
NUMBERS = ("val_loss", "val_bpb", "bytes_total", "bytes_code", "bytes_model")
# The last line of a log.
_FINAL = re.compile(r"final method:\S+ val_loss:(\S+) val_bpb:(\S+) ")
_SIZES = re.compile(r"model_bytes:(\d+) code_bytes:\d+ total_bytes:\d+ artifact_sha256:\w+")


def check_submission(folder: Path, cap_bytes: int) -> list[Finding]:
    """The rules that files alone can show, in turn; an error in a rule is a fail."""
    rules: dict[str, Callable[[Path, int], Finding]] = {
        "files": _files,
        "submission.json": _figures,
        "script": _script,
        "size": _size,
        "runs": _runs,
    }
    return [apply_rule(name, partial(rule, folder, cap_bytes)) for name, rule in rules.items()]


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RuleError(f"{path.name} cannot be read: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise RuleError(f"{path.name} has over {MAX_FILE_BYTES} bytes")
    return content


def _submission(folder: Path) -> dict[str, Any]:
    try:
        tree = json.loads(_read(folder / SUBMISSION))
    except (ValueError, RecursionError) as error:
        raise RuleError(f"{SUBMISSION} is not JSON: {error!s:.80}") from error
    if not isinstance(tree, dict):
        raise RuleError(f"{SUBMISSION} is not a table of values")
    return tree


def bundled_recipe(folder: Path) -> Recipe:
    """The recipe in the script of a submission folder."""
    bundle = read_bundle(_read(folder / SCRIPT))
    if bundle.entry != TRAIN_ENTRY or RECIPE_FILE not in bundle.sources:
        raise RuleError(f"{SCRIPT} is a bundle of {bundle.entry}, expected {TRAIN_ENTRY}")
    try:
        return from_tree(tomllib.loads(bundle.sources[RECIPE_FILE]))
    except (ValueError, RecursionError) as error:
        raise RuleError(f"the recipe in {SCRIPT} is not TOML: {error!s:.80}") from error


def _files(folder: Path, _: int) -> Finding:
    wanted = [README, SUBMISSION, SCRIPT, REQUIREMENTS]
    wanted += [log_name(int(seed)) for seed in _submission(folder)["seeds"]]
    missing = [name for name in wanted if not (folder / name).is_file() or not _read(folder / name)]
    summary = f"missing or empty: {', '.join(missing)}" if missing else ", ".join(wanted)
    return judge("files", not missing, summary, missing=missing)


def _figures(folder: Path, _: int) -> Finding:
    """submission.json has what the contest asks for, and its means are those of its seeds."""
    tree = _submission(folder)
    wrong = [key for key in TEXTS if not isinstance(tree.get(key), str)]
    wrong += [key for key in NUMBERS if not isinstance(tree.get(key), int | float)]
    results = list(tree["seed_results"].values())
    for key in ("val_loss", "val_bpb"):
        if key not in wrong and abs(mean(r[key] for r in results) - tree[key]) > 1e-9:
            wrong.append(f"{key} is not the mean of its seeds")
    if wrong:
        return judge("submission.json", False, f"wrong: {', '.join(wrong)}", wrong=wrong)
    empty = [key for key in TEXTS if not tree[key]]
    if empty:
        return not_shown("submission.json", f"fill in {' and '.join(empty)}", empty=empty)
    return judge("submission.json", True, f"val_bpb {tree['val_bpb']:.6f}, by {tree['author']}")


def _script(folder: Path, _: int) -> Finding:
    """The script compiles, is a bundle of this package, and is the one that was described."""
    script, tree = _read(folder / SCRIPT), _submission(folder)
    recipe = bundled_recipe(folder)
    try:
        compile(script, SCRIPT, "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return judge("script", False, f"{SCRIPT} does not compile: {error!s:.80}")
    compared = read_bundle(script).compared()
    strangers = [*compared["different"], *compared["not_in_this_package"]]
    sha256 = hashlib.sha256(script).hexdigest()
    if sha256 != tree["code_sha256"]:
        return judge("script", False, f"{SCRIPT} is not the file that {SUBMISSION} describes")
    if strangers:
        names = ", ".join(strangers[:3])
        return not_shown("script", f"modules that this package has not: {names}", modules=strangers)
    summary = f"{compared['equal']} modules, all of this package; recipe {recipe.hash}"
    return judge("script", True, summary, sha256=sha256)


def _size(folder: Path, cap_bytes: int) -> Finding:
    """The script on disk and the largest model fit the cap; all stated totals are these sums."""
    tree, code = _submission(folder), len(_read(folder / SCRIPT))
    models = [int(result["bytes_model"]) for result in tree["seed_results"].values()]
    stated = [int(result["artifact_bytes"]) for result in tree["seed_results"].values()]
    total = max(models) + code
    agree = (
        stated == [model + code for model in models]
        and (tree["bytes_code"], tree["bytes_model"], tree["bytes_total"])
        == (code, max(models), total)
        and _logged_sizes(folder, tree) == models
    )
    summary = f"{max(models)} (model) + {code} ({SCRIPT}) = {total} of {cap_bytes} bytes"
    summary += "" if agree else f"; {SUBMISSION} or a log says otherwise"
    return judge("size", agree and total <= cap_bytes, summary, total_bytes=total)


def _logged_sizes(folder: Path, tree: dict[str, Any]) -> list[int]:
    sizes = []
    for seed in tree["seeds"]:
        match = _SIZES.search(_log(folder, int(seed)))
        if match is None:
            raise RuleError(f"{log_name(int(seed))} does not state the size of the model")
        sizes.append(int(match[1]))
    return sizes


def _log(folder: Path, seed: int) -> str:
    return _read(folder / log_name(seed)).decode(errors="replace")


def _runs(folder: Path, _: int) -> Finding:
    """Each seed has a log of the recipe in the script, and ends with the score that is stated."""
    tree, recipe, wrong = _submission(folder), bundled_recipe(folder), []
    seeds = [int(seed) for seed in tree["seeds"]]
    if len(set(seeds)) != len(seeds) or [str(s) for s in seeds] != list(tree["seed_results"]):
        return judge("runs", False, f"seeds {seeds} are not those of seed_results, each once")
    for seed in seeds:
        log, result = _log(folder, seed), tree["seed_results"][str(seed)]
        final = _FINAL.search(log)
        with_seed = replace(recipe, train=replace(recipe.train, seed=seed))
        if final is None or final[2] != f"{result['val_bpb']:.8f}":
            wrong.append(f"{log_name(seed)} does not end with val_bpb {result['val_bpb']:.8f}")
        elif to_toml(with_seed).strip() not in log:
            wrong.append(f"{log_name(seed)} is of another recipe than {SCRIPT}")
    if wrong:
        return judge("runs", False, "; ".join(wrong), wrong=wrong)
    summary = f"{len(seeds)} of {NUM_SEEDS} seeds or more, one recipe"
    if len(seeds) < NUM_SEEDS:
        return not_shown("runs", summary, seeds=seeds)
    return judge("runs", True, summary, seeds=seeds)
