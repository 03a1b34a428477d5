"""Both optimizers behind one step: Muon for matrices, AdamW for embeddings and scalars."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from underpar.recipe import TrainPart
from underpar.train.groups import group_parameters
from underpar.train.muon import Muon


class Optimizer:
    """Clip, set the rates, update; its state is a flat table of tensors."""

    def __init__(self, model: nn.Module, part: TrainPart) -> None:
        groups = group_parameters(model)
        self.part = part
        self.parameters = [p for members in groups.values() for p in members.values()]
        self.muon = Muon(groups["matrix"], part.matrix_decay)
        self._rates = {"embed": part.embed_lr, "scalar": part.scalar_lr}
        decays = {"embed": part.embed_decay, "scalar": part.scalar_decay}
        self._adam_names = [name for group in self._rates for name in groups[group]]
        self.adam = torch.optim.AdamW(
            [
                {"params": list(groups[group].values()), "weight_decay": decays[group], "lr": rate}
                for group, rate in self._rates.items()
            ],
            betas=part.adam_betas,
            eps=1e-8,
        )

    def step(self, lr_scale: float, momentum: float) -> Tensor:
        """One update from the summed gradients; returns their norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.parameters, self.part.clip or float("inf"))
        for group, rate in zip(self.adam.param_groups, self._rates.values(), strict=True):
            group["lr"] = rate * lr_scale
        self.adam.step()
        self.muon.step(self.part.matrix_lr * lr_scale, momentum)
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def state(self) -> dict[str, Tensor]:
        """Every tensor a resumed run needs."""
        tensors = {f"muon.{name}": buffer for name, buffer in self.muon.momenta.items()}
        for index, moments in self.adam.state_dict()["state"].items():
            for key, value in moments.items():
                tensors[f"adam.{self._adam_names[index]}.{key}"] = value
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a checkpointed state back."""
        for name, buffer in self.muon.momenta.items():
            buffer.copy_(tensors[f"muon.{name}"])
        state = self.adam.state_dict()
        for index, name in enumerate(self._adam_names):
            keys = ("step", "exp_avg", "exp_avg_sq")
            if f"adam.{name}.step" in tensors:
                state["state"][index] = {key: tensors[f"adam.{name}.{key}"] for key in keys}
        self.adam.load_state_dict(state)
