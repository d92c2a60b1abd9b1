"""Workloads, their results, and the naive loop with a real model."""
