"""Writes small made-up submission folders in the formats of Parameter Golf."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# A script of a submission in miniature: honest, with look-alikes of every pattern of the scan.
SCRIPT = """
import glob, math, os
import sentencepiece as spm
import torch
import torch.nn.functional as F
from helper import order_of

class Hyperparameters:
    train_files = os.path.join("data", "fineweb_train_*.bin")
    val_files = os.path.join("data", "fineweb_val_*.bin")
    slot_enabled = bool(int(os.environ.get("SLOT_ENABLED", "0")))
    epochs = 3

def build_luts(sp, vocab_size):
    base_bytes = torch.zeros(vocab_size)
    has_leading_space = torch.zeros(vocab_size)
    for token in range(sp.vocab_size()):
        piece = sp.id_to_piece(token)
        if piece.startswith("\\u2581"):
            has_leading_space[token] = 1
            piece = piece[1:]
        base_bytes[token] = len(piece.encode("utf-8"))
    return base_bytes, has_leading_space

def bytes_of(x, y, base_bytes, has_leading_space, is_boundary):
    return base_bytes[y] + (has_leading_space[y] * ~is_boundary[x])

class Table:
    def __init__(self):
        self.counts = {}

    def price(self, context, probs):
        hint = self.counts.get(hash(context) % 4096)
        return probs if hint is None else torch.softmax(probs.log() + hint, 0)

    def update(self, context, target):
        key = (context * 36313 ^ target * 27191) % 4096
        self.counts[key] = self.counts[key] + 1

def eval_val_ttt(h, model, val_tokens, optimizer, luts):
    loss_sum, byte_sum = 0.0, 0.0
    for document in order_of(val_tokens):
        x, y = document[:-1], document[1:]
        with torch.no_grad():
            nll = F.cross_entropy(model(x), y, reduction="none")
        loss_sum += nll.sum().item()
        byte_sum += bytes_of(x, y, *luts).sum().item()
        for epoch in range(h.epochs):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
    return loss_sum / math.log(2.0) / byte_sum

def eval_slot(h, model, x, targets, delta, optimizer):
    for _ in range(8):
        loss = F.cross_entropy(model(x) + delta, targets)
        loss.backward()
        optimizer.step()
    return F.cross_entropy(model(x) + delta, targets)

def never_called(model, x, y, other):
    nll_a, nll_b = F.cross_entropy(model(x), y), F.cross_entropy(other(x), y)
    return torch.minimum(nll_a, nll_b)

def train(h, model, loader, optimizer):
    best_val_loss = math.inf
    for step in range(100):
        x, y = next(loader)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        best_val_loss = min(best_val_loss, loss.item())
    return best_val_loss

def main():
    h = Hyperparameters()
    sp = spm.SentencePieceProcessor(model_file="tokenizer.model")
    luts = build_luts(sp, sp.vocab_size())
    model, loader, optimizer = torch.nn.Linear(4, 4), iter(()), torch.optim.SGD([])
    train(h, model, loader, optimizer)
    val_tokens = sorted(glob.glob(h.val_files))
    if h.slot_enabled:
        print(eval_slot(h, model, val_tokens, val_tokens, 0, optimizer))
    table = Table()
    table.update(1, 2)
    print(eval_val_ttt(h, model, val_tokens, optimizer, luts), table.price(1, torch.ones(4)))

if __name__ == "__main__":
    main()
"""

HELPER = """
def order_of(documents):
    return list(documents)
"""

BPB = {42: 1.05740567, 314: 1.05730104, 0: 1.05807084}


@dataclass
class LogOf:
    """What a made-up log says."""

    seed: int
    bpb: float
    targets: int = 47_853_343
    num_bytes: float = 151_080_645
    documents: int = 50_000
    shards: int = 80
    train_ms: int = 596_000
    steps: int = 4_900
    hessian_seconds: float = 3.5
    eval_seconds: float = 400.0
    load_seconds: float = 20.0
    warm_up_seconds: float = 100.0
    model_bytes: int = 15_900_000
    code_bytes: int = 4_000
    settings: dict[str, Any] = field(default_factory=dict)
    passes: tuple[str, ...] = ()
    source: str = SCRIPT

    def text(self) -> str:
        """The log in the format of late records: settings, source, lines of values."""
        settings = {
            "artifact_dir": f"/runs/seed{self.seed}",
            "matrix_lr": 0.026,
            "rank": 0,
            "seed": self.seed,
            "slot_enabled": False,
            "train_files": f"/machine{self.seed}/fineweb_train_*.bin",
        } | self.settings
        loss = self.bpb * math.log(2) * self.num_bytes / self.targets
        rule = "=" * 100
        return "\n".join(
            [
                rule,
                "Hyperparameters:",
                *(f"  {name}: {value}" for name, value in sorted(settings.items())),
                rule,
                "Source code:",
                rule,
                self.source,
                rule,
                "Running Python 3.12.3 (main)",
                "Running PyTorch 2.8.0+cu128",
                rule,
                f"train_shards: {self.shards}",
                f"val_tokens: {self.targets}",
                f"1/20000 train_loss: 9.0{self.seed:03d} train_time: 0.0m tok/s: 18645330",
                f"{self.steps}/20000 val_loss: 2.3457 val_bpb: 1.0719",
                f"stopping_early: wallclock_cap train_time: {self.train_ms}ms "
                f"step: {self.steps}/20000",
                "diagnostic pre-quantization post-ema val_loss:2.32112568 val_bpb:1.06066112 "
                "eval_time:18334ms",
                "Serialized model: 135418111 bytes",
                f"Code size: {self.code_bytes} bytes",
                f"GPTQ:collected 67 Hessians in {self.hessian_seconds}s",
                f"Serialized model quantized+brotli: {self.model_bytes} bytes",
                "Total submission size quantized+brotli: "
                f"{self.model_bytes + self.code_bytes} bytes",
                f"Deserialize: decompression done in {self.load_seconds}s",
                f"ttt_lora:compile warmup done ({self.warm_up_seconds}s)",
                "beginning TTT eval timer",
                f"ttt_phased: total_docs:{self.documents} prefix_docs:2400 "
                f"target_tokens:{self.targets}",
                *self.passes,
                f"quantized_ttt_phased val_loss:{loss:.8f} val_bpb:{self.bpb:.8f} "
                f"eval_time:{self.eval_seconds * 1000:.0f}ms",
                f"total_eval_time:{self.eval_seconds:.1f}s",
                "",
            ]
        )


def write_submission(path: Path, logs: list[LogOf] | None = None, script: str = SCRIPT) -> Path:
    """An honest submission of three seeds, or one with other logs or another script."""
    path.mkdir()
    logs = logs or [LogOf(seed, bpb, source=script) for seed, bpb in BPB.items()]
    (path / "README.md").write_text("# A made-up submission\n")
    (path / "requirements.txt").write_text("sentencepiece\n")
    (path / "train_gpt.py").write_text(script)
    (path / "helper.py").write_text(HELPER)
    (path / "tokenizer.model").write_bytes(bytes(20_000))
    for log in logs:
        (path / f"train_seed{log.seed}.log").write_text(log.text())
    about = {
        "author": "A. Nyone",
        "github_id": "anyone",
        "name": "A made-up submission",
        "val_bpb": round(sum(log.bpb for log in logs) / len(logs), 5),
        "bytes_total": max(log.model_bytes + log.code_bytes for log in logs),
        "seeds": [log.seed for log in logs],
        "seed_results": {str(log.seed): {"val_bpb": log.bpb} for log in logs},
    }
    (path / "submission.json").write_text(json.dumps(about))
    return path


def edit_about(path: Path, **changes: Any) -> None:
    """Change values of submission.json."""
    file = path / "submission.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
