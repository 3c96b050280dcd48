"""Adapt: few-shot adaptation that fits whatever budget the request brings."""
