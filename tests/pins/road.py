"""Every command on tiny runs: losses, scores, hashes, JSON keys, names of files.

Runs the command line inside this process, which saves the start of torch for each command.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from inside import app, demo_corpus, read_documents
from typer.testing import CliRunner

import underpar

NUM_DOCUMENTS, MAX_CHARACTERS = 60, 1500
CPU = ("--device", "cpu")
# With a seed, since some lists of evidence are as long as random choices make them.
AUDIT = ("--code-tokens", 200, "--seed", 0)
# Levers of several stages, and model levers that change the loss.
TINY = ("qk_gain=true", "smear.init=0.3", "bigram.buckets=500", "ema=true", "adapt_scales=true")
CALIBRATED_RULES = [
    "embedding.weight grid8+columns",
    "blocks.*.attn.*.weight gptq6:13+awq",
    "blocks.*.mlp.*.weight grid8+columns",
    "blocks.*.weight int6:13",
    "* fp16",
]
# With a constant that is given, the size of the code does not decide the steps of grids.
CALIBRATED = (f"quant.rules={json.dumps(CALIBRATED_RULES)}", "quant.constant=0.002")
CALIBRATED += ("quant.lqer_tensors=2", "quant.lqer_rank=1")
LANES = "levers.lora_ttt={rank=2, chunk=48, short=[]}"
# A large share: a phase without documents changes nothing.
PHASES = "levers.phased_sgd={prefix=0.5, lr=0.01}"


@dataclass
class Observed:
    """What the commands printed and left."""

    keys: dict[str, Any] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    """Losses and bits: equal within a tolerance on another CPU."""
    sha256: dict[str, str] = field(default_factory=dict)
    """Artifacts of trained weights: equal on the same machine only."""
    api: dict[str, Any] = field(default_factory=dict)


def observe_road(folder: Path) -> Observed:
    """Run the commands that take seconds, in an empty folder."""
    with _one_thread():
        return _Road(folder).run()


def observe_slow(folder: Path) -> Observed:
    """Run the commands and recipes that take longer, in an empty folder."""
    with _one_thread():
        return _Road(folder).run_slow()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Road:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data, self.cased = folder / "data", folder / "cased"
        self.run_folder = folder / "run"
        self.artifact = self.run_folder / "model.upar"
        self.seen = Observed()

    def run(self) -> Observed:
        """All commands, in the order in which a user runs them."""
        self._data()
        self._recipes()
        self._tiny_run()
        self._calibrated()
        self._use()
        self._judge()
        self._demo()
        self._train_other("h200-300s", self.cased, ["train.budget_steps=3"])
        return self.seen

    def run_slow(self) -> Observed:
        """The other commands, and recipes with other levers."""
        self._build()
        self.call("levers", "levers")
        bench = ("--quads", 4, "--block-seconds", 0.01, "--warmup-seconds", 0.02)
        self.call("bench coder", "bench", "coder", *bench, *CPU)
        for recipe in ("pr1219", "pr1894"):
            changes = ["train.budget_steps=3", "model.vocab_size=512"]
            self._train_other(recipe, self.data, changes)
        self._h200()
        self._ablate()
        return self.seen

    def call(self, name: str, *words: object, code: int = 0) -> Any:
        """Run a command with --json; its key structure is kept under `name`."""
        result = CliRunner().invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
        assert result.exit_code == code, f"{name}: {result.output}"
        printed = json.loads(result.stdout)
        self.seen.keys[name] = structure(printed)
        return printed

    def list_files(self, name: str, folder: Path) -> None:
        """Keep the names of all files in a folder; events have time and host in their names."""
        names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
        events = "events.out.tfevents."
        self.seen.files[name] = sorted({events if n.startswith(events) else n for n in names})

    def hash_artifact(self, name: str, folder: Path) -> None:
        """Keep the SHA-256 of a packed run."""
        content = (folder / "model.upar").read_bytes()
        self.seen.sha256[name] = hashlib.sha256(content).hexdigest()

    def keep_losses(self, name: str, folder: Path) -> None:
        """Keep the loss of each step and the figures of the held-out text."""
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        validation = json.loads((folder / "validation.json").read_text())
        self.seen.numbers[f"{name}: losses"] = [line["loss"] for line in lines]
        self.seen.numbers[f"{name}: validation"] = [
            validation["live_bpb"],
            validation["average_bpb"],
        ]

    def _build(self) -> None:
        corpus = self.folder / "docs.jsonl"
        documents = read_documents([demo_corpus()])
        texts = [next(documents).text[:MAX_CHARACTERS] for _ in range(NUM_DOCUMENTS)]
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        for out, recipe in ((self.data, "baseline+cpu"), (self.cased, "demo+cpu")):
            words = ("build", corpus, "--out", out, "--recipe", recipe, "--workers", 1)
            self.call(f"data build {recipe}", "data", *words)
            self.list_files(f"data build {recipe}", out)

    def _data(self) -> None:
        self._build()
        self.call("data inspect", "data", "inspect", self.data)
        self.call("data audit", "data", "audit", self.data)
        export, back = self.folder / "export", self.folder / "back"
        self.call("data export", "data", "export", self.data, "--out", export)
        self.list_files("data export", export)
        [files] = (export / "datasets").iterdir()
        words = ("--tokenizer", self.data / "tokenizer.model")
        self.call("data import", "data", "import", files, "--out", back, *words)
        self.list_files("data import", back)

    def _recipes(self) -> None:
        self.call("recipe list", "recipe", "list")
        for name in ("baseline", "demo", "pr2014", "h200-300s"):
            resolved = self.call(f"recipe show {name}", "recipe", "show", name)
            self.seen.numbers[f"{name}: hash"] = resolved["hash"]
        self.call("levers smear", "levers", "smear")
        self.call("size", "size", "cpu")
        self.call("doctor", "doctor", *CPU)
        # What is installed on this machine.
        self.seen.keys["doctor"]["attention"] = {}
        self.call("bench list", "bench", "list")
        self.call("speed", "speed", "cpu", "--set", "model.num_layers=2", "--steps", 2, *CPU)

    def _train(self, name: str, recipe: str, data: Path, out: Path, changes: list[str]) -> None:
        sets = [word for change in changes for word in ("--set", change)]
        self.call(f"train {name}", "train", recipe, "--data", data, "--out", out, *sets, *CPU)
        self.keep_losses(name, out)

    def _tiny_run(self) -> None:
        changes = ["model.num_layers=2", "train.budget_steps=12", *(f"levers.{t}" for t in TINY)]
        self._train("tiny", "baseline+cpu", self.data, self.run_folder, changes)
        self.list_files("train", self.run_folder)
        self.call("pack", "pack", self.run_folder, *CPU)
        self.hash_artifact("tiny", self.run_folder)
        self.list_files("pack", self.run_folder)

    def _calibrated(self) -> None:
        sets = [word for change in CALIBRATED for word in ("--set", change)]
        self.call("calibrate", "calibrate", self.run_folder, *CPU)
        self.list_files("calibrate", self.run_folder)
        self.call("quantize", "quantize", self.run_folder, *sets, *CPU)
        self.list_files("quantize", self.run_folder)
        self.call("pack calibrated", "pack", self.run_folder, *sets, *CPU)
        self.hash_artifact("tiny, calibrated", self.run_folder)
        weights = self.folder / "weights.safetensors"
        self.call("unpack", "unpack", self.artifact, "--out", weights)

    def _score(self, name: str, artifact: Path, data: Path, *words: object) -> Any:
        score = self.call(f"score {name}", "score", artifact, "--data", data, *words, *CPU)
        self.seen.numbers[f"score {name}"] = score["bits"]
        return score

    def _judge(self) -> None:
        self._score("tiny", self.artifact, self.data)
        self.list_files("score", self.run_folder)
        self._score("tiny --adapt", self.artifact, self.data, "--adapt")
        self.list_files("score --adapt", self.run_folder)
        lanes = ("--with", "lora_ttt", "--with", "tilt", "--set", LANES)
        self._score("tiny --with", self.artifact, self.data, *lanes)
        self._score("tiny --stride", self.artifact, self.data, "--stride", 64, "--flat")
        # No codec follows adapt_scales, so the rule "coded bits" is not shown.
        audited = self.call("audit", "audit", self.run_folder, *AUDIT, *CPU, code=3)
        self.seen.keys["audit by rule"] = {
            finding["rule"]: structure(finding) for finding in audited["findings"]
        }
        self.list_files("audit", self.run_folder)
        sides = (self.run_folder, "3.0", "--with", self.run_folder, "3.1")
        self.call("compare", "compare", *sides)
        self.call("report", "report", self.run_folder)
        self.list_files("report", self.run_folder)
        self._keep_stored("run", self.run_folder)

    def _keep_stored(self, name: str, folder: Path) -> None:
        """The key structure of the JSON files of a run."""
        for path in sorted(folder.glob("*.json")):
            self.seen.keys[f"{name}/{path.name}"] = structure(json.loads(path.read_text()))
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
        self.seen.keys[f"{name}/metrics.jsonl"] = structure(lines)

    def _use(self) -> None:
        plain, small, back = (self.folder / n for n in ("in.txt", "out.upz", "back.txt"))
        plain.write_text("The quick brown fox. " * 10)
        self.call("compress", "compress", self.artifact, plain, small, *CPU)
        self.call("decompress", "decompress", self.artifact, small, back, *CPU)
        assert back.read_bytes() == plain.read_bytes()
        words = ("--max-tokens", 4, "--seed", 1)
        self.call("generate", "generate", self.artifact, "The", *words, *CPU)
        model = underpar.load(str(self.artifact))
        names = [name for name in dir(model) if not name.startswith("_")]
        self.seen.api["model"] = names
        score = model.score("The government of the people.")
        self.seen.api["score"] = sorted(n for n in dir(score) if not n.startswith("_"))
        self.seen.numbers["load().score().bpb"] = score.bpb
        data = b"any bytes \xff\x00"
        self.seen.api["round trip"] = model.decompress(model.compress(data)) == data
        self.seen.api["stream"] = len(list(model.stream("The", max_tokens=2, seed=1))) > 0

    def _train_other(self, recipe: str, data: Path, changes: list[str]) -> Path:
        """Losses of a recipe with levers that the tiny run lacks."""
        out = self.folder / recipe
        self._train(recipe, f"{recipe}+cpu", data, out, changes)
        return out

    def _demo(self) -> None:
        changes = ["train.budget_steps=6", "quant.constant=0.002"]
        out = self._train_other("demo", self.cased, changes)
        self.call("pack demo", "pack", out, *CPU)
        self.hash_artifact("demo", out)
        self.list_files("pack demo", out)
        self._score("demo --adapt", out / "model.upar", self.cased, "--adapt")

    def _h200(self) -> None:
        changes = ["train.budget_steps=3", "quant.constant=0.002"]
        out = self._train_other("h200-300s", self.cased, changes)
        self.call("pack h200-300s", "pack", out, *CPU)
        self.hash_artifact("h200-300s", out)
        lanes = ("--with", "lora_ttt", "--with", "phased_sgd", "--with", "tilt", "--set", LANES)
        lanes += ("--set", PHASES)
        self._score("h200-300s --with", out / "model.upar", self.cased, *lanes)

    def _ablate(self) -> None:
        changes = ("model.num_layers=1", "levers.smear=true", "levers.softcap=true")
        sets = [word for change in changes for word in ("--set", change)]
        words = ("--out", self.folder / "ablate", "--tokens", 4096, "--seeds", 2, "--jobs", 1)
        self.call("ablate", "ablate", "baseline+cpu", "--data", self.data, *words, *sets, *CPU)
        # Their keys are hashes of recipes and names of runs.
        self.seen.keys["ablate"] |= {"figures": {}, "seconds": {}}


def structure(value: Any) -> Any:
    """A JSON value without its values: keys, and for a list the kinds of elements in it."""
    if isinstance(value, dict):
        return {key: structure(inner) for key, inner in value.items()}
    if isinstance(value, list):
        kinds: list[Any] = []
        for inner in map(structure, value):
            kinds += [inner] if inner not in kinds else []
        return kinds
    return None
