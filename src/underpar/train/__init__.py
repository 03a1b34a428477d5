"""Training: budget in, weights out, restartable at any moment."""
