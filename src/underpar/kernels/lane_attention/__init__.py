"""Attention of chunks over what their lanes have kept."""

from underpar.kernels.lane_attention.op import Place, attend_lanes

__all__ = ["Place", "attend_lanes"]
