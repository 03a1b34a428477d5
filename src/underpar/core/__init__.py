"""What every stage stands on: the machine, ranks, tensor files, the run folder."""
