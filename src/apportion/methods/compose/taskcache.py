"""A cache of chosen weights, keyed by support set, sources and settings: a task seen before costs nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from apportion.methods.compose.compat import fingerprint
from apportion.methods.compose.source import Source
from apportion.tasks.cache import Arrays, cached
from apportion.tasks.domain import Domain

VERSION = 2  # raised when the search changes, so that old weights are not used


def task_key(domain: Domain, sources: Sequence[Source], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a choice depends on. The order of the examples does not matter; that of the sources does."""
    rows = []
    for content, label in zip(domain.content, domain.label_N, strict=True):
        raw = content.encode() if isinstance(content, str) else np.ascontiguousarray(content).tobytes()
        rows.append(hashlib.sha256(raw + b"\0" + domain.classes[int(label)].encode()).hexdigest())
    support = hashlib.sha256("".join(sorted(rows)).encode()).hexdigest()
    marks = [fingerprint(source) for source in sources]
    return {"version": VERSION, "support": support, "sources": marks, "settings": json.dumps(settings, sort_keys=True)}


def cached_choice(key: Mapping[str, Any], make: Callable[[], Arrays]) -> Arrays:
    """The arrays of a choice (weights, edits), from disk where the same task was solved before."""
    return cached("compose", key, make)
