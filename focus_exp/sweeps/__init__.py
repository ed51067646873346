"""Sweeps: jobs frozen before they start, launched here or by SLURM, and what has become of each."""
