"""Results of runs: measurements, per-window losses, run directories, provenance and statistics."""
