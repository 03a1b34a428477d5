"""`python -m underpar` and `torchrun -m underpar`: the same command line."""

from underpar.cli import main

main()
