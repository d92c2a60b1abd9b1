"""Workloads, and the naive loop that every engine is compared with."""
