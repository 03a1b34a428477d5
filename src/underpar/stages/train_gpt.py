"""The program of train_gpt.py: train, pack and score a recipe with one command, on any ranks.

`submit.train_script` bundles this module, everything that it imports and the recipe.

    torchrun --standalone --nproc-per-node 8 train_gpt.py --data DATA --out RUN --seed 42

Paths and seed may also come from the variables of the contest's own script: DATA_PATH,
TOKENIZER_PATH, SEED. Data are a folder of `underpar data build`, or published token files, which
are imported first. A run that was stopped continues with the same command.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from underpar.build.levers import resolve_levers, transform_of
from underpar.build.model import weight_shapes
from underpar.build.scoring import says_how
from underpar.compile.startup import wait_for_workers, warm_compiler
from underpar.core.dist import ask_main, process_group
from underpar.core.progress import Task
from underpar.core.run_folder import RunFolder, write_atomic
from underpar.core.runtime import open_runtime, variable
from underpar.data.folder import MANIFEST_NAME, read_manifest
from underpar.data.published.exchange import ImportOptions, import_published
from underpar.errors import DataError, RunError, UnderparError
from underpar.kernels.attention import set_backend_aside
from underpar.quant.rules import check_rules
from underpar.recipe import Recipe, from_tree, merge, parse_override, read_recipe_file, to_tree
from underpar.schema import TrainPart
from underpar.score.method import ADAPT, PLAIN, Method
from underpar.stages.pack import pack
from underpar.stages.score import score_artifact
from underpar.stages.train import train
from underpar.submit.log import log_name, train_log


def main() -> None:
    """Run the words of the command line; a user's mistake is one line and exit code 2."""
    try:
        run(parse(sys.argv[1:]), script_bytes=Path(sys.argv[0]).stat().st_size)
    except (UnderparError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def parse(words: Sequence[str]) -> Namespace:
    """The options; environment variables are their defaults."""
    parser = ArgumentParser("train_gpt.py", description="Train, pack and score the recipe inside.")
    add = parser.add_argument
    data = variable("DATA_PATH", "")
    add("--data", default=data, help="data folder, or published token files; DATA_PATH")
    tokenizer = variable("TOKENIZER_PATH", "")
    add("--tokenizer", default=tokenizer, help="of published token files; TOKENIZER_PATH")
    seed = variable("SEED", str(TrainPart().seed))
    add("--seed", type=int, default=seed, help="SEED")
    add("--out", help="run folder; default: run_seedN")
    add("--set", action="append", default=[], help="change a recipe value: train.budget_steps=9")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--import-only", action="store_true", help="stop after the import of token files")
    options = parser.parse_args(words)
    if not options.data:
        parser.error("no data: give --data FOLDER or set DATA_PATH")
    options.out = options.out or f"run_seed{options.seed}"
    return options


def run(options: Namespace, script_bytes: int) -> None:
    """All stages in turn. The main rank packs; `script_bytes` is the size of the counted script."""
    runtime = open_runtime(options.device)
    warm_compiler(runtime)
    set_backend_aside(runtime.device, runtime.dtype, wait_for_workers)
    recipe = read_recipe(Path(__file__).with_name("recipe.toml"), options.seed, options.set)
    folder, lines = RunFolder(Path(options.out)), Lines(runtime.is_main)
    # Packing needs one process.
    alone = replace(runtime, rank=0, world=1)
    with process_group(runtime):
        data = ask_main(lambda: open_data(options, recipe), runtime)
    if options.import_only:
        return
    trained = train(recipe, data, folder, runtime, lines)
    if not trained["finished"]:
        raise RunError(f"stopped at step {trained.get('step', 0)}; the same command continues")
    with process_group(runtime):
        ask_main(lambda: pack(folder, alone, progress=lines, script_bytes=script_bytes), runtime)
    method = scoring_of(recipe)
    score_artifact(folder.artifact_file, data, runtime, method, progress=lines)
    if runtime.is_main:
        log = train_log(folder, method.label, script_bytes)
        write_atomic(folder.path / log_name(recipe.train.seed), log)
        print("\n".join(log.splitlines()[-3:]))


def read_recipe(path: Path, seed: int, changes: Sequence[str]) -> Recipe:
    """The recipe of a bundle with this seed and with `changes`."""
    tree = to_tree(read_recipe_file(path))
    for change in (f"train.seed={seed}", *changes):
        tree = merge(tree, parse_override(change))
    recipe = resolve_levers(from_tree(tree))
    check_rules(weight_shapes(recipe), recipe.quant.rules)
    return recipe


def scoring_of(recipe: Recipe) -> Method:
    """How a submission is scored: as its recipe says, with the scoring levers that it names."""
    return ADAPT if says_how(recipe) else PLAIN


def open_data(options: Namespace, recipe: Recipe) -> Path:
    """The data folder; published token files are imported into OUT/data, once."""
    source, imported = Path(options.data), Path(options.out) / "data"
    if not any(source.glob("fineweb_val_*.bin")):
        return source
    if (imported / MANIFEST_NAME).exists():
        origins = {Path(file["path"]).parent for file in read_manifest(imported)["inputs"]}
        if origins != {source}:
            raise RunError(f"{imported} was not imported from {source}; choose another --out")
        return imported
    if not options.tokenizer:
        raise DataError(f"{source} holds token files: give --tokenizer FILE or set TOKENIZER_PATH")
    import_published(source, imported, ImportOptions(Path(options.tokenizer), transform_of(recipe)))
    return imported


class Lines:
    """Progress as lines on standard output, one per twentieth of a task."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._name, self._total, self._next = "", 1.0, 0.0

    @contextmanager
    def task(self, name: str, total: float) -> Iterator[Task]:
        """Begin a task."""
        self._name, self._total, self._next = name, total, 0.0
        yield self

    def update(self, completed: float, remark: str = "") -> None:
        """Print the remark if another twentieth is done."""
        if completed / self._total >= self._next:
            self._next = completed / self._total + 0.05
            self.note(f"{self._name} {completed / self._total:.0%} {remark}")

    def note(self, line: str) -> None:
        """Print a line."""
        if self._is_shown:
            print(line, flush=True)
