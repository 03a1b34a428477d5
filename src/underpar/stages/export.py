"""A model for other programs: its forward pass as a program of torch.export, or as ONNX.

    tokens (T,) int64, BOS first -> log_probs (T, V) in nats of what follows each token

The file needs no package of ours. It is the plain model: no adapters, no experts, one document of
up to `context` tokens, in fp32.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underpar.build.artifact import read_artifact
from underpar.build.model import build_predictor
from underpar.core.run_folder import write_atomic
from underpar.core.runtime import Runtime
from underpar.data.batch import pack_documents
from underpar.errors import ArtifactError, UnderparError, one_line
from underpar.infer.predictor import Predictor, log_probs_of
from underpar.model.network import Network
from underpar.seams import BOS_ID

# Levers look back on up to two tokens; shorter texts are padded by the caller.
LEAST_TOKENS = 3
# Nats. Other programs add up in other orders.
TOLERANCE = 1e-3
# Tokens (T,) -> log-probabilities (T, V).
Program = Callable[[Tensor], Tensor]


class OneDocument:
    """A cache for one whole document, written in operations that every exporter knows."""

    def __init__(self, context: int, num_tokens: int, device: torch.device) -> None:
        self.context = context
        self.positions = torch.arange(num_tokens, device=device)
        self._back = self.positions[:, None] - self.positions  # (T, T)

    def attend(self, slot: int, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Causal attention, with each key repeated for the queries that share it."""
        seen = self._back >= 0
        if window:
            seen = seen & (self._back <= window)
        num_shared = q.size(1) // k.size(1)
        k, v = (t.repeat_interleave(num_shared, dim=1) for t in (k, v))
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # (1, H, T, D)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)[0].transpose(0, 1)

    def previous(self, name: str, x: Tensor) -> Tensor:
        """x (T, ...) one token earlier; zeros before the first."""
        return torch.cat((torch.zeros_like(x[:1]), x[:-1]))


class Forward(nn.Module):
    """Tokens of one document -> log-probabilities."""

    def __init__(self, model: Network) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Log-probabilities (T, V) in nats of what follows each of tokens (T,)."""
        cache = OneDocument(self.model.spec.context, tokens.size(0), tokens.device)
        return log_probs_of(self.model, self.model.hidden(tokens, cache))


def export(artifact_path: Path, out: Path, runtime: Runtime) -> dict[str, Any]:
    """Write the forward pass to `out`, a .pt2 or an .onnx file, and compare it with the model."""
    writers = {".pt2": as_torch, ".onnx": as_onnx}
    if out.suffix not in writers:
        raise UnderparError(f"{out}: expected a name that ends with {' or '.join(writers)}")
    artifact, identity = read_artifact(artifact_path)
    if artifact.recipe.hnet is not None:
        raise ArtifactError(f"{artifact_path}: an H-Net cuts its text into chunks; export a GPT")
    predictor = build_predictor(artifact, runtime.device)
    content, program = writers[out.suffix](trace(predictor.model))
    difference = None if program is None else largest_difference(program, predictor)
    if difference is not None and not difference <= TOLERANCE:
        raise ArtifactError(
            f"{out}: the program differs from the artifact by {difference:.2g} nats; not written"
        )
    write_atomic(out, content)
    return {
        "file": str(out),
        "bytes": len(content),
        "artifact_sha256": identity,
        "least_tokens": LEAST_TOKENS,
        "most_tokens": predictor.context,
        "vocab_size": artifact.recipe.model.vocab_size,
        "largest_difference_nats": difference,
    }


def trace(model: Network) -> torch.export.ExportedProgram:
    """The forward pass for any number of tokens up to the context."""
    context = model.spec.context
    tokens = torch.full((min(context, 16),), BOS_ID, device=next(model.parameters()).device)
    length = torch.export.Dim("tokens", min=LEAST_TOKENS, max=context)
    try:
        return torch.export.export(Forward(model).eval(), (tokens,), dynamic_shapes=({0: length},))
    except RuntimeError as error:
        raise ArtifactError(f"this model cannot be exported: {one_line(error, 300)}") from error


def as_torch(traced: torch.export.ExportedProgram) -> tuple[bytes, Program | None]:
    """The file that `torch.export.load` reads, and what it computes."""
    buffer = io.BytesIO()
    torch.export.save(traced, buffer)
    buffer.seek(0)
    return buffer.getvalue(), torch.export.load(buffer).module()


def as_onnx(traced: torch.export.ExportedProgram) -> tuple[bytes, Program | None]:
    """The ONNX file, and what it computes by onnxruntime, if that is installed."""
    # What torch says there is about itself.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            written = torch.onnx.export(
                traced, input_names=["tokens"], output_names=["log_probs"], verbose=False
            )
    except (ImportError, torch.onnx.OnnxExporterError) as error:
        raise UnderparError(
            f"no ONNX file: {one_line(error, 200)}; run 'pip install onnx onnxscript', or write a "
            ".pt2 file, which needs torch alone"
        ) from error
    assert written is not None
    content = written.model_proto.SerializeToString()
    try:
        import onnxruntime
    except ImportError:
        return content, None
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return content, lambda tokens: torch.from_numpy(
        session.run(None, {"tokens": tokens.cpu().numpy()})[0]
    )


def largest_difference(program: Program, predictor: Predictor) -> float:
    """Nats by which a program's probabilities of made-up texts differ from the predictor's."""
    context, vocab_size = predictor.context, predictor.model.spec.vocab_size
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for num_tokens in sorted({LEAST_TOKENS, min(17, context), context}):
        tokens = torch.randint(BOS_ID + 1, vocab_size, (num_tokens,), generator=generator)
        tokens[0] = BOS_ID
        batch, _ = pack_documents([tokens.numpy()], BOS_ID, context)
        expected = predictor.log_probs(batch).cpu()
        found = program(tokens.to(predictor.device)).cpu()
        worst = max(worst, float((found - expected).abs().max()))
    return worst
