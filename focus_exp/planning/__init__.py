"""What a run needs before it runs: memory, arithmetic, GPUs."""
