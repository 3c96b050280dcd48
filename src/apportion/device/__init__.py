"""Targets, and measurements on them in child processes."""
