"""Whether a network trains the same with a candidate as without."""

from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor

from lever_stacks import batch_of, randomized
from underpar.build.levers import resolve_levers
from underpar.build.model import build_model
from underpar.compile.regions import Sharing
from underpar.compile.rewrites import choose_rewrites
from underpar.compile.traced_run import TracedRun
from underpar.core.runtime import Runtime
from underpar.model.gpt import GPT
from underpar.model.network import EAGER, Eager
from underpar.recipe import Recipe, load_recipe
from underpar.train.step import mean_loss


def assert_trains_the_same(
    candidate: ModuleType, recipe: str = "pr2014+cpu", overrides: Sequence[str] = ()
) -> None:
    """Loss and gradients of a network with the candidate, eager and traced, are the plain ones."""
    resolved = resolve_levers(load_recipe(recipe, list(overrides)))
    plain, changed = (network_of(resolved) for _ in range(2))
    candidate.apply(changed, resolved)
    assert [n for n, _ in changed.named_parameters()] == [n for n, _ in plain.named_parameters()]
    for progress in (0.0, 1.0):
        wanted = gradients(plain, EAGER, progress)
        # A candidate is timed on top of the rewrites that fit.
        rewrites = choose_rewrites("auto", changed, Runtime(torch.device("cpu"), compiled=True))
        for run in (EAGER, TracedRun(Sharing(lambda graph, examples: graph), rewrites.names)):
            loss_of = getattr(candidate, "loss", None)
            ours = gradients(changed, run, progress, loss_of)
            assert ours.keys() == wanted.keys()
            for name, gradient in wanted.items():
                torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def network_of(recipe: Recipe) -> GPT:
    """A network in training, with random weights but for those that are frozen."""
    network = randomized(recipe).train()
    fresh = dict(build_model(recipe).named_parameters())
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if not parameter.requires_grad:
                parameter.copy_(fresh[name])
    return network


def gradients(
    network: GPT, run: Eager, progress: float, loss_of: Callable[..., Tensor] | None = None
) -> dict[str, Tensor]:
    """The loss and the gradient of each weight that has one."""
    network.set_progress(progress)
    network.zero_grad()
    loss = mean_loss(network, batch_of([9, 30, 50], 128), run, loss_of=loss_of)
    loss.backward()
    found = {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | found
