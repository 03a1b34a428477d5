"""Attention of a chunk of tokens per lane over the keys that each lane has kept."""

from underpar.kernels.lane_attention.op import Place, attend_lanes

__all__ = ["Place", "attend_lanes"]
