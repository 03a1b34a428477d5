"""Hand-written kernels against the compiled network, one candidate per file."""
