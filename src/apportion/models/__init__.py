"""Loading, partitioning, masking, slicing and saving of real models."""

from apportion.models.cut import mask, slice_network
from apportion.models.load import load
from apportion.models.network import Network
from apportion.models.partition import Member, Module, Partition
from apportion.models.save import save

__all__ = ["Member", "Module", "Network", "Partition", "load", "mask", "save", "slice_network"]
