"""Importance of every unit of a partition: by its weights, its activation, or what the loss would do without it."""

from __future__ import annotations

from apportion.methods.compress.importance.activation import activation
from apportion.methods.compress.importance.curvature import hessian
from apportion.methods.compress.importance.loss import self_loss
from apportion.methods.compress.importance.magnitude import magnitude
from apportion.methods.compress.importance.order import (
    CRITERIA,
    Criterion,
    global_sizes,
    importance,
    order_by_importance,
    ordered_by,
)
from apportion.methods.compress.importance.slope import fisher, taylor

__all__ = [
    "CRITERIA",
    "Criterion",
    "activation",
    "fisher",
    "global_sizes",
    "hessian",
    "importance",
    "magnitude",
    "order_by_importance",
    "ordered_by",
    "self_loss",
    "taylor",
]
