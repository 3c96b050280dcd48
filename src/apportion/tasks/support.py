"""Support sets: the few labelled examples that a user gives of a task."""

from __future__ import annotations

from apportion.errors import DataError
from apportion.tasks.domain import Domain
from apportion.tasks.domains import load_domain

MAX_EXAMPLES = 2000


def read_support(ref: str) -> Domain:
    """Labelled examples of at least two classes: a file, a folder or a domain.

    Raises:
        DataError: no examples, one class, or far too many for a support set.
    """
    domain = load_domain(ref)
    if len(domain.classes) < 2:
        raise DataError(f"{ref} holds one class, {domain.classes[0]!r}; a task needs examples of at least two")
    if len(domain) > MAX_EXAMPLES:
        raise DataError(f"{ref} holds {len(domain)} examples; a support set has at most {MAX_EXAMPLES}: give a sample")
    return domain
