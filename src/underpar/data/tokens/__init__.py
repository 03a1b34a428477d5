"""Text to tokens and back, and the bytes each token stands for."""
