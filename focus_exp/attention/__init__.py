"""Learned sparse attention on tensors alone; knows nothing of Hugging Face, Hydra or Lightning."""
