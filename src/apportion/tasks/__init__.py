"""Data and quality meters."""
