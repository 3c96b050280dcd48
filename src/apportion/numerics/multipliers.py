"""Multipliers: the prices of constraints, raised while these are violated and let down once they hold.

No torch; the state is a plain dict, so a run resumes where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Multipliers:
    r"""Projected ascent on residuals, one multiplier for each (eq. D1; the paper's eq. 17 and 25).

    .. math:: \lambda_{t+1} = \Pi_{[0, \bar\lambda]}\big(\lambda_t + \eta\,(k_i r_t + k_p (r_t - r_{t-1}))\big)

    ``rate`` is :math:`\eta`, ``limit`` the clamp :math:`\bar\lambda`, ``pi`` the gains :math:`(k_p, k_i)`; the default
    ``(0, 1)`` is plain ascent. A multiplier whose residual was negative at each of its last ``window`` updates is
    multiplied by ``damping`` and its window starts again; a damping of 0 resets it, a window of 0 never does.

    Example:
        >>> prices = Multipliers((2,), rate=0.5, limit=10.0)
        >>> prices.update([1.0, -1.0]).tolist()
        [0.5, 0.0]
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        rate: float,
        limit: float,
        *,
        window: int = 0,
        damping: float = 0.5,
        pi: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        if not (0.0 < rate < math.inf and limit > 0.0 and window >= 0 and 0.0 <= damping < 1.0 and min(pi) >= 0.0):
            raise ValueError(
                f"multipliers take rate > 0, limit > 0, window >= 0, damping in [0, 1) and gains >= 0, got rate "
                f"{rate}, limit {limit}, window {window}, damping {damping}, gains {pi}"
            )
        self.rate, self.limit, self.window, self.damping, self.pi = rate, limit, window, damping, pi
        self.values: Array = np.zeros(shape)
        self._last: Array = np.full(shape, np.nan)  # residual of the update before, none yet
        self._quiet: NDArray[np.int64] = np.zeros(shape, dtype=np.int64)  # updates in a row with slack

    def update(self, residuals: Any, where: Any = True) -> Array:
        """The multipliers after one more look at the residuals: an array, a tensor or numbers, broadcast to the shape.

        Entries that are false in ``where`` were not looked at: their multipliers, windows and last residuals stay.
        """
        shape = self.values.shape
        given = np.asarray(residuals.tolist() if hasattr(residuals, "tolist") else residuals, dtype=np.float64)
        residual = np.broadcast_to(given, shape)
        seen = np.broadcast_to(np.asarray(where, dtype=bool), shape)
        if not np.isfinite(residual[seen]).all():
            raise ValueError("a residual is not finite; multipliers stay as they were")
        proportional, integral = self.pi
        change = np.where(np.isnan(self._last), 0.0, residual - self._last)
        step = self.rate * (integral * residual + proportional * change)
        raised = np.clip(self.values + step, 0.0, self.limit)
        quiet = np.where(residual < 0.0, self._quiet + 1, 0)
        if self.window:
            settled = quiet >= self.window
            raised, quiet = np.where(settled, self.damping * raised, raised), np.where(settled, 0, quiet)
        self.values = np.where(seen, raised, self.values)
        self._last = np.where(seen, residual, self._last)
        self._quiet = np.where(seen, quiet, self._quiet)
        return self.values.copy()

    def state(self) -> dict[str, Any]:
        """What :meth:`load` needs, in plain lists; an entry never looked at has no last residual."""
        last = [None if math.isnan(value) else value for value in self._last.ravel().tolist()]
        return {
            "shape": list(self.values.shape),
            "values": self.values.ravel().tolist(),
            "last": last,
            "quiet": self._quiet.ravel().tolist(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved state of the same shape."""
        shape = self.values.shape
        if tuple(state["shape"]) != shape:
            raise ValueError(f"saved multipliers have shape {tuple(state['shape'])}, these have {shape}")
        self.values = np.array(state["values"], dtype=np.float64).reshape(shape)
        self._last = np.array(state["last"], dtype=np.float64).reshape(shape)
        self._quiet = np.array(state["quiet"], dtype=np.int64).reshape(shape)
