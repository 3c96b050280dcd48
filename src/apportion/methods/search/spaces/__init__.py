"""The search spaces that come with apportion, by name; each is one file."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apportion.methods.search.space import Space

SPACES = {
    "mobile-cnn": ("apportion.methods.search.spaces.mobile_cnn", "MobileCnn"),
    "small-encoder": ("apportion.methods.search.spaces.small_encoder", "SmallEncoder"),
    "nasbench201": ("apportion.methods.search.spaces.nasbench201", "Nasbench201"),
}


def find_space(name: str) -> Space:
    """The space of a name, with its defaults.

    Raises:
        SpaceError: there is none.
    """
    from apportion.methods.search.space import SpaceError

    if name not in SPACES:
        raise SpaceError(f"unknown space {name!r}; possible are {', '.join(SPACES)}")
    module, attribute = SPACES[name]
    space: Space = getattr(importlib.import_module(module), attribute)()
    return space
