"""Compress: shrink a model to a measured budget, losing least."""
