"""The stages with a progress bar each: what the commands and the demo run. Summaries are plain."""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from underpar import calibrating, packing, pipeline
from underpar.artifact.budget import Budget
from underpar.artifact.fit import MOST_ROUNDS, Round
from underpar.audit.finding import Finding
from underpar.audit.rules import RULES
from underpar.codec.stream import read_header
from underpar.console import ERR, progress_bar
from underpar.data.folder import load_data
from underpar.errors import RunError, UnderparError
from underpar.kernels.attention import backend_of
from underpar.packing import OnRound
from underpar.parts import QuantPart
from underpar.recipe import Recipe, TrainPart
from underpar.run import RunFolder, write_atomic
from underpar.runtime import Runtime
from underpar.score.method import PLAIN, Method
from underpar.train.dist import process_group
from underpar.train.guard import Reference, read_reference


def train(
    recipe: Recipe,
    data: Path,
    folder: RunFolder,
    runtime: Runtime,
    quiet: bool = False,
    reference: Reference | None = None,
) -> dict[str, Any]:
    """Train to the end of the budget, to a signal, or until far behind `reference`.

    All of them leave a checkpoint.
    """
    last: dict[str, Any] = {}
    resumed = folder.checkpoint_file.exists()
    watch = Watch(reference, list(folder.metrics()) if resumed else ())
    with progress_bar("train", 1, quiet or not runtime.is_main) as bar:

        def show(line: dict[str, Any]) -> bool:
            if not last and not quiet:
                if resumed:
                    ERR.print(f"continuing {folder.path} at step {line['step']}", markup=False)
                chosen = backend_of(runtime.device, runtime.dtype)
                ERR.print(f"attention: {chosen}", markup=False)
            last.update(line)
            bar.update(spent_share(recipe.train, line), watch.add(line))
            return watch.stopped is not None

        finished = pipeline.train_run(recipe, data, folder, runtime, show)
    summary = {"finished": finished, "run": str(folder.path), "recipe_hash": recipe.hash}
    summary |= {"attention": backend_of(runtime.device, runtime.dtype)}
    summary |= {"compiled": runtime.compiled}
    summary |= {"stopped": watch.stopped} if watch.stopped else {}
    shown = ("step", "tokens", "start_seconds", "seconds", "loss")
    summary |= {k: last[k] for k in shown if k in last}
    return summary | (validation_of(folder) if finished and runtime.is_main else {})


def validation_of(folder: RunFolder) -> dict[str, float]:
    """Of a finished run, before it is quantized: bits per byte, live and averaged, and its size."""
    found = folder.read_json(folder.validation_file)
    keys = ("live_bpb", "average_bpb", "forecast_bytes")
    return {key: found[key] for key in keys if found.get(key) is not None}


def calibrate(folder: RunFolder, data: Path, runtime: Runtime, source: str = "") -> dict[str, Any]:
    """Read calibration text with a run's weights."""
    with process_group(runtime):
        return calibrating.calibrate(folder, load_data(data), runtime, source).about


def quantize(
    folder: RunFolder,
    runtime: Runtime,
    cap_bytes: int | None = None,
    part: QuantPart | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Round a run's weights to fill the cap."""
    with rounds_bar(quiet) as show:
        press = packing.open_press(folder, cap_bytes, part, runtime)
        found = packing.quantize_run(press, folder, runtime, show)
    shown = ("constant", "total_bytes", "cap_bytes", "tune_seconds", "seconds")
    return {key: found[key] for key in shown if key in found}


def pack(
    folder: RunFolder,
    runtime: Runtime,
    cap_bytes: int | None = None,
    part: QuantPart | None = None,
    quiet: bool = False,
    tokenizer_inside: bool = True,
) -> Budget:
    """The artifact of a run, under its cap."""
    with rounds_bar(quiet) as show:
        return packing.pack_run(folder, cap_bytes, part, runtime, show, tokenizer_inside)


@contextmanager
def rounds_bar(quiet: bool) -> Iterator[OnRound]:
    """A bar that counts how often a model was rounded and packed to find its size."""
    done = 0
    with progress_bar("quantize", MOST_ROUNDS, quiet) as bar:

        def show(tried: Round) -> None:
            nonlocal done
            done += 1
            bar.update(done, f"{tried.total_bytes:,} bytes with constant {tried.constant:.3g}")

        bar.update(0, "rounding")
        yield show
        bar.update(MOST_ROUNDS)


class Watch:
    """What is said about a run while it trains: speed, forecast, and whether to give it up."""

    def __init__(self, reference: Reference | None, lines: Iterable[dict[str, Any]] = ()) -> None:
        self.stopped: str | None = None
        self._reference = reference
        self._validated = ""
        for line in lines:
            self._see(line)
            if reference:
                reference.add(line["progress"], line["loss"])

    def add(self, line: dict[str, Any]) -> str:
        """Take a metrics line; returns it in words, with the last look at the held-out text."""
        if self._reference:
            self.stopped = self._reference.check(line["progress"], line["loss"])
        self._see(line)
        speed = line.get("tokens_per_second") or line["tokens"] / max(line["seconds"], 1e-9)
        remark = f"step {line['step']:,}, loss {line['loss']:.3f}, {speed:,.0f} tokens/s"
        if "mfu" in line:
            remark += f", MFU {line['mfu']:.0%}"
        # The training text where the held-out one is not priced on the way.
        if "forecast_bpb" in line:
            remark += f", forecast at {line['forecast_bpb']:.4f} BPB"
        elif "forecast_train_bpb" in line:
            remark += f", training text forecast at {line['forecast_train_bpb']:.4f} BPB"
        if "forecast_bytes" in line:
            remark += f", {line['forecast_bytes'] / 1e6:.2f} MB"
        return remark + self._validated

    def _see(self, line: dict[str, Any]) -> None:
        if "val_bpb" in line:
            self._validated = f", held-out {line['val_bpb']:.4f} BPB"
        if "average_val_bpb" in line:
            self._validated += f", averaged {line['average_val_bpb']:.4f}"


def open_reference(run: RunFolder, data: Path, margin: float) -> Reference:
    """The losses of a run on the same data: nats a token of other tokens say nothing."""
    theirs = run.read_json(run.about_file).get("data_identity")
    ours = pipeline.data_identity(load_data(data, verify=False, refuse_shared=False))
    if theirs != ours:
        raise RunError(
            f"{run.path} was trained on other data than {data} ({theirs}, not {ours}), so their "
            "losses cannot be compared; name another run for --stop-behind"
        )
    return read_reference(run, margin)


def data_of(run: RunFolder) -> Path:
    """The data folder that a run was started with."""
    data = run.read_json(run.about_file).get("data")
    if data is None or not Path(data).is_dir():
        raise RunError(
            f"{run.path}: its data folder {data} is not here; continue with 'underpar train "
            f"{run.recipe_file} --data FOLDER --out {run.path}'"
        )
    return Path(data)


def spent_share(part: TrainPart, line: dict[str, Any]) -> float:
    """Share of the budget spent after a logged step."""
    from underpar.train.schedule import progress

    return progress(part, line["seconds"], line["step"], line["tokens"], line.get("flops", 0.0))


def score(
    artifact: Path,
    data: Path,
    runtime: Runtime,
    method: Method = PLAIN,
    changes: Sequence[str] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Bits per byte on the held-out text, with xz beside it."""
    with progress_bar(method.label, 1, quiet or not runtime.is_main) as bar:

        def show(share: float, bpb: float) -> None:
            bar.update(share, f"{bpb:.4f} bits per byte")

        scored = pipeline.score_artifact(artifact, data, runtime, method, changes, show)
    result, xz = scored.score, scored.about["xz_bytes"]
    return {
        "finished": True,
        "method": result.method,
        "bpb": result.bpb,
        "bits": result.bits,
        "bytes": result.num_bytes,
        "targets": result.num_targets,
        "documents": len(result.entries),
        "xz_bpb": 8 * xz / result.num_bytes,
        "percent_of_xz": 100 * result.bits / (8 * xz),
        "bpb_with_artifact": (result.bits + 8 * scored.about["artifact_bytes"]) / result.num_bytes,
        "order": result.order,
        "stopped_at": result.stopped_at,
        "seconds": sum(result.seconds.values()),
        "file": str(scored.path),
    }


def audit(
    folder: RunFolder,
    runtime: Runtime,
    data: Path | None = None,
    code_tokens: int = 0,
    quiet: bool = False,
) -> tuple[str, list[Finding]]:
    """Judge a run rule by rule; returns the overall verdict and the findings."""
    with progress_bar("audit", len(RULES), quiet) as bar:
        done = 0

        def show(finding: Finding) -> None:
            nonlocal done
            done += 1
            bar.update(done, f"{finding.rule}: {finding.verdict}")

        return pipeline.audit_run(folder, runtime, data, code_tokens, show)


def read_input(path: Path) -> bytes:
    """A user's file; a missing one is a one-line error."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnderparError(f"cannot read {path}: {error.strerror}") from error


def compress(
    artifact: Path, source: Path, out: Path, runtime: Runtime, quiet: bool = False
) -> dict[str, Any]:
    """File -> compressed file, checked by decoding it; returns sizes."""
    data = read_input(source)
    codec = pipeline.open_codec(artifact, runtime)
    total = max(1, len(codec.tokenizer.encode(data)))
    done = 0
    with progress_bar("compress", total, quiet) as bar:

        def show(num_tokens: int) -> None:
            nonlocal done
            done += num_tokens
            bar.update(done, "then decoding again" if done >= total else "")

        compressed = codec.compress(data, show)
    write_atomic(out, compressed)
    _, payload = read_header(compressed)
    return {
        "raw_bytes": len(data),
        "compressed_bytes": len(compressed),
        "header_bytes": len(compressed) - len(payload),
        "bits_per_byte": 8 * len(compressed) / max(1, len(data)),
        "xz_bytes": len(lzma.compress(data, preset=9)),
        "with_artifact_bytes": len(compressed) + artifact.stat().st_size,
    }


def decompress(
    artifact: Path, source: Path, out: Path, runtime: Runtime, any_machine: bool = False
) -> dict[str, Any]:
    """Compressed file -> file; returns sizes."""
    compressed = read_input(source)
    data = pipeline.open_codec(artifact, runtime).decompress(compressed, any_machine)
    write_atomic(out, data)
    return {"compressed_bytes": len(compressed), "raw_bytes": len(data)}
