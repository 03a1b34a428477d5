"""Every file of a run folder and of a data folder, damaged: refused in one line, or harmless.

Half of the cases are damage to bytes. The others are edits with right checksums, which only a
person makes. `tests/artifact/test_mutations.py` does the same to artifacts.
"""

import hashlib
import json
import random
import shutil
import signal
import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import pytest
import torch

from commands import invoke
from damage import damage, edit_json, edit_lines, edit_tensors, edit_toml, edit_tree
from tiny import TinyRun
from underpar.audit.case import hash_files
from underpar.audit.rules import RULES as AUDIT_RULES
from underpar.audit.rules import run_audit
from underpar.build.artifact import read_artifact
from underpar.codec.frame import read_frame
from underpar.core.run_folder import RunFolder
from underpar.core.runtime import Clock, Runtime
from underpar.core.tensor_files import read_tensors, save_tensors
from underpar.data.folder import data_identity, load_data
from underpar.data.merge import merge_folders
from underpar.data.sources.corpus import read_documents
from underpar.errors import UnderparError, one_line
from underpar.lab.compare import read_result
from underpar.quant.files import read_quantized
from underpar.report.build import build_report
from underpar.report.excerpt import read_texts
from underpar.report.gather import gather
from underpar.schema import QuantPart
from underpar.score.partial import Partial
from underpar.stages.audit import AuditRequest, open_case
from underpar.stages.calibrate import calibrate_run, read_trained
from underpar.stages.pack import open_pack_job, pack_run
from underpar.stages.train import ProgressLine, data_of, train, validation_of
from underpar.stages.use import open_codec
from underpar.train.checkpoint import Position, read_checkpoint
from underpar.train.evidence import NOTHING, next_hash, read_account, read_chain
from underpar.train.guard import read_reference

# Of each file: damaged or edited in turn.
QUICK_CASES, MANY_CASES = 200, 500
# One round in so many is tried with the heavy readers, and an audit judges by so many rules.
HEAVY_ROUNDS, DRAWN_RULES = 20, 4
# Memory that a case may take (packing any model takes 0.7 GB), and seconds after which it hangs.
MOST_BYTES, MOST_SECONDS = 1 << 30, 120
RULES = ("blocks.*.attn.q.weight grid8+columns", "blocks.*.mlp.* gptq6:12.85", "* fp16")
CPU = Runtime(torch.device("cpu"))

Edit = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """A file, what reads it, and an edit that keeps it well formed and its checksum right.

    `guarded` files have a checksum: of them, no damage to bytes may pass. `heavy` readers take
    seconds and run on few cases, damaged and edited in turn.
    """

    name: str
    path: Path
    readers: tuple[Callable[[], object], ...]
    edit: Edit
    guarded: bool = False
    heavy: tuple[Callable[[], object], ...] = ()


def edit_safetensors(path: Path) -> Edit:
    """An edit of tensors or of their description, written back with a right checksum."""

    def edit(data: bytes, rng: random.Random) -> bytes:
        path.write_bytes(data)
        tensors, about = read_tensors(path, may_lack_checksum=True)
        if rng.random() < 0.5:
            edit_tensors(tensors, rng)
        else:
            edit_tree(about, rng)
        try:
            save_tensors(path, tensors, about)
        except (TypeError, ValueError, OverflowError):
            return data
        return path.read_bytes()

    return edit


def edit_chain(data: bytes, rng: random.Random) -> bytes:
    """Edited lines of a hash chain, hashed again where they still are entries."""
    lines, before = [], NOTHING
    for line in edit_lines(data, rng).splitlines(keepends=True):
        try:
            entry = {k: v for k, v in json.loads(line).items() if k != "hash"}
        except (ValueError, AttributeError):
            lines.append(line)
            continue
        before = next_hash(before, entry)
        lines.append(json.dumps({**entry, "hash": before}).encode() + b"\n")
    return b"".join(lines)


def edit_shard(data: bytes, rng: random.Random) -> bytes:
    """A shard with a changed header or body, and a right checksum in its header."""
    head, body = bytearray(data[:56]), data[56:]
    if rng.random() < 0.3:
        place, form = rng.choice([(4, "<H"), (6, "<H"), (8, "<Q"), (16, "<Q")])
        most = 2 ** (8 * struct.calcsize(form)) - 1
        count = rng.choice([0, 1, 2, 3, 4, 5, 2**16 - 1, 2**40, most])
        struct.pack_into(form, head, place, min(most, count))
    else:
        body = damage(body, rng)
    head[24:56] = hashlib.sha256(body).digest()
    return bytes(head) + body


def edit_stream(data: bytes, rng: random.Random) -> bytes:
    """A compressed file with a changed field or payload, and right checksums."""
    parts = read_frame(data)
    if rng.random() < 0.5:
        name, bits = rng.choice(
            [("mode", 8), ("num_lanes", 16), ("num_documents", 32), ("num_bytes", 64)]
        )
        most = 2**bits - 1
        value = min(most, rng.choice([0, 1, 2, 64, 65, 2**20, most]))
        return replace(parts, header=replace(parts.header, **{name: value})).to_bytes()
    return replace(parts, payload=damage(parts.payload, rng)).to_bytes()


@contextmanager
def limits(case: str, watch: bool) -> Iterator[None]:
    """Inside, a hang or (if watched) much memory is an error."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"{case} takes more than {MOST_SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(MOST_SECONDS)
    if watch:
        tracemalloc.start()
    try:
        yield
        assert not watch or tracemalloc.get_traced_memory()[1] < MOST_BYTES, case
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(target: Target, case: str, reader: Callable[[], object], watch: bool) -> bool:
    """Whether a reader accepts a file; an error must be typed and fit in a line."""
    with limits(case, watch):
        try:
            reader()
        except (UnderparError, OSError) as error:
            assert one_line(error).isprintable()
            return False
        except Exception as error:
            raise AssertionError(f"{case}: {error!r:.300}") from error
    return True


def overwrite(path: Path, content: bytes) -> None:
    """Write into the file as it is: cutting it to nothing first takes a hundred times as long."""
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()


def run_cases(targets: list[Target], num_cases: int, seed: int) -> dict[str, list[int]]:
    """Damage each file so often, in turn; returns refused and accepted cases per target."""
    print(f"seed {seed}")
    whole = {target.path: target.path.read_bytes() for target in targets}
    counts = {target.name: [0, 0] for target in targets}
    for number in range(num_cases * len(targets)):
        target, round_ = targets[number % len(targets)], number // len(targets)
        rng = random.Random(f"{seed} {number}")
        good, edited = whole[target.path], bool(round_ % 2)
        content = target.edit(good, rng) if edited else damage(good, rng)
        if content == good:
            continue
        case = f"seed {seed}, case {number}, {target.name}, {'edited' if edited else 'damaged'}"
        overwrite(target.path, content)
        is_heavy = round_ % (2 * HEAVY_ROUNDS) in (HEAVY_ROUNDS, HEAVY_ROUNDS + 1)
        readers = target.readers + (target.heavy if is_heavy else ())
        try:
            accepted = [attempt(target, case, r, watch=number % 61 == 1) for r in readers]
        finally:
            overwrite(target.path, good)
        assert edited or not (target.guarded and any(accepted)), f"{case}: damage passed"
        counts[target.name][all(accepted)] += 1
    return counts


@pytest.fixture(scope="module")
def targets(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> list[Target]:
    root = tmp_path_factory.mktemp("fuzz")
    run_path, data_path = root / "run", root / "data"
    shutil.copytree(tiny_run.folder.path, run_path)
    shutil.copytree(tiny_run.data, data_path)
    folder, data = RunFolder(run_path), load_data(data_path)
    about = json.loads(folder.about_file.read_text())
    folder.about_file.write_text(json.dumps({**about, "data": str(data_path)}))
    calibrate_run(folder, data, CPU)
    part = replace(tiny_run.recipe.quant, rules=RULES, lqer_tensors=1, constant=0.01)
    pack_run(folder, part=part)
    audit_file = {
        "artifact_sha256": hash_files(folder)["model.upar"],
        "verdict": "fail",
        "data_sha256": "00",
        "profile": "strict",
        "files": hash_files(folder),
        "findings": [
            {"rule": "size", "verdict": "fail", "summary": "", "evidence": {}, "seconds": 1.0}
        ],
    }
    folder.audit_file.write_text(json.dumps(audit_file))
    identity = data_identity(data)
    position = Position(tiny_run.recipe.hash, identity)

    def audit() -> None:
        opened = open_case(folder, CPU, AuditRequest(data_path, num_documents=1, code_tokens=20))
        damaged = (folder.score_file("adapt"), data_path / "manifest.json")
        rng = random.Random(zlib.crc32(b"".join(path.read_bytes() for path in damaged)))
        run_audit(opened, rules=rng.sample([*AUDIT_RULES], DRAWN_RULES))

    def case() -> None:
        open_case(folder, CPU, AuditRequest(data_path, num_documents=1))

    def resume() -> None:
        copy = root / "again"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run_path, copy)
        train(tiny_run.recipe, data_path, RunFolder(copy), CPU)

    def look() -> None:
        gather(folder)

    def report() -> None:
        build_report([folder], root / "page.html", with_text=False)

    def excerpt() -> None:
        read_texts(folder, gather(folder))

    def pack_job(quant: QuantPart | None = part) -> None:
        open_pack_job(folder, part=quant)

    def pack() -> None:
        pack_run(folder, part=part)

    partial_file = root / "score-plain.partial"
    partial = Partial(partial_file, {"a": 1}, CPU, Clock(), lambda: True, lambda line: None)
    state = {"a": torch.arange(9.0), "inner": {"b": [1, 2], "c": "text"}}
    with pytest.raises(UnderparError, match="stopped"):
        partial.offer(3, lambda: state)
    stream = root / "text.upz"
    codec = open_codec(folder.artifact_file, CPU)
    stream.write_bytes(codec.compress(b"The government of the people, by the people. " * 2))
    texts = root / "texts.jsonl"
    lines = [json.dumps({"text": f"text {n}", "source": "s"}) for n in range(20)]
    texts.write_text("\n".join(lines) + "\n")

    def codec_reads() -> None:
        codec.decompress(stream.read_bytes(), any_machine=True)

    def merge() -> None:
        out = root / "merged"
        shutil.rmtree(out, ignore_errors=True)
        merge_folders([data_path], out)

    def load() -> None:
        load_data(data_path)

    tensors = edit_safetensors(root / "edited.safetensors")
    return [
        Target(
            "recipe",
            folder.recipe_file,
            (folder.read_recipe, look),
            edit_toml,
            heavy=(pack_job, report),
        ),
        Target(
            "about",
            folder.about_file,
            (lambda: data_of(folder), look),
            edit_json,
            heavy=(case, report, excerpt),
        ),
        Target(
            "metrics",
            folder.metrics_file,
            (
                lambda: ProgressLine(folder.metrics("loss", "tokens", "seconds")),
                lambda: read_reference(folder),
                look,
            ),
            edit_lines,
            heavy=(resume, report),
        ),
        Target(
            "chain",
            folder.evidence_file,
            (lambda: read_account(read_chain(folder.evidence_file)),),
            edit_chain,
        ),
        Target("validation", folder.validation_file, (lambda: validation_of(folder),), edit_json),
        Target("budget", folder.budget_file, (look,), edit_json, heavy=(report,)),
        Target("audit", folder.audit_file, (look,), edit_json, heavy=(report,)),
        Target(
            "score",
            folder.score_file("adapt"),
            (look, lambda: read_result(str(run_path), "adapt")),
            edit_json,
            heavy=(audit, report, excerpt),
        ),
        Target(
            "weights",
            folder.weights_file,
            (lambda: read_trained(folder),),
            tensors,
            guarded=True,
        ),
        Target(
            "checkpoint",
            folder.checkpoint_file,
            (lambda: read_checkpoint(folder.checkpoint_file, position),),
            tensors,
            guarded=True,
            heavy=(resume,),
        ),
        Target("calibration", folder.calibration_file, (pack_job,), tensors, guarded=True),
        Target(
            "quantized",
            folder.quantized_file,
            (lambda: read_quantized(folder.quantized_file),),
            tensors,
            guarded=True,
            heavy=(pack,),
        ),
        Target("tokenizer", folder.tokenizer_file, (pack_job,), damage, guarded=True),
        Target("partial", partial_file, (partial.find,), tensors, guarded=True),
        Target(
            "artifact",
            folder.artifact_file,
            (lambda: read_artifact(folder.artifact_file),),
            damage,
            guarded=True,
            heavy=(case,),
        ),
        Target("stream", stream, (codec_reads,), edit_stream, guarded=True),
        Target(
            "manifest",
            data_path / "manifest.json",
            (load,),
            edit_json,
            heavy=(audit, merge, lambda: invoke("data", "inspect", data_path)),
        ),
        Target("shard", data_path / "val.shard", (load,), edit_shard, guarded=True),
        Target("data tokenizer", data_path / "tokenizer.model", (load,), damage, guarded=True),
        Target("texts", texts, (lambda: list(read_documents([texts])),), edit_lines),
    ]


def test_damaged_folders_are_refused_or_harmless(targets: list[Target]) -> None:
    counts = run_cases(targets, QUICK_CASES, seed=0)
    # If no file of a kind were refused, its readers would not have run.
    assert all(refused for refused, _ in counts.values()), counts


@pytest.mark.slow
def test_thousands_of_damaged_folders_are_refused_or_harmless(targets: list[Target]) -> None:
    counts = run_cases(targets, MANY_CASES, seed=1)
    assert all(refused for refused, _ in counts.values()), counts
