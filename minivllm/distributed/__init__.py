"""Processes that share a model: the group they form, and the workers of one host."""
