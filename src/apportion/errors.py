"""The errors a user can meet; each says what was given, what is possible and what to do next."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of every command."""

    MET = 0
    BAD_INPUT = 2
    INFEASIBLE = 3
    NOT_MET = 4
    INTERRUPTED = 130


class ApportionError(Exception):
    """Base of all errors raised on purpose; the command line prints its one line and exits with ``exit_code``."""

    exit_code = Exit.BAD_INPUT


class BudgetError(ApportionError, ValueError):
    """A budget that can't be read or makes no sense."""


class InfeasibleError(BudgetError):
    """A budget below what was measured for the cheapest setting."""

    exit_code = Exit.INFEASIBLE


class KnobError(ApportionError, ValueError):
    """A knob, setting or value outside its domain."""


class LedgerError(ApportionError, ValueError):
    """A ledger that can't be read, or a row that does not fit it."""


class ModelError(ApportionError, ValueError):
    """A model that can't be found, read or trusted."""


class TraceError(ModelError):
    """A model whose structure can't be traced; names the offending part."""


class TargetError(ApportionError, ValueError):
    """A target that does not exist or does not work here."""


class MeasureError(ApportionError, RuntimeError):
    """A measurement that could not be made; the candidate died, hung or ran out of memory."""


class LostError(MeasureError):
    """A model that was made for a budget and can't be measured, where the original can: the budget is not met."""

    exit_code = Exit.NOT_MET


class DataError(ApportionError, ValueError):
    """Data that can't be found or read."""
