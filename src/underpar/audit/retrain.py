"""The weights follow from the data: the account of a run agrees with its files and its steps.

No account can be believed by itself: who owns the folder can write it. So the audit repeats steps
from kept checkpoints, which it chooses after the files were read, and compares what they give. A
change of the weights between two checkpoints escapes unless all steps between them are repeated.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from underpar.audit.case import Case
from underpar.audit.clock import limit_seconds
from underpar.audit.finding import PASS, Finding, judge, not_shown
from underpar.core.tensor_files import read_tensors
from underpar.core.words import count_text
from underpar.data.folder import data_identity, data_sha256, hash_file
from underpar.errors import RuleError
from underpar.train.checkpoint import Parts, Position, read_checkpoint
from underpar.train.evidence import (
    Account,
    environment,
    hash_parts,
    hash_tensors,
    read_account,
    read_chain,
)
from underpar.train.loop import Trainer

# Tolerances on another machine, and on every GPU, where sums are added in another order. Who forges
# a run can name another machine, so steps that are only near are "not shown", unless the GPU that
# the chain names repeats them. Nats per token of a loss, and the share of a gradient's norm, in the
# steps after a checkpoint.
LOSS_NATS = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
NORM_SHARE = {torch.float32: 1e-2, torch.bfloat16: 1e-1}
# Weights at the end of a segment that was repeated may be off by this share of the way that they
# went in it. Measured over 9 steps with another number of threads: 5e-7 nats, 0.00002 of the way.
WAY_SHARE = {torch.float32: 0.02, torch.bfloat16: 0.2}
# If all steps took as long as the fastest repeated one, training may take so many times its limit:
# the audit may run on a slower or busier machine. More is no evidence against a run, but none for
# its clock.
SLOWER = 4.0
# The steps that are repeated by default where floats differ. Over a whole segment they add up.
NUM_STEPS_ELSEWHERE = 10


@dataclass(frozen=True)
class Segment:
    """Steps between two checkpoints, of which the first `num_steps` are repeated."""

    begin: int
    end: int
    num_steps: int


def deal(anchors: Iterable[int], num_steps: int, rng: np.random.Generator) -> list[Segment]:
    """Deal steps out over the segments between `anchors`, one by one in a random order."""
    spans = list(pairwise(anchors))
    shares = [0] * len(spans)
    left = num_steps
    while left and (open_ := [i for i, (a, b) in enumerate(spans) if shares[i] < b - a]):
        for index in map(int, rng.permutation(open_)[:left]):
            shares[index] += 1
            left -= 1
    return [Segment(a, b, share) for (a, b), share in zip(spans, shares, strict=True)]


def training(case: Case) -> Finding:
    """R06, R16: steps that are repeated on the audited data give the losses and weights of the run.

    "Not shown" if the run left no evidence, if checkpoints are missing, or if nothing is repeated.
    """
    file = case.folder.evidence_file
    if not file.is_file():
        return not_shown("training", f"no {file.name}: the run left no evidence of its training")
    entries = read_chain(file)
    if entries and entries[0].get("kind") == "resume":
        return not_shown("training", "the run was begun without evidence, by an older version")
    account = read_account(entries)
    if wrong := _other_origin(case, account) + _other_files(case, account):
        return judge("training", False, "; ".join(wrong), wrong=wrong)
    steps, num_taken = account.kept_steps, len(account.seconds)
    if missing := [step for step in steps[1:] if not case.folder.kept_file(step).is_file()]:
        return not_shown("training", f"the kept checkpoint of step {missing[0]} is missing")
    made_on = str(account.environment(0)["device"])
    if made_on.startswith("cpu") != (case.runtime.device.type == "cpu"):
        return not_shown("training", f"made on {made_on}; audit on such a device to repeat steps")
    num_wanted = case.num_retrained
    if num_wanted is None:
        num_wanted = num_taken if _repeats_exactly(case, account) else NUM_STEPS_ELSEWHERE
    if not num_wanted:
        return not_shown("training", f"none of {num_taken} steps was repeated; see --retrain")
    segments = deal([*steps, num_taken], num_wanted, case.rng)
    with torch.random.fork_rng(devices=[]):
        repeat = Repeat(case, account, case.open_trainer())
        repeat.check_tokens()
        for segment in segments:
            repeat.run(segment)
        repeat.check_weights_file()
        repeat.check_validation()
    num_repeated = sum(segment.num_steps for segment in segments)
    longest = max(segment.end - segment.begin for segment in segments)
    is_exact = not repeat.near
    how = "bit for bit" if is_exact else "within the tolerance for another machine"
    if num_repeated < num_taken:
        how += "; a change after the repeated steps of a segment would not be seen"
    finding = judge(
        "training",
        not repeat.wrong,
        f"{num_repeated} of {num_taken} steps repeated from "
        f"{count_text(len(segments), 'checkpoint')}, at most {longest} steps apart: "
        + ("; ".join(repeat.wrong[:3]) or f"the same {how}"),
        repeated=[asdict(segment) for segment in segments],
        exact=is_exact,
        loss_difference_nats=repeat.loss_difference,
        way_difference=repeat.way_share,
        hashes_compared=repeat.num_hashes,
        fastest_step_seconds=repeat.fastest,
        wrong=repeat.wrong,
        near=repeat.near,
    )
    missing_proof = _is_from_elsewhere(repeat) or _took_longer(case, repeat.fastest * num_taken)
    if finding.verdict == PASS and missing_proof:
        return not_shown("training", f"{finding.summary}; {missing_proof}", **finding.evidence)
    return finding


def _repeats_exactly(case: Case, account: Account) -> bool:
    """Whether the whole run was made in the environment of the audit, on a CPU."""
    here = environment(case.runtime)
    is_cpu = case.runtime.device.type == "cpu"
    return is_cpu and all(made_in == here for made_in in account.environments.values())


def _is_from_elsewhere(repeat: Repeat) -> str:
    if not repeat.is_elsewhere:
        return ""
    return f"{repeat.near[0]}, and the chain names another machine; audit on such a machine"


def _took_longer(case: Case, seconds: float) -> str:
    """Why the clock of a run is not shown if all steps would take `seconds` here; "" if it is."""
    limit = limit_seconds(case)
    if seconds <= SLOWER * limit:
        return ""
    return (
        f"here all steps take {seconds:.3g} of {limit:g} seconds; audit on the machine of the run"
    )


def _other_origin(case: Case, account: Account) -> list[str]:
    """What the chain says of recipe, data and seed otherwise than the audit finds."""
    recipe = case.folder.read_recipe()
    actual = {
        "recipe_hash": recipe.hash,
        "data_sha256": data_sha256(case.data),
        "seed": recipe.train.seed,
    }
    said = {key: account.origin.get(key) for key in actual}
    return [
        f"{key} is {actual[key]}, the chain says {str(said[key])[:80]}"
        for key in actual
        if said[key] != actual[key]
    ]


def _other_files(case: Case, account: Account) -> list[str]:
    """Files that are not those of the chain."""
    wrong = []
    file = case.folder.metrics_file
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    hashes = [hashlib.sha256(line).hexdigest() for line in lines]
    if hashes != [entry["sha256"] for entry in account.metrics.values()]:
        wrong.append("metrics.jsonl has other lines than the chain")
    else:
        clock = {step: account.seconds[step - 1] for step in account.metrics}
        if {line["step"]: line["seconds"] for line in case.folder.metrics()} != clock:
            wrong.append("metrics.jsonl has another clock than the chain")
    end = {"step": len(account.seconds), "seconds": account.seconds[-1]}
    validation = case.folder.read_json(case.folder.validation_file)
    if any(validation.get(key) != value for key, value in end.items()):
        wrong.append("validation.json has another end than the chain")
    if other := _other_machine(case, account):
        wrong.append(f"run.json names another {other} than the chain")
    if hash_file(case.folder.weights_file) != account.weights_sha256:
        wrong.append("weights.safetensors is not the file of the chain")
    return wrong


def _other_machine(case: Case, account: Account) -> str:
    """What run.json, which the page shows, says otherwise than the chain of the machine."""
    file = case.folder.about_file
    # Without it the rule "identity" is not a pass.
    if not file.is_file():
        return ""
    about = case.folder.read_json(file)
    last = account.environments[max(account.environments)]
    keys = [key for key in ("device", "ranks", "compiled") if about.get(key) != last.get(key)]
    said, made_by = about.get("versions", {}), last.get("versions", {})
    names = [name for name in ("underpar", "torch") if said.get(name) != made_by.get(name)]
    return ", ".join([*keys, *(f"version of {name}" for name in names)])


@dataclass
class Repeat:
    """Repeats segments of a run, in order, and collects what differs."""

    case: Case
    account: Account
    # Has taken no step yet.
    trainer: Trainer
    # What differs by less than a tolerance, and whether the chain says that it was made elsewhere.
    near: list[str] = field(default_factory=list)
    is_elsewhere: bool = False
    loss_difference: float = 0.0
    way_share: float = 0.0
    num_hashes: int = 0
    # Seconds of the fastest repeated step; on a CPU those that each thread worked, so that other
    # programs do not count.
    fastest: float = math.inf
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._is_of_here = False
        self._logged = {line["step"]: line for line in self.case.folder.metrics()}

    def run(self, segment: Segment) -> None:
        """Take the state of a checkpoint, repeat steps, compare."""
        begin, end = segment.begin, segment.end
        made_in, here = self.account.environment(begin), environment(self.case.runtime)
        self._is_of_here = made_in == here
        if begin:
            self._restore(begin)
        else:
            self._expect("the initial state", hash_parts(self.trainer.parts()), self._hashes(0))
        start = {name: weight.clone() for name, weight in self.trainer.weights().items()}
        started = self._now()
        for line in self.trainer.replay(self.account.seconds[begin:][: segment.num_steps]):
            # Reading the loss waits for the device.
            line["loss"] = float(line["loss"])
            self.fastest = min(self.fastest, self._now() - started)
            self._compare_line(line)
            started = self._now()
        if segment.num_steps < end - begin:
            return
        if asdict(self.trainer.position) != self.account.checkpoints[end]["position"]:
            self.wrong.append(f"after step {end} the chain says another position")
        what = f"the state after step {end}"
        if not self._expect(what, hash_parts(self.trainer.parts()), self._hashes(end)):
            self._compare_way(start, end)

    def _now(self) -> float:
        is_cpu = self.case.runtime.device.type == "cpu"
        return time.process_time() / torch.get_num_threads() if is_cpu else time.perf_counter()

    def check_tokens(self) -> None:
        """The tokens that the page shows are those of as many steps."""
        lines = [
            *self._logged.values(),
            self.case.folder.read_json(self.case.folder.validation_file),
        ]
        step_tokens = self.trainer.loader.step_tokens
        if any(line["tokens"] != line["step"] * step_tokens for line in lines):
            self.wrong.append(f"a step has {step_tokens} tokens, the log says otherwise")

    def check_weights_file(self) -> None:
        """The weights that are packed are those of the last checkpoint."""
        self._restore(len(self.account.seconds))
        ours = self.trainer.packed_weights()
        theirs, _ = read_tensors(self.case.folder.weights_file)
        # A mean of snapshots may differ in its last bits.
        same = ours.keys() == theirs.keys() and all(
            torch.allclose(ours[name].float().cpu(), weight.float(), rtol=1e-5, atol=1e-7)
            for name, weight in theirs.items()
        )
        if not same:
            self.wrong.append("weights.safetensors does not follow from the last checkpoint")

    def check_validation(self) -> None:
        """The price of the held-out text before quantization is that of the last checkpoint."""
        ours = self.trainer.validate().as_dict()
        theirs = self.case.folder.read_fields(self.case.folder.validation_file)
        room = LOSS_NATS[self.case.runtime.dtype]
        for key, value in ours.items():
            if key == "validation_seconds" or (value is theirs.values.get(key) is None):
                continue
            # Written so that NaN differs. One nat per target is less than one bit per byte.
            if value is None or not abs(theirs.number(key) - value) <= room:
                self.wrong.append(f"validation.json says another {key} than the last checkpoint")

    def _restore(self, step: int) -> None:
        self.trainer.restore(*self._read(step))

    def _read(self, step: int) -> tuple[Position, Parts]:
        """The checkpoint of a step; it must be that of the chain."""
        is_last = step == len(self.account.seconds)
        folder = self.case.folder
        file = folder.need(folder.checkpoint_file) if is_last else folder.kept_file(step)
        run = Position(folder.read_recipe().hash, data_identity(self.case.data))
        position, parts = read_checkpoint(file, run)
        entry = self.account.checkpoints[step]
        if hash_parts(parts) != entry["parts"] or asdict(position) != entry["position"]:
            raise RuleError(f"{file.name} of step {step} is not the checkpoint of the chain")
        self.num_hashes += 1
        return position, parts

    def _hashes(self, step: int) -> Any:
        return self.account.checkpoints[step]["parts"]

    def _expect(self, what: str, ours: object, theirs: object) -> bool:
        """Note tensors that differ by their hash; returns whether they are the same."""
        self.num_hashes += 1
        if ours != theirs:
            self._differs(f"{what} has other tensors than the chain")
        return ours == theirs

    def _differs(self, what: str) -> None:
        """Note a small difference: on the CPU that the chain names there is none."""
        if self._is_of_here and self.case.runtime.device.type == "cpu":
            self.wrong.append(what)
        else:
            self.near.append(what)
            self.is_elsewhere |= not self._is_of_here

    def _compare_line(self, line: Mapping[str, Any]) -> None:
        """Compare a repeated step with its line of metrics, if it has one."""
        step, dtype = line["step"], self.case.runtime.dtype
        if step not in self._logged:
            return
        logged, entry = self._logged[step], self.account.metrics[step]
        loss, norm = float(line["loss"]), float(line["norm"])
        difference = abs(loss - logged["loss"])
        self.loss_difference = max(self.loss_difference, difference)
        same = all(line[key] == logged[key] for key in ("progress", "lr_scale"))
        # Written so that NaN differs.
        same &= difference <= LOSS_NATS[dtype]
        same &= abs(norm - logged["norm"]) <= NORM_SHARE[dtype] * norm
        told = f"step {step} gives loss {loss:.6f}, logged {logged['loss']:.6f}"
        if not same:
            self.wrong.append(told)
        elif (loss, norm) != (logged["loss"], logged["norm"]):
            self._differs(told)
        if "weights" in entry:
            hashed = hash_tensors(self.trainer.weights())
            self._expect(f"the model after step {step}", hashed, entry["weights"])

    def _compare_way(self, start: Mapping[str, Tensor], end: int) -> None:
        """Compare the way from `start` to the weights at `end` with that of the run."""
        _, parts = self._read(end)
        theirs, ours = parts["model"], self.trainer.weights()
        share = _distance(theirs, ours) / max(_distance(theirs, start), 1e-30)
        self.way_share = max(self.way_share, share)
        # Written so that NaN differs.
        if not share <= WAY_SHARE[self.case.runtime.dtype]:
            self.wrong.append(f"the steps to step {end} lead to other weights")


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Euclidean distance of two sets of weights."""
    squares = [(a[name].cpu() - b[name].cpu()).double().square().sum() for name in b]
    return float(torch.stack(squares).sum().sqrt())
