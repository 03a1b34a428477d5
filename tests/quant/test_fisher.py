"""Output sensitivities: those of theory, in units that predict what errors of weights cost."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from thread_ranks import unheard
from tiny import TinyRun
from underpar.build.levers import resolve_levers
from underpar.build.model import build_model
from underpar.core.runtime import Runtime
from underpar.core.tensor_files import read_tensors
from underpar.data.batch import Batch
from underpar.data.folder import DataFolder, load_data
from underpar.errors import ArtifactError, RuleError
from underpar.model.gpt import GPT
from underpar.model.kv_cache import PackedCache
from underpar.quant.allocate import Sensitivity, conditional_variances, sensitivities
from underpar.quant.calibration import HEAD, Calibration, TrainingText, collect
from underpar.quant.fisher import FLOOR, Fisher, measure
from underpar.recipe import load_recipe

SETS = ["model.num_layers=2", "levers.loop={first=0, last=0, start=0.5}", "levers.xsa=true"]


@pytest.fixture(scope="module")
def data(tiny_data: Path) -> DataFolder:
    return load_data(tiny_data)


@pytest.fixture(scope="module")
def text(data: DataFolder) -> TrainingText:
    return TrainingText(data, num_batches=4, batch_tokens=300)


def model_of(*sets: str) -> GPT:
    """A model with random weights."""
    torch.manual_seed(0)
    model = build_model(resolve_levers(load_recipe("baseline+cpu", [*SETS, *sets])))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture
def model() -> GPT:
    return model_of()


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()


def label_variance(jacobian: Tensor, probs: Tensor) -> Tensor:
    """Mean over labels of the squared gradient: M' (diag p - p p') M, its diagonal (..., R)."""
    mean = torch.einsum("nv,nvr->nr", probs, jacobian)
    return torch.einsum("nv,nvr->nr", probs, jacobian.square()) - mean.square()


@pytest.mark.parametrize("cap", [30.0, 1.0])
def test_the_head_of_a_linear_softmax_model(
    cap: float, text: TrainingText, runtime: Runtime
) -> None:
    """With silent blocks the model is softmax(cap(W norm(W[token]))): all of it is known."""
    model = model_of(f"model.softcap={cap}")
    with torch.no_grad():
        # Unsure: where labels are almost certain, a mean over draws is slow to settle.
        model.embedding.weight.mul_(0.3)
        for block in model.blocks:
            block.attn_scale.zero_()
            block.mlp_scale.zero_()
    draws = [measure(model, text, runtime, seed) for seed in range(8)]
    first, lookup = draws[0], torch.stack([draw.lookup for draw in draws]).mean(0).double()
    tokens = torch.cat([b.inputs for b in text.batches(128, runtime)])
    table = model.embedding.weight.detach().double()
    kinds, counts = tokens.unique(return_counts=True)
    share = counts.double() / len(tokens)

    def logits_of(rows: Tensor) -> Tensor:
        return cap * torch.tanh(norm(norm(rows)) @ table.T / cap)

    logits = logits_of(table[kinds])
    probs = logits.softmax(-1)
    slope = 1 - (logits / cap).square()
    head = share @ (probs * (1 - probs) * slope.square())
    torch.testing.assert_close(first.outputs[HEAD].double(), head, rtol=1e-4, atol=1e-9)
    # One silent token after another: the gradient at a row comes from its own label alone.
    jacobian = torch.func.vmap(torch.func.jacrev(logits_of))(table[kinds])
    expected = share * label_variance(jacobian, probs).mean(-1)
    assert (lookup[torch.bincount(tokens, minlength=512) == 0] == 0).all()
    assert float(lookup.sum() / expected.sum()) == pytest.approx(1, abs=0.04)
    often = share.topk(10).indices
    torch.testing.assert_close(lookup[kinds][often], expected[often], rtol=0.3, atol=0)
    # Nothing else is read.
    assert all(not first.outputs[n].any() for n in first.outputs if n != HEAD)


def test_the_last_projection(model: GPT, text: TrainingText, runtime: Runtime) -> None:
    """What `down` of the last layer gives is read by its own token's label alone."""
    text, block = replace(text, num_batches=1), model.blocks[-1]
    scale, table = block.mlp_scale.detach(), model.embedding.weight.detach()
    kept: list[Tensor] = []
    hook = block.mlp.register_forward_hook(lambda module, inputs, y: kept.append(y))
    (batch,) = text.batches(128, runtime)
    with torch.no_grad():
        stream = model.embed(batch.inputs, PackedCache(batch.segments))
        for visit in model.plan:
            model.before_block(visit, stream)
            model.run_block(visit, stream)
    hook.remove()

    def logits_of(y: Tensor, rest: Tensor) -> Tensor:
        return 30 * torch.tanh(norm(rest + scale * y) @ table.T / 30)

    (y,) = kept
    rest = stream.x - scale * y
    jacobian = torch.func.vmap(torch.func.jacrev(logits_of))(y, rest)
    expected = label_variance(jacobian, logits_of(y, rest).softmax(-1)).mean(0)
    draws = [measure(model, text, runtime, seed) for seed in range(16)]
    average = torch.stack([draw.outputs["blocks.1.mlp.down.weight"] for draw in draws]).mean(0)
    torch.testing.assert_close(average, expected, rtol=0.25, atol=0)
    assert float(average.sum() / expected.sum()) == pytest.approx(1, abs=0.03)


def test_a_row_has_a_thousandth_of_the_mean(model: GPT) -> None:
    rows = torch.tensor([0.0, 1e-9, 1.0, 3.0])
    fisher = Fisher({"a": rows, HEAD: rows}, torch.tensor([2.0, 0.0, 0.0, 0.0]), 1)
    assert fisher.rows("a", 0.5).tolist() == pytest.approx([1e-3, 1e-3, 1.0, 3.0])
    # An error of the table's row 0 costs 2 e^2 / 2, that of the head's 0.5 g e^2 / 2.
    assert fisher.rows(HEAD, 0.5).tolist() == pytest.approx([4.0, 2 * FLOOR, 1.0, 3.0])


def test_twice_the_same_is_the_same_bits(model: GPT, text: TrainingText, runtime: Runtime) -> None:
    first, again = (measure(model, text, runtime) for _ in range(2))
    assert all(torch.equal(again.outputs[name], g) for name, g in first.outputs.items())
    assert torch.equal(again.lookup, first.lookup)
    assert set(first.outputs) == set(collect(model, text, runtime).hessians)
    # A predictor's model asks for no gradients; labels of another seed are others.
    model.requires_grad_(False)
    frozen, other = measure(model, text, runtime), measure(model, text, runtime, seed=1)
    assert torch.equal(frozen.lookup, first.lookup)
    assert not torch.equal(other.lookup, first.lookup)
    assert torch.equal(other.outputs[HEAD], first.outputs[HEAD])


def test_ranks_add_up_to_the_whole(model: GPT, text: TrainingText, runtime: Runtime) -> None:
    whole = measure(model, text, runtime)
    shares = [measure(model, text, unheard(rank, 2)) for rank in range(2)]
    assert [share.num_tokens for share in shares] == [600, 600]
    for name, g in whole.outputs.items():
        mean = torch.stack([share.outputs[name] for share in shares]).mean(0)
        torch.testing.assert_close(mean, g, rtol=1e-4, atol=1e-12)
    lookup = torch.stack([share.lookup for share in shares]).mean(0)
    torch.testing.assert_close(lookup, whole.lookup, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("breaks", [False, True])
def test_the_model_comes_back_as_it_was(
    breaks: bool, model: GPT, text: TrainingText, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.train().set_progress(0.1)
    model.blocks[0].eval()
    model.embedding.weight.requires_grad_(False)

    def state() -> list[Any]:
        modules = [(m.training, len(m._forward_hooks)) for m in model.modules()]
        asking = [(p.requires_grad, p.grad is None, p.data_ptr()) for p in model.parameters()]
        return [modules, asking, model.plan]

    about, random = state(), torch.get_rng_state()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    if breaks:
        monkeypatch.setattr(model, "finish", lambda stream: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            measure(model, text, runtime)
    else:
        measure(model, text, runtime)
    assert state() == about
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_other_text_and_a_diverged_model_are_refused(
    model: GPT, text: TrainingText, data: DataFolder, runtime: Runtime
) -> None:
    with pytest.raises(RuleError, match="given a list: expected TrainingText"):
        measure(model, [data.val], runtime)  # type: ignore[arg-type]
    with torch.no_grad():
        model.blocks[1].mlp_scale.mul_(math.inf)
    with pytest.raises(ArtifactError, match="logits are NaN or infinite"):
        measure(model, text, runtime)


class Trained:
    """The shared tiny run, what it was calibrated with, and what errors cost it in truth."""

    def __init__(self, run: TinyRun, runtime: Runtime) -> None:
        self.model = build_model(run.recipe).eval()
        tensors, _ = read_tensors(run.folder.weights_file)
        self.model.load_state_dict(tensors)
        text = TrainingText(load_data(run.data), num_batches=6, batch_tokens=1500)
        self.calibration: Calibration = collect(self.model, text, runtime)
        self.fisher = measure(self.model, text, runtime)
        measured_on = replace(text, num_batches=3)
        self.batches: list[Batch] = list(measured_on.batches(128, runtime))
        self.log_probs, self.nats = self.price()

    @torch.no_grad()
    def price(self) -> tuple[Tensor, float]:
        """Log-probabilities, and mean nats of the text's own tokens."""
        logits = [self.model(b.inputs, PackedCache(b.segments)) for b in self.batches]
        log_probs = torch.cat(logits).log_softmax(-1)
        targets = torch.cat([b.targets for b in self.batches])
        return log_probs, float(F.nll_loss(log_probs, targets))

    def costs(self, errors: dict[str, Tensor]) -> tuple[float, float]:
        """Nats a token that errors cost: labels of the model, and of the text.

        A mean over both signs, so that what is linear in the errors cancels.
        """
        by_model, by_text = 0.0, 0.0
        for sign in (1, -1):
            with _moved(self.model, errors, sign):
                log_probs, nats = self.price()
            apart = self.log_probs.exp() * (self.log_probs - log_probs)
            by_model += float(apart.sum(-1).mean()) / 2
            by_text += (nats - self.nats) / 2
        return by_model, by_text


@contextmanager
def _moved(model: GPT, errors: dict[str, Tensor], sign: int) -> Iterator[None]:
    weights = {name: model.get_parameter(name).detach().clone() for name in errors}
    with torch.no_grad():
        for name, error in errors.items():
            model.get_parameter(name).add_(error, alpha=sign)
        yield
        for name, weight in weights.items():
            model.get_parameter(name).copy_(weight)


@pytest.fixture(scope="module")
def trained(tiny_run: TinyRun, runtime: Runtime) -> Trained:
    return Trained(tiny_run, runtime)


TARGET = 1e-3


def independent_error(trained: Trained, name: str, source: torch.Generator) -> Tensor:
    """Errors of one size all over a matrix, which should cost TARGET."""
    d = trained.calibration.hessians[name].diagonal() / trained.calibration.num_tokens
    g = trained.fisher.rows(name, float(d.mean()))
    size = math.sqrt(TARGET / (0.5 * float(g.sum() * d.sum())))
    return size * torch.randn(len(g), len(d), generator=source)


def fed_back_error(trained: Trained, name: str, source: torch.Generator) -> Tensor:
    """Errors of one rounding size, shaped as GPTQ's feedback shapes them; they cost TARGET."""
    sensitivity: Sensitivity = sensitivities(trained.calibration, trained.fisher)[name]
    size = math.sqrt(TARGET / (0.5 * sensitivity.rows.sum() * sensitivity.columns.sum()))
    rounding = (
        size
        * torch.randn(len(sensitivity.rows), len(sensitivity.columns), generator=source).double()
    )
    hessian = trained.calibration.hessians[name].double()
    hessian += torch.diag(0.01 * hessian.diagonal().mean().expand(len(hessian)))
    upper = torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)
    scale = torch.from_numpy(conditional_variances(trained.calibration.hessians[name])).sqrt()
    return torch.linalg.solve_triangular(upper, rounding * scale, upper=True, left=False).float()


@pytest.mark.parametrize("make_error", [independent_error, fed_back_error])
def test_small_errors_cost_what_the_quadratic_model_says(make_error: Any, trained: Trained) -> None:
    source = torch.Generator().manual_seed(0)
    errors = {name: make_error(trained, name, source) for name in trained.calibration.hessians}
    logs = {name: math.log2(trained.costs({name: e})[0] / TARGET) for name, e in errors.items()}
    assert abs(sum(logs.values()) / len(logs)) < math.log2(1.25), logs
    assert sum(map(abs, logs.values())) / len(logs) < math.log2(1.5), logs
    # All together, and for the labels that the text has.
    whole = {name: error / math.sqrt(len(errors)) for name, error in errors.items()}
    by_model, by_text = trained.costs(whole)
    assert by_model == pytest.approx(TARGET, rel=0.3)
    assert 1 / 1.5 < by_text / TARGET < 1.5


def test_each_role_of_the_embedding_costs_its_share(trained: Trained, runtime: Runtime) -> None:
    """The head's errors alone, and the table's alone, each in nats a token."""
    model, fisher = trained.model, trained.fisher
    table = torch.randn(model.embedding.weight.shape, generator=torch.Generator().manual_seed(1))
    d = trained.calibration.hessians[HEAD].diagonal() / trained.calibration.num_tokens
    by_role = {
        "head": 0.5 * float(fisher.outputs[HEAD].sum() * d.sum()),
        "table": 0.5 * float(fisher.lookup.sum()) * len(d),
    }
    linear, lookup_table = F.linear, model.embedding.weight
    for role, cost in by_role.items():
        error = {HEAD: table * math.sqrt(TARGET / cost)}
        clean = lookup_table.detach().clone()

        def head(x: Tensor, weight: Tensor, bias: Any = None, clean: Tensor = clean) -> Tensor:
            return linear(x, clean if weight is lookup_table else weight, bias)

        def look_up(m: Any, x: Any, y: Tensor, clean: Tensor = clean) -> Tensor:
            return clean[x[0]]

        with pytest.MonkeyPatch.context() as patch:
            if role == "table":
                patch.setattr(F, "linear", head)
                actual = trained.costs(error)[0]
            else:
                hook = model.embedding.register_forward_hook(look_up)
                actual = trained.costs(error)[0]
                hook.remove()
        assert actual == pytest.approx(TARGET, rel=0.3), role
