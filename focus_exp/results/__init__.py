"""Results of runs: measurements, losses, run directories, provenance, statistics."""
