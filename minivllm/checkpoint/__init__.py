"""Checkpoints: where a model comes from, and how its weights are read."""
