"""Saved rows and measurements as standalone pages."""
