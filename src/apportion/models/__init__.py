"""Loading, partitioning, masking, slicing and saving of real models; torch is loaded when a name first needs it."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from apportion.models.cut import mask as mask
    from apportion.models.cut import slice_network as slice_network
    from apportion.models.load import load as load
    from apportion.models.network import Network as Network
    from apportion.models.partition import Member as Member
    from apportion.models.partition import Module as Module
    from apportion.models.partition import Partition as Partition
    from apportion.models.save import save as save

__all__ = ["Member", "Module", "Network", "Partition", "load", "mask", "save", "slice_network"]


def _lazy(file: str, name: str) -> property:
    def find(package: ModuleType) -> Any:
        return getattr(import_module(f"{__name__}.{file}"), name)

    def keep(package: ModuleType, submodule: ModuleType) -> None:
        """Importing the file ``load.py`` must not hide the function ``load``."""

    return property(find, keep)


class _Package(ModuleType):
    Member = _lazy("partition", "Member")
    Module = _lazy("partition", "Module")
    Network = _lazy("network", "Network")
    Partition = _lazy("partition", "Partition")
    load = _lazy("load", "load")
    mask = _lazy("cut", "mask")
    save = _lazy("save", "save")
    slice_network = _lazy("cut", "slice_network")


sys.modules[__name__].__class__ = _Package
