"""FP8 in training: products of the MLP and the head read 8-bit floats (e4m3) in the forward pass.

    y = (x / sx) (w / sw)' sx sw      both factors rounded to e4m3, sums in fp32, y in bf16
    dx = g w, dw = g' x               in bf16, as if nothing had been rounded

A scale maps the largest magnitude to 448, the largest number of e4m3. For weights it is that of
now. For activations it is the largest of the last steps (delayed scaling), so that rounding needs
no pass over x before it; what has grown since is clamped. Weights, optimizer and packing stay as
they are, and scores, validation included, use products in full precision.

On a CPU the same numbers are rounded and multiplied in fp32, which shows the loss and not the
speed. At this width every public trial was slower.

Source: delayed scaling, arXiv:2209.05433 and Transformer Engine; FP8 head of modded-nanogpt record
20, FP8 MLP of records 84 and 89 (1.6 % of a step at width 768). PR 670: -1 % speed; PR 2046: -4 to
-18 %.

Legal: training only; it changes how a step rounds.

Cost: one rounding of weights and activations per product; each rank has scales of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import define, impl, register_autograd, register_fake

from underpar.errors import LeverError
from underpar.recipe import ModelSpec, require
from underpar.seams import Visit

STAGE = "train"

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
# The first GPUs with products of 8-bit floats: Ada and Hopper.
CAPABILITY = (8, 9)


@dataclass(frozen=True)
class Settings:
    """`mlp`: whether the products of the MLP read 8-bit floats.
    `head`: whether the product of the head does.
    `steps`: the scale of activations is that of the largest magnitude in so many steps.
    """

    mlp: bool = True
    head: bool = True
    steps: int = 16

    def __post_init__(self) -> None:
        require(self.mlp or self.head, "levers.fp8: neither mlp nor head; drop the lever")
        require(0 < self.steps <= 4096, f"levers.fp8.steps = {self.steps}: expected 1 to 4096")


# A history that is full within the few steps of a test.
TINY = (Settings(steps=1),)


def scale_of(largest: Tensor) -> Tensor:
    """The scale at which the largest magnitude is the largest number; 1 if nothing was seen."""
    return torch.where(largest > 0, largest.float() / LARGEST, 1.0)


def rounded(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale as e4m3; what is too large becomes the largest number."""
    return (x.detach().float() / scale).clamp(-LARGEST, LARGEST).to(E4M3)


def fp8_linear(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """x (N, inner) times weight (outer, inner) transposed, in the precision of x.

    Rounding is left to the compiler, which fuses it with what makes x.
    """
    x8, weight8 = rounded(x, x_scale), rounded(weight, weight_scale)
    factors = (x, weight.to(x.dtype), x8, weight8, x_scale.float(), weight_scale.float())
    y: Tensor = torch.ops.underpar.fp8_linear(*factors)
    return y


define(
    "underpar::fp8_linear",
    "(Tensor x, Tensor weight, Tensor x8, Tensor weight8, Tensor x_scale, Tensor weight_scale)"
    " -> Tensor",
)


@impl("underpar::fp8_linear", "CompositeExplicitAutograd")
def _fp8_linear(
    x: Tensor, weight: Tensor, x8: Tensor, weight8: Tensor, x_scale: Tensor, weight_scale: Tensor
) -> Tensor:
    if x.is_cuda and x.dtype == torch.bfloat16:
        # The second factor has to lie column by column.
        return torch._scaled_mm(
            x8.contiguous(),
            weight8.contiguous().T,
            scale_a=x_scale,
            scale_b=weight_scale,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
    # Products of two numbers of e4m3 are exact in fp32.
    with torch.autocast(x.device.type, enabled=False):
        return (x8.float() @ weight8.float().T * (x_scale * weight_scale)).to(x.dtype)


@register_fake("underpar::fp8_linear")
def _(
    x: Tensor, weight: Tensor, x8: Tensor, weight8: Tensor, x_scale: Tensor, weight_scale: Tensor
) -> Tensor:
    return x.new_empty(len(x), len(weight))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return grad @ weight, grad.T @ x, None, None, None, None


register_autograd("underpar::fp8_linear", _differentiate, setup_context=_save)


class Lever:
    """The products, their scales and what was seen of their inputs."""

    def __init__(self, settings: Settings, spec: ModelSpec) -> None:
        self.settings = settings

    def equip(self, model: Any) -> None:
        """Replace products of the live network, once."""
        products = {
            name: module
            for name, module in model.named_modules()
            if self.settings.mlp and name.endswith((".mlp.up", ".mlp.down"))
        }
        head = model.head_name.removesuffix(".weight")
        if self.settings.head:
            require(
                not model.hooks.adjust,
                "levers.fp8.head: another lever changes what the head's product makes; set it to "
                "false",
            )
            products[head] = model.get_submodule(head)
        weights = [module.weight for module in products.values()]
        self._refuse(weights)
        device = weights[0].device
        self.history = torch.zeros(self.settings.steps, len(weights), device=device)
        self.step = torch.zeros((), dtype=torch.int64)
        self.seen, self.scales = (
            [torch.full((), start, device=device) for _ in weights] for start in (0.0, 1.0)
        )
        for place, (name, module) in enumerate(products.items()):
            # Compiled functions find tensors in the modules that they are given.
            module.register_buffer("fp8_seen", self.seen[place], persistent=False)
            module.register_buffer("fp8_scale", self.scales[place], persistent=False)
            if name == head:
                hook = _Head(module)
                # To the end of the network's life.
                model.hooks.change(adjust=hook.adjust)
            else:
                module.forward = MethodType(_linear, module)

    def begin_step(self) -> None:
        """Take the scales of the next step from what the steps before saw."""
        seen = torch.stack(self.seen)
        if self.step == 0:
            # What a warm-up saw was made up.
            seen.zero_()
        self.history[int(self.step) % len(self.history)] = seen
        self.step += 1
        torch._foreach_zero_(self.seen)
        self._set_scales()

    def state(self) -> dict[str, Tensor]:
        """What is checkpointed: the history, and what the last step saw."""
        return {"history": self.history, "step": self.step, "seen": torch.stack(self.seen)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put a checkpointed state back."""
        self.history.copy_(state["history"])
        self.step.copy_(state["step"])
        torch._foreach_copy_(self.seen, list(state["seen"].to(self.history.device).unbind()))
        self._set_scales()

    def _set_scales(self) -> None:
        torch._foreach_copy_(self.scales, list(scale_of(self.history.amax(0)).unbind()))

    def _refuse(self, weights: list[nn.Parameter]) -> None:
        device = weights[0].device
        if device.type == "cuda":
            found = torch.cuda.get_device_capability(device)
            why = (
                f"{torch.cuda.get_device_name(device)} has compute capability "
                f"{found[0]}.{found[1]}, and products of 8-bit floats need 8.9"
                if found < CAPABILITY
                else ""
            )
            odd = next((tuple(w.shape) for w in weights if any(n % 16 for n in w.shape)), None)
            why = why or (f"a matrix of {odd}, whose sides are no multiples of 16" if odd else "")
        else:
            why = "" if device.type == "cpu" else f"no 8-bit floats on {device.type}"
        if why:
            raise LeverError(f"levers.fp8: {why}; drop the lever")


class _Head:
    """The seam at which logits are changed, for the head's product."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def adjust(self, site: str, visit: Visit | None, y: Tensor, x: Tensor) -> Tensor:
        """In training, other logits; the compiler drops the product that made y."""
        return _product(self.module, x) if site == "head" and self.module.training else y


def _linear(module: Any, x: Tensor) -> Tensor:
    return _product(module, x) if module.training else F.linear(x, module.weight)


def _product(module: Any, x: Tensor) -> Tensor:
    largest, weight = x.detach().abs().amax().float(), module.weight
    module.fp8_seen.copy_(torch.maximum(module.fp8_seen, largest))
    # Not that of the step: where the scale of a branch is folded into it, the weight is another.
    return fp8_linear(x, weight, module.fp8_scale, scale_of(weight.detach().abs().amax()))
