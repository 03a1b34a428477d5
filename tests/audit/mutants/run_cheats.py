"""Cheats in the run folder, as data."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forge import CPU, Forge, Mutant, scaled

from chains import forge as forge_chain
from chains import made_elsewhere, other_start
from underpar.artifact.format import frame, squeeze, unframe, unsqueeze
from underpar.artifact.table import MAX_HEADER_BYTES
from underpar.audit.case import Limits, hash_files
from underpar.audit.finding import NOT_SHOWN
from underpar.quant.files import read_quantized, save_quantized
from underpar.recipe import from_tree, to_toml, to_tree
from underpar.score.method import ADAPT, Method
from underpar.stages.pack import pack_run
from underpar.stages.score import score_artifact

Tree = dict[str, Any]


def plain(change: Callable[[Tree], object]) -> Callable[[Forge], object]:
    return lambda forge: forge.edit_score("plain", change)


def adapt(change: Callable[[Tree], object]) -> Callable[[Forge], object]:
    return lambda forge: forge.edit_score("adapt", change)


def first(**values: Any) -> Callable[[Tree], object]:
    """Other values in the first row of a ledger."""
    return lambda tree: tree["ledger"][0].update(values)


def times(factor: float, rows: slice = slice(None)) -> Callable[[Tree], object]:
    """Bits of some documents by a factor."""

    def change(tree: Tree) -> None:
        for row in tree["ledger"][rows]:
            row["bits"] *= factor

    return change


def raw(name: str, **values: Any) -> Callable[[Forge], object]:
    """Other values in a file of the run; nothing is added up again."""
    return lambda forge: forge.edit_json(forge.run.path / name, lambda tree: tree.update(values))


def shift_targets(tree: Tree) -> None:
    tree["ledger"][0]["num_targets"] += 1
    tree["ledger"][1]["num_targets"] -= 1


def count_more_bytes(rows: list[Tree]) -> None:
    for row in rows:
        row["num_bytes"] += row["num_targets"]


def hide_setting(forge: Forge) -> None:
    text = forge.run.recipe_file.read_text()
    forge.run.recipe_file.write_text('base = "baseline"\n' + text)


def say_other_rate(forge: Forge) -> None:
    forge.edit_recipe(lambda tree: tree["train"].update(matrix_lr=0.5))


def borrow_processor(forge: Forge) -> None:
    """A run that began with other weights than its seed gives; the chain names another machine."""
    forge_chain(forge.run, lambda entries: made_elsewhere(other_start(entries)))


def round_by_hand(forge: Forge) -> None:
    """One weight rounded otherwise than packing does; the file names another machine."""
    tensors, about = read_quantized(forge.run.quantized_file)
    name = next(n for n, t in tensors.items() if t.codes is not None and not t.scheme.states)
    codes = np.array(tensors[name].codes)
    codes[0, 0] += 1 if codes[0, 0] <= 0 else -1
    tensors[name] = replace(tensors[name], codes=codes)
    about["environment"]["processor"] = "another"
    save_quantized(forge.run.quantized_file, tensors, about)
    pack_run(forge.run)
    forge.score()
    forge.score(ADAPT)


def borrow_gpu(forge: Forge) -> None:
    """Bits within the tolerance for another machine, and the name of one."""
    forge.edit_score("adapt", times(1 - 1.9e-4))
    forge.edit_score("adapt", lambda tree: tree.update(device="NVIDIA H200"))


def borrow_precision(forge: Forge) -> None:
    """A plain score of products in bf16, and bits within their tolerance."""
    bf16 = replace(CPU, precision=torch.bfloat16)
    score_artifact(forge.run.artifact_file, forge.data, bf16)
    forge.edit_score("plain", times(1 - 1.9e-4))


def say_other_lever(forge: Forge) -> None:
    forge.edit_recipe(lambda tree: tree["levers"]["smear"].update(init=0.9))


def claim_larger_cap(forge: Forge) -> None:
    """A recipe that allows itself more than the auditor does, in all files."""

    def change(tree: Tree) -> None:
        tree["limits"]["cap_bytes"] = 10**9

    recipe = forge.edit_recipe(change)
    forge.edit_artifact(lambda a: replace(a, recipe=replace(a.recipe, limits=recipe.limits)))
    forge.limits = Limits(cap_bytes=50_000)


def tell_artifact(section: str, **values: Any) -> Callable[[Forge], object]:
    """Another recipe in the artifact's header than in the run."""

    def change(forge: Forge) -> None:
        def told(tree: Tree) -> Tree:
            table = tree
            for key in section.split("."):
                table = table[key]
            table.update(values)
            return tree

        forge.edit_artifact(lambda a: replace(a, recipe=from_tree(told(to_tree(a.recipe)))))

    return change


def name_lever_of_the_folder(forge: Forge) -> None:
    (forge.run.path / "mine.py").write_text("STAGE = 'infer'\n")
    forge.run.recipe_file.write_text(forge.run.recipe_file.read_text() + "\n[levers.mine]\n")


def other_script(forge: Forge) -> None:
    """As long as the script was, but it prints a number of its own."""
    size = forge.run.script_file.stat().st_size
    script = b"print('{\"bpb\": 0.9}')\n"
    forge.run.script_file.write_bytes(script + b"#" * (size - len(script)))


def script_with_helper(forge: Forge) -> None:
    """A short script that imports what lies beside it."""
    forge.run.script_file.rename(forge.run.path / "helper.py")
    forge.run.script_file.write_bytes(b"import helper\n")
    forge.edit_json(forge.run.budget_file, lambda tree: None)


def put_beside(name: str) -> Callable[[Forge], object]:
    def change(forge: Forge) -> None:
        path = forge.run.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"weights = 'elsewhere'\n")

    return change


def link_artifact(forge: Forge) -> None:
    outside = forge.run.path.parent / "elsewhere.upar"
    forge.run.artifact_file.rename(outside)
    forge.run.artifact_file.symlink_to(outside)


def link_package(forge: Forge) -> None:
    outside = forge.run.path.parent / "elsewhere"
    outside.mkdir()
    (forge.run.path / "torch").symlink_to(outside)


def append_payload(forge: Forge) -> None:
    forge.write_artifact(forge.run.artifact_file.read_bytes())
    forge.run.artifact_file.write_bytes(forge.run.artifact_file.read_bytes() + b"second payload")


def hide_payload(forge: Forge) -> None:
    """A payload in the header, where no reader looks; the frame is valid."""
    sections = unframe(forge.run.artifact_file.read_bytes(), 6)
    header = json.loads(unsqueeze(sections[0], 1 << 24))
    header["payload"] = "held-out text"
    forge.write_artifact(
        frame([squeeze(json.dumps(header, sort_keys=True).encode()), *sections[1:]])
    )


def name_twice(forge: Forge) -> None:
    """A better score before the honest one: some programs take the first, some the last."""
    path = forge.run.score_file("plain")
    path.write_text(path.read_text().replace('"bpb"', '"bpb": 0.9, "bpb"', 1))


def count_cheapest_twice(tree: Tree) -> None:
    """The row of the cheapest document also in place of the dearest."""
    rows = sorted(tree["ledger"], key=lambda row: row["bits"] / max(1, row["num_targets"]))
    rows[-1].update({**rows[0], "document": rows[-1]["document"]})


def skip_dearest(tree: Tree) -> None:
    """The dearest document as if it had no target; its bytes count."""
    max(tree["ledger"], key=lambda row: row["bits"]).update(bits=0.0, num_targets=0)


def link_script(forge: Forge) -> None:
    outside = forge.run.path.parent / "elsewhere.py"
    forge.run.script_file.rename(outside)
    forge.run.script_file.symlink_to(outside)


def put_bomb(forge: Forge) -> None:
    """A header of some kilobytes that unpacks to more than any header may have."""
    sections = unframe(forge.run.artifact_file.read_bytes(), 6)
    bomb = squeeze(bytes(MAX_HEADER_BYTES + 1))
    forge.run.artifact_file.write_bytes(frame([bomb, *sections[1:]]))


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def pickle_weights(forge: Forge) -> None:
    forge.run.weights_file.write_bytes(pickle.dumps(Touch(forge.run.path / "was-run")))


def price_before_quantization(forge: Forge) -> None:
    """Half of the nats and bits per byte in validation.json; they fit each other."""

    def change(tree: Tree) -> None:
        for key in ("live_bpb", "live_nats", "average_bpb", "average_nats"):
            tree[key] /= 2

    forge.edit_json(forge.run.validation_file, change)


def shrink_budget(tree: Tree) -> None:
    tree["total_bytes"] -= 5000
    tree["classes"]["framing"] -= 5000


def swap_weights(forge: Forge) -> None:
    from underpar.core.tensor_files import read_tensors, save_tensors

    tensors, about = read_tensors(forge.run.weights_file)
    save_tensors(forge.run.weights_file, {n: t * 1.001 for n, t in tensors.items()}, about)


def tuned_elsewhere(forge: Forge) -> None:
    """Other weights than were packed, as after tuning on the held-out text; scored honestly."""
    forge.edit_artifact(lambda artifact: scaled(artifact, 1.01))
    forge.score()


def score_of_other_artifact(forge: Forge) -> None:
    forge.edit_artifact(lambda artifact: scaled(artifact, 1.5))


def round_again(forge: Forge) -> None:
    """Coarser matrices after scoring; scores, budget and script say that they are of them."""
    recipe = forge.run.read_recipe()
    pack_run(forge.run, part=replace(recipe.quant, rules=("blocks.* int4", "* fp16")))
    forge.write_artifact(forge.run.artifact_file.read_bytes())


def edit_and_hash(forge: Forge) -> None:
    """A lower score, and beside it a verdict that names the hash of every file as it is now."""
    forge.edit_score("plain", times(0.999))
    verdict = {"verdict": "pass", "profile": "strict", "findings": []}
    files = hash_files(forge.run)
    verdict |= {"files": files, "artifact_sha256": files["model.upar"]}
    forge.run.audit_file.write_text(json.dumps(verdict))


def replay_time(forge: Forge) -> None:
    """A clock that says half of what scoring took; the auditor's limit lies between."""
    tree = json.loads(forge.run.score_file("plain").read_text())
    took = sum(tree["seconds"].values())
    forge.edit_score("plain", lambda t: t.update(seconds={"score": 1e-7 * took}))
    forge.run.score_file("adapt").unlink()
    forge.limits = Limits(score_seconds=1e-6 * took)


def early_clock(forge: Forge) -> None:
    """A run of one second, says one file; the log says more."""
    forge.edit_json(forge.run.validation_file, lambda tree: tree.update(seconds=1e-3))


def backward_clock(forge: Forge) -> None:
    last = list(forge.run.metrics())[-1]["step"]
    forge.edit_metrics(lambda line: line.update(seconds=1e-3) if line["step"] == last else None)
    forge.edit_json(forge.run.validation_file, lambda tree: tree.update(seconds=1e-3))


def label_of_others(forge: Forge) -> None:
    """The plain score in the file of the adapted one."""
    tree = json.loads(forge.run.score_file("plain").read_text()) | {"method": "adapt"}
    tree["how"]["name"] = "adapt"
    forge.run.score_file("adapt").write_text(json.dumps(tree))


def twice_the_lever(forge: Forge) -> None:
    tree = json.loads(forge.run.score_file("adapt").read_text())
    tree["how"] |= {"name": "", "levers": ["adapt_scales", "adapt_scales"]}
    tree["method"] = "adapt_scales+adapt_scales"
    forge.run.score_file(tree["method"]).write_text(json.dumps(tree))


def with_other_rate(forge: Forge) -> None:
    forge.score(Method(("adapt_scales",)))
    settings = "adapt_scales"
    forge.edit_score(settings, lambda t: t["how"]["settings"][settings].update(lr=0.2))


def best_of_two(forge: Forge) -> None:
    """The better of two scores for each document."""
    other = json.loads(forge.run.score_file("adapt").read_text())["ledger"]

    def change(tree: Tree) -> None:
        for row, rival in zip(tree["ledger"], other, strict=True):
            row["bits"] = min(row["bits"], rival["bits"], row["bits"] - 3.0)

    forge.edit_score("plain", change)


def only_first_documents(tree: Tree) -> None:
    tree["ledger"] = tree["ledger"][:3]


def learn_first(tree: Tree) -> None:
    tree["events"].insert(0, ["adapt", 0, 0])


def text_of_numbers(tree: Tree) -> None:
    tree["ledger"][0]["bits"] = str(tree["ledger"][0]["bits"])


SCORE_FILES = [
    Mutant("halved", "all bits of the plain score halved", "reproduction", plain(times(0.5))),
    Mutant("tiny gain", "all bits lower by a hundred-thousandth", "reproduction",
           plain(times(1 - 1e-5))),
    Mutant("tiny adapted gain", "the same for the adapted score", "reproduction",
           adapt(times(1 - 1e-5)), NOT_SHOWN),
    Mutant(
        "one document", "bits of one document 5 % lower", "reproduction",
        plain(times(0.95, slice(1, 2))),
    ),
    Mutant("best of two", "per document the better of two scores", "reproduction", best_of_two),
    Mutant("adapted forged", "bits of the adapted score alone", "reproduction", adapt(times(0.99))),
    Mutant(
        "other settings", "the learning rate that a score says it was made with", "score files",
        adapt(lambda t: t["how"]["settings"]["adapt_scales"].update(lr=0.2)),
    ),
    Mutant("settings of a method", "the learning rate of a method of --with", "reproduction",
           with_other_rate, NOT_SHOWN),
    Mutant("borrowed machine", "another machine's name, for its larger tolerance", "reproduction",
           lambda f: (f.edit_score("adapt", times(1 - 3e-4)),
                      f.edit_score("adapt", lambda t: t.update(device="NVIDIA H200")))),
    Mutant("borrowed GPU", "a smaller gain, within the tolerance for another machine",
           "reproduction", borrow_gpu, NOT_SHOWN),
    Mutant("borrowed precision", "a plain score in bf16, for its larger tolerance", "reproduction",
           borrow_precision, NOT_SHOWN),
    Mutant(
        "stopped elsewhere", "learning ended at a step of choice, and 32 bits say so",
        "reproduction", adapt(lambda t: t.update(stopped_at=0, side_bits=32.0)),
    ),
    Mutant("negative bits", "bits below 0", "score files", plain(first(bits=-1e5))),
    Mutant("negative score", "-0.0003 bits per byte", "score files", plain(times(-1e-4))),
    Mutant("minus zero", "a document for -0.0 bits", "score files", plain(first(bits=-0.0))),
    Mutant("side bits NaN", "side information of no number", "score files",
           raw("score-plain.json", side_bits=math.nan)),
    Mutant("named twice", "a better score before the honest one, under the same key",
           "score files", name_twice),
    Mutant("counted twice", "the cheapest document also in place of the dearest", "coverage",
           plain(count_cheapest_twice)),
    Mutant("skipped", "the dearest document as if it had no target", "coverage",
           plain(skip_dearest)),
    Mutant("no bits", "a document for 0 bits", "score files", plain(first(bits=0.0))),
    Mutant("NaN bits", "bits that are not a number", "score files", plain(first(bits=math.nan))),
    Mutant("infinite bits", "one infinite document", "score files", plain(first(bits=math.inf))),
    Mutant(
        "side bits below 0", "a negative amount of side information", "score files",
        plain(lambda t: t.update(side_bits=-1e4)),
    ),
    Mutant("text for a number", "bits as a text", "score files",
           lambda f: f.edit_json(f.run.score_file("plain"), text_of_numbers)),
    Mutant("true for a number", "true as the number of targets", "score files",
           plain(first(num_targets=True))),
    Mutant("huge number", "bits beyond 2^53", "score files",
           lambda f: f.edit_json(f.run.score_file("plain"), first(bits=10**400))),
    Mutant("a list", "a list for the whole file", "score files",
           lambda f: f.run.score_file("plain").write_text("[1]")),
    Mutant("totals", "only the bits per byte at the top of the file", "score files",
           raw("score-plain.json", bpb=0.9)),
    Mutant("negative seconds", "a phase of -1000 seconds", "score files",
           plain(lambda t: t["seconds"].update(load=-1000.0))),
    Mutant("two files", "a second file for one method, under another label", "score files",
           lambda f: f.copy_score("plain2")),
    Mutant("lever twice", "a second file for one method: its lever named twice", "score files",
           twice_the_lever),
    Mutant("space", "a label with a space at its end", "score files",
           lambda f: f.copy_score("plain ")),
    Mutant("look-alike", "a label with a Cyrillic letter", "score files",
           lambda f: f.copy_score("pl\u0430in")),
    Mutant("other label", "the file of one method says another", "score files",
           lambda f: f.run.score_file("plain").rename(f.run.score_file("flat"))),
    Mutant("name of its own", "a method with a name of its own", "score files",
           lambda f: f.copy_score("best", how={"name": "best", "products": "torch.float32"})),
    Mutant("plain as adapted", "a plain score in the file of the adapted one", "score files",
           label_of_others),
    Mutant("other order", "an order that its method does not have", "score files",
           plain(lambda t: t.update(order="published"))),
    Mutant("other artifact", "a score of another artifact", "score files",
           raw("score-plain.json", artifact_sha256="0" * 64)),
    Mutant("xz made worse", "the bytes of xz, which the page compares with", "score files",
           plain(lambda t: t.update(xz_bytes=2 * t["xz_bytes"]))),
    Mutant("artifact made smaller", "the artifact's bytes in a score", "score files",
           plain(lambda t: t.update(artifact_bytes=10))),
    Mutant("lossless", "whether the tokenizer is lossless", "score files",
           plain(lambda t: t.update(lossless=False))),
    Mutant("twice and never", "one target twice, one dropped", "coverage", plain(shift_targets)),
    Mutant("dropped", "the last document dropped", "coverage", plain(lambda t: t["ledger"].pop())),
    Mutant("first documents", "a score of the first documents", "coverage",
           plain(only_first_documents)),
    Mutant("reordered", "documents in another order", "coverage",
           plain(lambda t: t["ledger"].reverse())),
    Mutant("more bytes", "a byte more per target in every ledger", "bytes",
           lambda f: f.edit_ledgers(count_more_bytes)),
    Mutant("learns first", "events in which learning comes before pricing",
           "score before update", adapt(learn_first)),
    Mutant("no time", "seconds of a score: 0", "scoring time",
           plain(lambda t: t.update(seconds={"score": 0}))),
    Mutant("too long", "a score that took 1000 seconds", "scoring time",
           plain(lambda t: t["seconds"].update(score=1000.0))),
    Mutant("short clock", "seconds of a score below those of the audit", "scoring time",
           replay_time, NOT_SHOWN),
    Mutant("weights changed", "another artifact under an honest score", "reproduction",
           score_of_other_artifact),
    Mutant("rounded again", "matrices rounded more coarsely after scoring", "reproduction",
           round_again),
    Mutant("hashed again", "a lower score, and a forged verdict that names its hash",
           "reproduction", edit_and_hash),
]  # fmt: skip

NAMES_AND_SIZES = [
    Mutant("other data", "run.json names other data", "identity",
           lambda f: f.edit_about(data_identity="feedfeedfeedfeed")),
    Mutant("data of a score", "a score names other data", "identity",
           plain(lambda t: t.update(data_identity="feedfeedfeedfeed"))),
    Mutant("other data expected", "data that are not those that were published", "identity",
           lambda f: setattr(f, "limits", Limits(data_sha256="0" * 64))),
    Mutant("other rate", "the run's recipe says another learning rate than the artifact",
           "identity", say_other_rate),
    Mutant("other lever", "the run's recipe sets a lever otherwise than the artifact", "identity",
           say_other_lever),
    Mutant("other context", "the artifact's recipe says another context", "identity",
           tell_artifact("train", context=64)),
    Mutant("other cap", "the artifact's recipe says another cap", "identity",
           tell_artifact("limits", cap_bytes=10**9)),
    Mutant("other adapter", "the artifact's recipe sets a scoring lever otherwise", "identity",
           tell_artifact("levers.adapt_scales", lr=0.2)),
    Mutant("hidden base", "recipe.toml with a base that the page does not show", "identity",
           hide_setting),
    Mutant("recipe alone", "recipe.toml alone", "identity",
           lambda f: f.run.recipe_file.write_text(
               to_toml(from_tree({"train": {"seed": 7}})))),
    Mutant("tokenizer of the run", "the tokenizer in the run folder", "identity",
           lambda f: f.run.tokenizer_file.write_bytes(b"\n" + f.run.tokenizer_file.read_bytes())),
    Mutant("fewer weights", "the number of weights in run.json", "identity",
           lambda f: f.edit_about(num_weights=1)),
    Mutant("fewer tokens", "the training tokens in run.json", "identity",
           lambda f: f.edit_about(train_tokens=1)),
    Mutant("fewer bytes of training", "the training bytes in run.json", "identity",
           lambda f: f.edit_about(train_bytes=1)),
    Mutant("another tokenizer's name", "the hash of the tokenizer in run.json", "identity",
           lambda f: f.edit_about(tokenizer_identity="0" * 64)),
    Mutant("small device", "a weaker device in run.json, which the page shows", "training",
           lambda f: f.edit_about(device="a telephone")),
    Mutant("other versions", "versions in run.json", "training",
           lambda f: f.edit_about(versions={"underpar": "9.9", "torch": "9.9"})),
    Mutant("price before quantization", "the held-out price of the weights, in validation.json",
           "training", price_before_quantization),
    Mutant("budget of another artifact", "the artifact that budget.json says it is of", "size",
           raw("budget.json", artifact_sha256="0" * 64)),
    Mutant("foreign lever", "a recipe names a lever in the run folder", "identity",
           name_lever_of_the_folder),
    Mutant("unknown limit", "recipe.toml with a limit of its own", "identity",
           lambda f: f.run.recipe_file.write_text(f.run.recipe_file.read_text().replace(
               "[limits]", "[limits]\naudit_seconds = 1"))),
    Mutant("own cap", "a recipe with a larger cap than the auditor's", "size", claim_larger_cap),
    Mutant("budget", "fewer bytes in budget.json, which the page shows", "size",
           lambda f: f.edit_json(f.run.budget_file, shrink_budget)),
    Mutant("cap of the budget", "a larger cap in budget.json", "size",
           raw("budget.json", cap_bytes=10**9)),
    Mutant("bits per weight", "one tensor in budget.json", "size",
           lambda f: f.edit_json(f.run.budget_file,
                                 lambda t: t["tensors"][0].update(bits_per_weight=0.1))),
    Mutant("other script", "another script of the same length", "size", other_script),
    Mutant("helper", "a short script that imports a helper beside it", "size", script_with_helper),
    Mutant("shadow", "a module that Python finds before its own", "size", put_beside("json.py")),
    Mutant("hidden code", "a compiled module with a dot before its name", "size",
           put_beside(".weights.so")),
    Mutant("start-up code", "a module that Python imports before any other", "size",
           put_beside("sitecustomize.py")),
    Mutant("cached code", "compiled code in place of a source", "size",
           put_beside("__pycache__/score.cpython-311.pyc")),
    Mutant("path file", "a file that adds folders to those of Python", "size",
           put_beside("weights.pth")),
    Mutant("zipped code", "an archive that Python imports from", "size", put_beside("model.zip")),
    Mutant("linked script", "the script is a link to a file elsewhere", "size", link_script),
    Mutant("package", "a package beside the script", "size", put_beside("torch/__init__.py")),
    Mutant("linked package", "a link to a package elsewhere", "size", link_package),
    Mutant("link", "the artifact is a link to a file elsewhere", "size", link_artifact),
    Mutant("no script", "no script beside the artifact", "size",
           lambda f: f.run.script_file.unlink(), NOT_SHOWN),
    Mutant("appended", "bytes after the end of the artifact", "opening", append_payload),
    Mutant("bomb", "a header that unpacks to more than any has", "opening", put_bomb),
    Mutant("pickle", "weights that run code when they are read", "packing", pickle_weights),
    Mutant("payload", "a second payload in the header of the artifact", "size", hide_payload),
    Mutant("weights swapped", "weights.safetensors replaced", "packing", swap_weights),
    Mutant("tuned elsewhere", "an artifact of other weights, scored honestly", "packing",
           tuned_elsewhere),
    Mutant("rounded by hand", "one rounding, by the name of another machine", "packing",
           round_by_hand, NOT_SHOWN),
    Mutant("borrowed processor", "the weights a run began with, by the name of another machine",
           "training", borrow_processor, NOT_SHOWN),
    Mutant("early clock", "the seconds of training in validation.json", "time", early_clock),
    Mutant("backward clock", "the last seconds in both clocks of training", "time", backward_clock),
    Mutant("no seconds", "training that took no time", "time", raw("validation.json", seconds=0.0)),
    Mutant("seconds below 0", "training that took less than no time", "time",
           raw("validation.json", seconds=-5.0)),
    Mutant("NaN seconds", "training that took no number of seconds", "time",
           raw("validation.json", seconds=math.nan)),
    Mutant("no log", "metrics.jsonl removed", "time", lambda f: f.run.metrics_file.unlink()),
]  # fmt: skip

RUN_CHEATS = [*SCORE_FILES, *NAMES_AND_SIZES]
