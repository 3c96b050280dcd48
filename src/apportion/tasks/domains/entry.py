"""What is known of a built-in domain before it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from apportion.errors import ApportionError
from apportion.tasks.domain import Domain, Kind


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A built-in domain: its kind, what it is in a few words, its licence, and how to read it."""

    kind: Kind
    summary: str
    licence: str
    load: Callable[[], Domain]

    def missing(self) -> str | None:
        """Why the domain can't be read here, or None when it can."""
        try:
            self.load()
        except ApportionError as error:
            return str(error)
        return None
