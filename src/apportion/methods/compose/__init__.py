"""Composing one task model out of many checkpoints: sources, streaming merges, the oracle solver and the router."""
