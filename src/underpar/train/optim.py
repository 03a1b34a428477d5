"""One step of both optimizers: Muon for matrices, AdamW for embeddings and scalars."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from underpar.core.dist import ALONE
from underpar.core.runtime import Runtime
from underpar.recipe import TrainPart
from underpar.schema import GROUPS
from underpar.train.groups import group_parameters
from underpar.train.muon import Muon

NO_CHANGE = dict.fromkeys(GROUPS, 1.0)


class Optimizer:
    """Clips gradients, sets the rates and updates. The state is a flat table of tensors.

    Gradients are clipped after they were summed over ranks, so an update does not depend on the
    number of ranks. The published scripts of PR 2014, 2135 and 1219 clip the gradient of each rank
    before the sum; there the update does depend on it.
    """

    def __init__(self, model: nn.Module, part: TrainPart, runtime: Runtime = ALONE) -> None:
        groups = group_parameters(model)
        self.part = part
        by_muon = groups["matrix"] if part.matrix_optimizer == "muon" else {}
        self.parameters = [p for members in groups.values() for p in members.values()]
        self.muon = Muon(
            by_muon,
            part.matrix_decay,
            part.newton_schulz,
            part.row_norm,
            runtime,
            part.cautious_decay,
            part.neuron_beta,
            part.query_rows,
        )
        # Group -> learning rate and weight decay.
        self._rates = {
            "embed": (part.embed_lr, part.embed_decay),
            "scalar": (part.scalar_lr, part.scalar_decay),
        }
        if part.matrix_optimizer == "adam":
            self._rates["matrix"] = (part.matrix_lr, part.matrix_decay)
        self._adam_names = [name for group in self._rates for name in groups[group]]
        betas = {"embed": part.embed_betas, "scalar": part.scalar_betas}
        self.adam = torch.optim.AdamW(
            [
                {
                    "params": list(groups[group].values()),
                    "betas": betas.get(group) or part.adam_betas,
                }
                for group in self._rates
            ],
            eps=1e-8,
            fused=all(p.is_cuda for p in self.parameters),
        )
        # Adam's share of the gradients since its last step, and how many steps ago that was.
        self._adam_parameters = [p for group in self.adam.param_groups for p in group["params"]]
        self._pending: list[Tensor] = []
        self._waited = torch.zeros((), dtype=torch.int64)
        if part.adam_every > 1:
            self._pending = [torch.zeros_like(p) for p in self._adam_parameters]

    def step(
        self, lr_scale: float, momentum: float, decay_scales: Mapping[str, float] = NO_CHANGE
    ) -> Tensor:
        """One update from the summed gradients; returns their norm before clipping.

        `decay_scales`: the factor of weight decay by group.
        """
        norm = nn.utils.clip_grad_norm_(self.parameters, self.part.clip or float("inf"))
        for group, name in zip(self.adam.param_groups, self._rates, strict=True):
            rate, decay = self._rates[name]
            group["lr"] = rate * lr_scale
            group["weight_decay"] = decay * decay_scales[name]
        self._step_adam()
        self.muon.step(self.part.matrix_lr * lr_scale, momentum, decay_scales["matrix"])
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def _step_adam(self) -> None:
        """A step of Adam, or one of waiting: then the gradients are added to the next step's."""
        if not self._pending:
            self.adam.step()
            return
        self._waited += 1
        for parameter, sum_so_far in zip(self._adam_parameters, self._pending, strict=True):
            if parameter.grad is not None:
                sum_so_far += parameter.grad
                parameter.grad = sum_so_far
        if self._waited < self.part.adam_every:
            return
        self.adam.step()
        self._waited.zero_()
        torch._foreach_zero_(self._pending)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that a resumed run needs: the live tensors, not copies."""
        tensors = {f"muon.{name}": buffer for name, buffer in self.muon.state().items()}
        tensors |= self._waiting()
        for index, moments in self.adam.state_dict()["state"].items():
            for key, value in moments.items():
                tensors[f"adam.{self._adam_names[index]}.{key}"] = value
        return tensors

    def _waiting(self) -> dict[str, Tensor]:
        """What Adam waits with, by name; nothing if every step is one of Adam's."""
        if not self._pending:
            return {}
        sums = zip(self._adam_names, self._pending, strict=True)
        return {"adam_waited": self._waited} | {f"adam.{name}.sum": total for name, total in sums}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a state; what this optimizer did before is forgotten."""
        muon = {f"muon.{name}": buffer for name, buffer in self.muon.state().items()}
        for name, buffer in (muon | self._waiting()).items():
            # Viewing too few values is an error; copying them would repeat them.
            buffer.copy_(tensors[name].view(buffer.shape))
        parameters = self._adam_parameters
        shapes = [{"step": (), "exp_avg": p.shape, "exp_avg_sq": p.shape} for p in parameters]
        # A parameter that never had a gradient has no moments. AdamW keeps the tensors it is given,
        # so it gets copies.
        moments = {
            index: {
                key: tensors[f"adam.{name}.{key}"].view(shape).clone()
                for key, shape in shapes[index].items()
            }
            for index, name in enumerate(self._adam_names)
            if f"adam.{name}.step" in tensors
        }
        self.adam.load_state_dict(self.adam.state_dict() | {"state": moments})
