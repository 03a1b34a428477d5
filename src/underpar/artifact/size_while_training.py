"""Forecast during training: the bytes of the artifact if it were packed now, without packing.

Weights are rounded on their device, by the rules of the packer, and the integers are counted. The
counts give the length of the streams for any distribution. (A Gaussian of the same deviation would
be 3 to 13 % off for embeddings and gates of short runs.) GPTQ (`gptqB:k`) changes single integers
but hardly their counts. The bytes that AWQ and LQER add are left out. Grids fill the cap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from underpar.artifact.array_decoder import choose_num_coders
from underpar.artifact.fit import MOST_BITS
from underpar.artifact.format import HEAD_BYTES, squeeze
from underpar.artifact.frequencies import PROB_BITS, normalize_counts
from underpar.artifact.pack import NUM_SECTIONS, shuffle, write_lines
from underpar.quant.clip_search import search_steps
from underpar.quant.gptq import round_to_nearest
from underpar.quant.logsteps import to_index
from underpar.quant.row_steps import clamp_steps, row_steps
from underpar.quant.rules import match_rules, refine
from underpar.quant.schemes import Scheme
from underpar.recipe import Recipe, to_tree

# Bytes that a stream takes per rANS coder, measured on packed models.
CODER_BYTES = 3
# Larger matrices are counted in part: this many integers give the entropy to 0.1 %.
MOST_COUNTED = 1 << 17
# More halves are squeezed in part, in pieces: at most about a tenth of a second.
MOST_HALVES, PIECE_HALVES = 1 << 17, 1 << 10


@dataclass(frozen=True)
class SizeForecast:
    """Bytes of a recipe's artifact, code and tokenizer included."""

    recipe: Recipe
    shapes: Mapping[str, tuple[int, ...]]
    tokenizer: bytes
    count_code: Callable[[], int]
    """Returns the bytes of the code; called once, at the first forecast, because it is slow."""
    most_counted: int = MOST_COUNTED
    """Integers of a matrix that are counted at most."""

    @cached_property
    def schemes(self) -> dict[str, Scheme]:
        """The scheme of each tensor, in the order of the file."""
        part = self.recipe.quant
        refined = refine(match_rules([*self.shapes], part.rules), part.finer_matrices)
        return dict(sorted(refined.items()))

    @cached_property
    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the weights: code, tokenizer and frame."""
        return self.count_code() + len(squeeze(self.tokenizer)) + HEAD_BYTES + 8 * NUM_SECTIONS

    @torch.no_grad()
    def total_bytes(self, weights: Mapping[str, Tensor]) -> int:
        """Bytes of the artifact with these weights, which the cap limits."""
        table: list[dict[str, Any]] = []
        halves: list[Tensor] = []
        lines: list[np.ndarray] = []
        for name, scheme in self.schemes.items():
            table.append({"name": name, "shape": self.shapes[name], "scheme": str(scheme)})
            if scheme.states:
                continue
            # The guard ends a run that diverged; the forecast only needs some size for it.
            weight = weights[name].float().nan_to_num(0.0, 0.0, 0.0)
            if scheme.is_half:
                halves.append(weight.half().flatten())
                continue
            rows = tensor_rows(weight, scheme)
            steps = tensor_steps(rows, scheme)
            # Integers are counted with fp16 steps: a log step differs from them by 2 % at most.
            if scheme.log:
                lines.append(to_index(steps.flatten().cpu().numpy()))
            else:
                halves.append(steps.flatten())
            table[-1] |= _code(rows, steps.float(), scheme.limit, self.most_counted)
        header = json.dumps({"recipe": to_tree(self.recipe), "tensors": table}, sort_keys=True)
        size = self.fixed_bytes + len(squeeze(header.encode())) + _half_bytes(halves)
        size += sum(row.get("bytes", 0) for row in table)
        size += len(write_lines(lines)) if lines else 0
        # Grids get steps as fine as the cap allows; fitted steps are as wide as it needs.
        cap_bytes = self.recipe.limits.cap_bytes
        if self._is_widened:
            return min(size, cap_bytes)
        return max(size, min(cap_bytes, size + round(MOST_BITS / 8 * self._num_grid_weights)))

    @property
    def _is_widened(self) -> bool:
        fixed = any(scheme.calibrated for scheme in self.schemes.values())
        return self.recipe.quant.fit and fixed and not self._num_grid_weights

    @property
    def _num_grid_weights(self) -> int:
        return sum(math.prod(self.shapes[n]) for n, s in self.schemes.items() if s.states)


def tensor_rows(weight: Tensor, scheme: Scheme) -> Tensor:
    """A matrix, of which every row has one step."""
    # If the runs do not divide the rows, packing refuses them; the forecast does not.
    if weight.numel() % (scheme.group or 1):
        scheme = Scheme(scheme.bits)
    return weight.reshape(scheme.num_steps(weight.shape), -1)


def tensor_steps(rows: Tensor, scheme: Scheme) -> Tensor:
    """The steps (R, 1) in fp16, on the device of the rows; `quant.rounding` has them for arrays."""
    if scheme.form == "clip":
        steps = clamp_steps(search_steps(rows, scheme.limit)[:, 0])
    else:
        steps = row_steps(rows, scheme.limit, scheme.sigmas, by_mean=bool(scheme.group))
    return steps.clip(scheme.least_step)[:, None].half()


def _code(rows: Tensor, steps: Tensor, limit: int, most_counted: int) -> dict[str, Any]:
    """What the tensor table would say of these integers after packing."""
    share = max(1, rows.numel() // most_counted)
    codes = round_to_nearest(rows[::share], steps[::share], limit).flatten().long()
    counts = torch.bincount(codes + limit).cpu().numpy()
    low = int(np.flatnonzero(counts)[0])
    freqs = normalize_counts(counts[low:])
    used = freqs > 0
    bits = counts[low:][used] @ (PROB_BITS - np.log2(freqs[used]))
    stream_bytes = round(bits / 8 * rows.numel() / len(codes))
    num_bytes = stream_bytes + CODER_BYTES * choose_num_coders(rows.numel())
    return {"low": low - limit, "freqs": freqs.tolist(), "bytes": num_bytes}


def _half_bytes(halves: Sequence[Tensor]) -> int:
    """Bytes of all fp16 numbers, squeezed as the packer squeezes them."""
    if not halves:
        return 0
    numbers = torch.cat(list(halves))
    share = max(1, len(numbers) // MOST_HALVES)
    sample = torch.cat(numbers.split(PIECE_HALVES)[::share]).cpu().numpy()
    return round(len(squeeze(shuffle(sample))) * len(numbers) / len(sample))
