"""Everything that touches torch's compilers and CUDA graphs; nothing else in the package does."""
