"""Name a model, a device and a budget; get a model that measurably meets it, and the price of every part.

Names that need torch are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from apportion.core.budget import Budget, Limit
from apportion.core.certificate import Certificate
from apportion.core.knob import Choice, Knob, Setting
from apportion.core.ledger import Ledger, Row
from apportion.core.loop import Outcome, Result, budgeted_loop
from apportion.core.meter import Meter, Reading
from apportion.core.policy import Greedy, Policy, Scheduled
from apportion.core.rule import Rule
from apportion.errors import ApportionError

if TYPE_CHECKING:
    from apportion import models as models
    from apportion.methods.compose.compose import ComposeConfig as ComposeConfig
    from apportion.methods.compose.compose import compose as compose
    from apportion.methods.compress.fit import fit as fit
    from apportion.methods.compress.ladder import retarget as retarget
    from apportion.methods.compress.rundir import FitConfig as FitConfig
    from apportion.methods.compress.serve import serve_ladder as serve_ladder
    from apportion.methods.compress.verify import verify as verify

_LAZY = {
    "ComposeConfig": ("apportion.methods.compose.compose", "ComposeConfig"),
    "compose": ("apportion.methods.compose.compose", "compose"),
    "FitConfig": ("apportion.methods.compress.rundir", "FitConfig"),
    "fit": ("apportion.methods.compress.fit", "fit"),
    "models": ("apportion.models", None),
    "retarget": ("apportion.methods.compress.ladder", "retarget"),
    "serve_ladder": ("apportion.methods.compress.serve", "serve_ladder"),
    "verify": ("apportion.methods.compress.verify", "verify"),
}

__all__ = [
    "ApportionError",
    "Budget",
    "Certificate",
    "Choice",
    "ComposeConfig",
    "FitConfig",
    "Greedy",
    "Knob",
    "Ledger",
    "Limit",
    "Meter",
    "Outcome",
    "Policy",
    "Reading",
    "Result",
    "Row",
    "Rule",
    "Scheduled",
    "Setting",
    "budgeted_loop",
    "compose",
    "fit",
    "models",
    "retarget",
    "serve_ladder",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'apportion' has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    module = importlib.import_module(module_name)
    return module if attribute is None else getattr(module, attribute)
