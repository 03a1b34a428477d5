"""What every stage uses: runtime, ranks, run folder, tensor files, progress, versions."""
