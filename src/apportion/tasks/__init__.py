"""Domains, episodes, shifts, heads and quality meters."""
