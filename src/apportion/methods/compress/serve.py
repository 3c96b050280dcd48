"""Serving a ladder: all rungs held open in one process, and the best one that the budget of the moment allows."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from apportion.core.budget import Budget, Limit
from apportion.device.runtimes import graph_name, missing_packages, runtime_of
from apportion.device.target import ISA_VARIABLE, find_target
from apportion.errors import ApportionError, InfeasibleError
from apportion.methods.compress.ladder import Ladder, Step
from apportion.methods.compress.rundir import RunDir
from apportion.methods.compress.verify import certified_artefact
from apportion.models.load import load
from apportion.models.network import forward
from apportion.models.safefile import folder_digest

Signal = Callable[[], Budget | str | float | None]
Served = Callable[[Mapping[str, Any]], Any]


class ServedLadder:
    """A ladder held open that answers with the best rung the budget of the moment allows.

    Where even the smallest rung is over the budget, it answers with that one and ``within_budget`` is False.
    """

    def __init__(self, ladder: Ladder, models: Mapping[int, Served], signal: Signal | None = None) -> None:
        self.ladder, self.signal = ladder, signal
        self._models = dict(models)
        self._lock = threading.Lock()
        self._last: tuple[Budget | str | float | None, tuple[int, bool]] | None = None
        self.rung, self.within_budget = max(ladder.steps, key=lambda step: (step.quality, -step.rung)).rung, True
        self.num_switches = 0

    def retarget(self, budget: Budget | str | float | None) -> int:
        """Follows a new budget: a text such as ``6ms`` or ``80%``, milliseconds, or None for no limit."""
        with self._lock:
            if self._last is None or self._last[0] != budget:
                self._last = budget, self._choose(budget)
            rung, within = self._last[1]
            self.num_switches += rung != self.rung
            self.rung, self.within_budget = rung, within
            return rung

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        """The active rung's output for named inputs, after asking the signal where there is one.

        On ONNX Runtime and OpenVINO inputs have the shapes of the run, and outputs are a list of arrays; on torch the
        output is that of the module.
        """
        rung = self.rung if self.signal is None else self.retarget(self.signal())
        return self._models[rung](inputs)

    def _choose(self, budget: Budget | str | float | None) -> tuple[int, bool]:
        if budget is None:
            return max(self.ladder.steps, key=lambda step: (step.quality, -step.rung)).rung, True
        try:
            if isinstance(budget, Budget):
                wanted = budget
            elif isinstance(budget, str):
                wanted = Budget.parse(budget)
            elif budget > 0:
                wanted = Budget((Limit(quantity="latency", value=float(budget), unit="ms"),))
            else:  # no time at all, as a signal may say
                return self.ladder.steps[-1].rung, False
            return self.ladder.choose(wanted).rung, True
        except InfeasibleError:
            return self.ladder.steps[-1].rung, False


def serve_ladder(run: Path | str, *, signal: Signal | None = None, factory: str | None = None) -> ServedLadder:
    """Opens all rungs of a run in this process, to switch between them at run time.

    Served is what was certified: on ONNX Runtime and OpenVINO the very files, opened as they were measured; on eager
    torch the module, for which torch is set to the target's number of threads.

    Args:
        signal: asked before every call for the budget of the moment (a thermal or load reading turned into
            milliseconds, say); without it, call ``retarget``.
        factory: the factory of the original, where it came from one.

    Raises:
        ApportionError: the files are not the certified ones, this process is not under the instruction-set cap they
            were measured under, or the target is none of these.

    Example:
        serve = serve_ladder("runs/minilm", signal=lambda: 4.0 if too_hot() else None)
        output = serve({"input_ids": ids, "attention_mask": mask})
    """
    ladder = Ladder.load(Path(run))
    return ServedLadder(ladder, {step.rung: _open(ladder.rundir, step, factory) for step in ladder.steps}, signal)


def _open(rundir: RunDir, step: Step, factory: str | None) -> Served:
    rung, certificate = rundir.rung(step.rung), step.certificate
    target = find_target(certificate.target).with_isa(certificate.conditions.get("isa"))
    if target.runtime not in ("torch", "ort", "openvino") or target.device != "cpu":
        raise ApportionError(f"rungs on {target.name} can't be served; possible are torch, ort and openvino on the CPU")
    if folder_digest(rung.model) != certificate.artefact:
        raise ApportionError(f"{rung.model} is not the model that was certified; fit it again")
    if os.environ.get(ISA_VARIABLE) != target.isa:
        wanted = f"with {ISA_VARIABLE}={target.isa}" if target.isa else f"without {ISA_VARIABLE}"
        raise ApportionError(f"{target.name} was measured {wanted}; start this process that way")
    artefact = certified_artefact(rung, certificate)
    if artefact is None:
        return _module(load(str(rung.model), factory=factory).module, target.threads)
    absent = missing_packages(target)
    if absent:
        raise ApportionError(f"{target.name} needs {', '.join(absent)}, not installed here; install it to serve")
    run_once, lock = runtime_of(target).open(artefact, target), threading.Lock()

    def answer(inputs: Mapping[str, Any]) -> Any:
        with lock:  # a runtime's request holds one call at a time
            return run_once({graph_name(name): np.asarray(value) for name, value in inputs.items()})

    return answer


def _module(module: nn.Module, threads: int) -> Served:
    torch.set_num_threads(threads)

    def answer(inputs: Mapping[str, Any]) -> Any:
        with torch.inference_mode():
            return forward(module, inputs)

    return answer
