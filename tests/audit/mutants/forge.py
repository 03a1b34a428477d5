"""What a cheater can do to a copy of a run and its data, with every identity made to fit again.

A cheater owns both folders and knows the package. So each edit below also writes whatever checksum,
total or identity the edit would leave wrong.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from small_data import write_published
from underpar.artifact.pack import pack as pack_bytes
from underpar.artifact.unpack import Artifact
from underpar.audit.case import DEFAULT_LIMITS, Limits
from underpar.audit.finding import FAIL, Finding
from underpar.build.artifact import read_artifact
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_tensors, save_tensors
from underpar.data.folder import data_identity, hash_file, load_data
from underpar.data.shards import Columns, ShardWriter, open_shard
from underpar.data.sources.corpus import document_hash, is_held_out
from underpar.data.tokens.tokenizer import Tokenizer, open_tokenizer, read_model
from underpar.recipe import Recipe, from_tree, read_recipe_file, to_toml, to_tree
from underpar.score.method import PLAIN, Method
from underpar.stages.score import score_artifact
from underpar.submit.script import write_script

CPU = Runtime(torch.device("cpu"))
Tree = dict[str, Any]


@dataclass
class Forge:
    """A copy of a run and of its data that may be edited."""

    run: RunFolder
    data: Path
    # What the auditor asks for; a mutant may need a limit.
    limits: Limits = DEFAULT_LIMITS

    # Files of the run.

    def edit_json(self, path: Path, change: Callable[[Tree], object]) -> None:
        tree = json.loads(path.read_text())
        change(tree)
        path.write_text(json.dumps(tree))

    def edit_about(self, **values: Any) -> None:
        self.edit_json(self.run.about_file, lambda tree: tree.update(values))

    def edit_score(self, method: str, change: Callable[[Tree], object]) -> None:
        """Change a score and add its ledger up again."""

        def edit(tree: Tree) -> None:
            change(tree)
            sum_up(tree)

        self.edit_json(self.run.score_file(method), edit)

    def edit_ledgers(self, change: Callable[[list[Tree]], object]) -> None:
        """Change the ledger of every score."""
        for path in self.run.score_files():
            self.edit_score(json.loads(path.read_text())["method"], lambda t: change(t["ledger"]))

    def copy_score(self, name: str, **values: Any) -> None:
        """A second file for the plain score, under a label of its own."""
        tree = json.loads(self.run.score_file("plain").read_text()) | {"method": name, **values}
        (self.run.path / f"score-{name}.json").write_text(json.dumps(tree))

    def edit_recipe(self, change: Callable[[Tree], object]) -> Recipe:
        """Change the recipe in every file that is named after it, but not in the artifact."""
        tree = to_tree(read_recipe_file(self.run.recipe_file))
        change(tree)
        recipe = from_tree(tree)
        self.run.recipe_file.write_text(to_toml(recipe))
        self.edit_about(recipe_hash=recipe.hash)
        tensors, about = read_tensors(self.run.weights_file)
        save_tensors(self.run.weights_file, tensors, about | {"recipe_hash": recipe.hash})
        return recipe

    def edit_metrics(self, change: Callable[[Tree], object]) -> None:
        lines = list(self.run.metrics())
        for line in lines:
            change(line)
        self.run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def edit_artifact(self, change: Callable[[Artifact], Artifact]) -> None:
        """Pack another artifact; scores, budget and script say that they are of it."""
        artifact, _ = read_artifact(self.run.artifact_file)
        self.write_artifact(pack_bytes(change(artifact)))

    def write_artifact(self, data: bytes) -> None:
        self.run.artifact_file.write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
        for path in self.run.score_files():
            new = {"artifact_sha256": sha256, "artifact_bytes": len(data)}
            self.edit_json(path, lambda tree, new=new: tree.update(new))
        self.edit_json(self.run.budget_file, lambda tree: tree.update(artifact_sha256=sha256))
        write_script(self.run, read_artifact(self.run.artifact_file)[0].recipe, sha256)

    def score(self, method: Method = PLAIN) -> None:
        score_artifact(self.run.artifact_file, self.data, CPU, method)

    # Files of the data.

    @property
    def manifest(self) -> Tree:
        tree: Tree = json.loads((self.data / "manifest.json").read_text())
        return tree

    @property
    def tokenizer(self) -> Tokenizer:
        transform = self.manifest["tokenizer"]["transform"]
        return open_tokenizer(read_model(self.data / "tokenizer.model"), transform)

    def edit_manifest(self, change: Callable[[Tree], object]) -> None:
        self.edit_json(self.data / "manifest.json", change)
        self.adopt_data()

    def edit_split(self, split: str, change: Callable[[Columns], Columns]) -> None:
        """Write a split again; manifest, run and scores name the result."""
        path, vocab_size = self.data / f"{split}.shard", self.tokenizer.vocab_size
        shard = open_shard(path, vocab_size)
        columns = Columns(
            tokens=np.array(shard.tokens),
            source_bytes=None,
            counts=np.diff(shard.starts, append=shard.num_tokens),
            doc_bytes=np.array(shard.doc_bytes),
            doc_hashes=np.array(shard.doc_hashes),
            flags=np.array(shard.flags),
        )
        changed = change(columns)
        with ShardWriter(path, vocab_size) as writer:
            writer.add(changed)
        off_table = np.add.reduceat(self.tokenizer.token_bytes[changed.tokens], changed.starts)
        stated = {
            "documents": writer.num_documents,
            "tokens": writer.num_tokens,
            "bytes": writer.num_bytes,
            "documents_sha256": writer.documents_sha256,
            "off_table": int(np.count_nonzero(off_table != changed.doc_bytes)),
            "sha256": hash_file(path),
        }
        if split == "val":
            stated |= self._write_sidecar(changed, stated["off_table"] > 0)
        self.edit_manifest(lambda manifest: manifest[split].update(stated))

    def _write_sidecar(self, columns: Columns, is_needed: bool) -> Tree:
        """Source bytes of tokens that add up to those of the documents."""
        if not is_needed:
            return {"ledger": "table"}
        values = self.tokenizer.token_bytes[columns.tokens].astype(np.int64)
        for first, count, total in zip(
            columns.starts, columns.counts, columns.doc_bytes, strict=True
        ):
            rest = total - values[first : first + count].sum()
            values[first + 1 : first + count] += rest // (count - 1)
            values[first + count - 1] += rest % (count - 1)
        path = self.data / "val_bytes.bin"
        write_published(path, values.tolist())
        return {"ledger": "sidecar", "sidecar_sha256": hash_file(path)}

    def adopt_data(self) -> None:
        """Let run and scores name the data as they are now."""
        data = load_data(self.data, verify=False, refuse_shared=False)
        identity = data_identity(data)
        self.edit_about(data_identity=identity, train_tokens=data.train.num_tokens)
        for path in self.run.score_files():
            self.edit_json(path, lambda tree: tree.update(data_identity=identity))

    def texts(self, split: str) -> list[str]:
        tokenizer = self.tokenizer
        shard = open_shard(self.data / f"{split}.shard", tokenizer.vocab_size)
        return [tokenizer.decode(shard.doc(i)).decode() for i in range(shard.num_documents)]

    def write_texts(self, split: str, texts: Sequence[str]) -> None:
        """Let a split hold these texts, and the source file too."""
        self.edit_split(split, lambda columns: self.columns_of(texts))
        self.write_source()

    def columns_of(self, texts: Sequence[str]) -> Columns:
        raws = [text.encode() for text in texts]
        pieces = self.tokenizer.encode_texts(texts)
        return Columns(
            tokens=pieces.tokens.astype(np.uint16),
            source_bytes=None,
            counts=pieces.counts,
            doc_bytes=np.array([len(raw) for raw in raws], dtype=np.int64),
            doc_hashes=np.frombuffer(
                b"".join(hashlib.sha256(raw).digest() for raw in raws), dtype=np.uint8
            ).reshape(-1, 32),
            flags=np.zeros(len(raws), dtype=np.uint8),
        )

    def write_source(self) -> None:
        """One source file with the text of both splits as they are now."""
        source = self.data / "source.jsonl"
        texts = self.texts("train") + self.texts("val")
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        row = {"path": str(source), "split": "train", "sha256": hash_file(source)}
        self.edit_manifest(lambda manifest: manifest.update(inputs=[row]))


def sum_up(tree: Tree) -> None:
    """Totals of a score file, from its ledger."""
    rows = tree["ledger"]
    tree["bits"] = float(np.sum([row["bits"] for row in rows])) + tree["side_bits"]
    tree["bytes"] = sum(row["num_bytes"] for row in rows)
    tree["targets"] = sum(row["num_targets"] for row in rows)
    tree["documents"] = len(rows)
    tree["bpb"] = tree["bits"] / tree["bytes"]


def for_training(text: str) -> str:
    """The text with an end that the split by hash puts into training."""
    return _with_hash(text, False)


def for_validation(text: str) -> str:
    """The text with an end that the split by hash holds out."""
    return _with_hash(text, True)


def _with_hash(text: str, held_out: bool) -> str:
    number = 0
    while is_held_out(document_hash(text + "." * number), 0.1) != held_out:
        number += 1
    return text + "." * number


@dataclass(frozen=True)
class Mutant:
    """One cheat: what it edits, and the rule that must see it.

    `rule` "opening" means that the audit refuses the files before any rule. `verdict` is the least
    that the rule must say.
    """

    name: str
    edits: str
    rule: str
    change: Callable[[Forge], object]
    verdict: str = FAIL


def copy_of(run: RunFolder, data: Path, out: Path) -> Forge:
    """A copy of both folders; the run names the copied data."""
    shutil.copytree(run.path, out / "run")
    shutil.copytree(data, out / "data")
    forge = Forge(RunFolder(out / "run"), out / "data")
    forge.edit_about(data=str(forge.data))
    return forge


def finding_of(findings: Sequence[Finding], rule: str) -> Finding:
    [finding] = [finding for finding in findings if finding.rule == rule]
    return finding


def scaled(artifact: Artifact, factor: float) -> Artifact:
    """The artifact with other weights: one fp16 tensor times a factor."""
    name = next(name for name, t in artifact.tensors.items() if t.scheme.is_half)
    tensor = artifact.tensors[name]
    steps = (tensor.steps.astype(np.float32) * factor).astype(np.float16)
    return replace(artifact, tensors={**artifact.tensors, name: replace(tensor, steps=steps)})
