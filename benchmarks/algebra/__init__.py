"""Fewer passes by algebra: candidates that rewrite a network in plain torch, without kernels."""
