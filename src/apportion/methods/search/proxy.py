"""Proxy evaluations: noisy readings of utility, asked for in batches, recorded in the ledger, replayed on resuming."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Protocol, TypeAlias

from apportion.core.knob import Setting
from apportion.core.ledger import Kind, Ledger, Row
from apportion.core.meter import Reading
from apportion.errors import ApportionError, LedgerError

FULL = "utility"
Values: TypeAlias = float | Mapping[str, float]
"""The utility of an evaluation, or several by name, of which the search maximises the one called ``utility``."""


@dataclass(frozen=True)
class Request:
    """One evaluation: the architecture, how thoroughly, and which of its independent repetitions."""

    arch: Setting
    fidelity: str
    replicate: int


class Proxy(Protocol):
    """Evaluates architectures; the same request always gives the same values, whichever process it runs in."""

    def evaluate(self, request: Request) -> Values: ...


class Executor(Protocol):
    """Runs evaluations, anywhere, and returns the values in the order asked; a cluster engine implements this."""

    def map(self, proxy: Proxy, requests: Sequence[Request]) -> list[Values]: ...


class Here:
    """In this process, one after the other."""

    def map(self, proxy: Proxy, requests: Sequence[Request]) -> list[Values]:
        return [proxy.evaluate(request) for request in requests]


class Processes:
    """Over processes of this machine, kept until closed; results are those of :class:`Here`."""

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise ApportionError(f"{workers} workers asked for; give at least 1")
        self.workers = workers
        self._pool: ProcessPoolExecutor | None = None
        self._proxy: Proxy | None = None

    def map(self, proxy: Proxy, requests: Sequence[Request]) -> list[Values]:
        if self._pool is None or proxy is not self._proxy:
            self.close()
            self._pool = ProcessPoolExecutor(
                self.workers, mp_context=get_context("spawn"), initializer=_keep, initargs=(proxy,)
            )
            self._proxy = proxy
        return list(self._pool.map(_evaluate, requests))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None


_kept: Proxy | None = None


def _keep(proxy: Proxy) -> None:
    global _kept
    _kept = proxy


def _evaluate(request: Request) -> Values:
    assert _kept is not None
    return _kept.evaluate(request)


class Journal:
    """The ledger of a search. A search is a function of what its ledger holds: started again it asks the same
    questions in the same order, and those that were answered are answered from the rows."""

    def __init__(self, ledger: Ledger | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.ledger = ledger if ledger is not None else Ledger()
        self.step = 0
        self._clock = clock
        self._last = clock()

    @property
    def replaying(self) -> bool:
        return self.step < len(self.ledger)

    def recorded(self, kind: Kind, setting: Setting, name: str | None = None) -> Row | None:
        """The next row where there is one; it must be the answer to this very question."""
        if not self.replaying:
            return None
        row = self.ledger[self.step]
        if row.kind != kind or row.setting != setting or (name is not None and name not in row.readings):
            raise LedgerError(
                f"row {self.step} of the ledger is a {row.kind} of another architecture than this search asks for; "
                "it was written by another version or with other settings: choose another -o folder"
            )
        self.step += 1
        return row

    def record(
        self,
        kind: Kind,
        setting: Setting,
        readings: Mapping[str, Reading],
        *,
        excess: float = 0.0,
        accepted: bool = False,
        knob: str | None = None,
        note: str = "",
    ) -> Row:
        """Appends a row; when this returns it survives a kill."""
        now = self._clock()
        row = Row(
            step=self.step,
            kind=kind,
            setting=setting,
            readings=dict(readings),
            cost=excess,
            accepted=accepted,
            knob=knob,
            value=None if knob is None else setting[knob],
            note=note,
            seconds=max(0.0, now - self._last),
        )
        self._last = now
        self.ledger.append(row)
        self.step += 1
        return row

    def note(self, kind: Kind, setting: Setting, readings: Mapping[str, Reading], told: Any, **fields: Any) -> None:
        """Records a decision that follows from earlier rows, unless it stands there already."""
        if self.recorded(kind, setting) is None:
            self.record(kind, setting, readings, note=json.dumps(told, default=str), **fields)


class Sampler:
    """Draws proxy evaluations within a budget: counts them, numbers repetitions, records every one."""

    def __init__(
        self,
        proxy: Proxy,
        journal: Journal,
        executor: Executor | None = None,
        *,
        max_evaluations: float | None = None,
        prices: Mapping[str, float] | None = None,
        unit: str = "points",
        on_spend: Callable[[float], None] | None = None,
    ) -> None:
        self.proxy, self.journal, self.executor = proxy, journal, executor or Here()
        self.max_evaluations, self.prices, self.unit = max_evaluations, prices or {}, unit
        self.spent = 0.0
        self.num_evaluations = 0
        self._on_spend = on_spend or (lambda share: None)
        self._next: Counter[tuple[Setting, str]] = Counter()
        self._values: dict[Request, dict[str, float]] = {}

    @property
    def left(self) -> float:
        return float("inf") if self.max_evaluations is None else self.max_evaluations - self.spent

    def rewind(self) -> None:
        """Starts the repetitions over: what was evaluated before is drawn again, free of charge."""
        self._next.clear()

    def draw(self, archs: Sequence[Setting], fidelity: str = FULL) -> list[float] | None:
        """The utility of one more evaluation of each architecture; None when the budget does not hold all of them."""
        drawn = self.draw_all(archs, fidelity)
        return None if drawn is None else [values[fidelity] for values in drawn]

    def draw_all(self, archs: Sequence[Setting], fidelity: str = FULL) -> list[dict[str, float]] | None:
        """The same with every utility that an evaluation gives, by name."""
        requests = [Request(arch, fidelity, self._next[arch, fidelity]) for arch in archs]
        new = [request for request in requests if request not in self._values]
        price = self.prices.get(fidelity, 1.0)
        if price * len(new) > self.left + 1e-9:
            return None
        if new:
            self._evaluate(new, fidelity)
            self.spent += price * len(new)
            self.num_evaluations += len(new)
            if self.max_evaluations:
                self._on_spend(self.spent / self.max_evaluations)
        self._next.update((arch, fidelity) for arch in archs)
        return [self._values[request] for request in requests]

    def _evaluate(self, requests: Sequence[Request], fidelity: str) -> None:
        """Evaluates what the ledger does not hold yet, and records it."""
        done = 0
        for request in requests:
            row = self.journal.recorded("trial", request.arch, fidelity)
            if row is None:
                break
            self._values[request] = {name: reading.value for name, reading in row.readings.items()}
            done += 1
        rest = requests[done:]
        for request, value in zip(rest, self.executor.map(self.proxy, rest) if rest else (), strict=True):
            values = dict(value) if isinstance(value, Mapping) else {fidelity: value}
            readings = {name: Reading(value=float(one), unit=self.unit) for name, one in values.items()}
            self.journal.record("trial", request.arch, readings, knob=next(iter(request.arch)))
            self._values[request] = {name: reading.value for name, reading in readings.items()}
