"""Specialise: from a trained run, a few labelled examples and a budget to a small model that measurably keeps it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from scipy.special import stdtrit
from torch import Tensor
from torch.nn import functional

from apportion.core.budget import Budget
from apportion.core.certificate import Certificate
from apportion.core.folder import write_whole
from apportion.core.meter import Reading
from apportion.core.progress import Progress, Silent
from apportion.cost.parts import Parts
from apportion.cost.profile import Profile
from apportion.device.measure import Session
from apportion.device.measure import Shape as InputShape
from apportion.device.probe import int8_twin
from apportion.device.target import machine
from apportion.errors import ApportionError, BudgetError, InfeasibleError
from apportion.methods.adapt.adapt import Learned, read_learned
from apportion.methods.adapt.clock import Clock
from apportion.methods.adapt.folder import AdaptFolder, SpecialFolder, float_target
from apportion.methods.adapt.make import CONFIDENCE, Made, Wish, as_run, make
from apportion.methods.adapt.pair import MADE, WHOLE, measure_pair
from apportion.models.load import load
from apportion.models.network import read_out
from apportion.models.safefile import folder_digest
from apportion.models.save import save as save_network
from apportion.numerics.stats import normal_quantile
from apportion.tasks.support import read_support

MAX_CHECKS = 4


def specialise(
    run: Path,
    support: str,
    budget: str,
    out: Path,
    *,
    target: str | None = None,
    profile: Path | None = None,
    verify: bool = True,
    head: str = "cosine",
    refine: bool = False,
    depths: bool = False,
    risk: float = 0.0,
    averse: float = 0.0,
    steps: int | None = None,
    confidence: float = CONFIDENCE,
    precision: str = "auto",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Makes a model for the task of a support set, within a budget on a target, and writes it with its certificate.

    Args:
        support: labelled examples, as a file, a folder or a domain.
        budget: one limit on latency, such as ``6ms`` or ``30%``.
        target: one that was trained for; another with ``profile``, a file that calibrate wrote for it.
        verify: measure in fresh processes, and step down while the budget is not surely kept; under the bound of the
            smallest network, measure that.
        head: what classifies features: class means by ``cosine`` or distance (``prototype``), or ``linear``, fitted.
        refine: one step on the mixture by the examples' losses, for as many forward passes as experts and two.
        depths: let the examples choose a depth next to the one that training settled, for up to three forward passes;
            it pays where the run was trained for it (``near``).
        risk: weight of the variance of the examples' losses in that step; above zero it is taken.
        averse: weight of the loss's spread over mixtures that the examples leave possible; above zero the mixture, the
            even one and their middle are compared by it.
        steps: of the solver, on the mixture by the examples' losses and on sizes by their worth, each kept only if it
            is no worse; without it sizes are priced anew on devices that were not trained for alone.
        confidence: with which the budget is to be kept, by the cost model's bound and by the measurement. Above what
            the bound was calibrated for only the measurement speaks for it.
        precision: ``fp32``, ``int8``, or ``auto``: int8 where the run has priced it on this target and the budget is
            under the whole network in float, since more of the network then fits.

    Raises:
        InfeasibleError: the budget is under the floor, measured, or without ``verify`` the bound of it.
    """
    wish = Wish(
        head=head,
        refine=refine,
        depths=depths,
        risk=risk,
        averse=averse,
        steps=steps,
        confidence=confidence,
        precision=precision,
    )
    progress = progress or Silent()
    folder = SpecialFolder(out)
    domain = read_support(support)
    with progress.stage("load the run"):
        learned = read_learned(run)
        clock = find_clock(learned, target, profile)
        clock = _as_sure(clock, confidence, verify)
    asked = Budget.parse(budget)
    limit = asked.resolve(dict.fromkeys(asked.keys, clock.profile.baseline)).limits
    if len(limit) != 1 or limit[0].quantity != "latency" or limit[0].target not in (None, clock.name):
        raise BudgetError(f"budget {budget!r} is not one latency on {clock.name}; write it like 6ms or 30%")
    limit_ms = limit[0].value
    in_int8 = int8_clock(learned, clock, run, precision, limit_ms)
    ticking = clock if in_int8 is None else _as_sure(in_int8, confidence, verify)  # what sizes are chosen by
    asking = {"run": str(run), "support": support, "budget": budget, "target": clock.name}
    folder.start({**asking, **asdict(wish)})
    folder.clear()  # what an earlier start left is about another model
    session: Session | None = None
    made: Made | None = None
    aimed_ms, least = limit_ms, verify and limit_ms < ticking.floor_ms()
    for _ in range(MAX_CHECKS):
        before = made
        with progress.stage("adapt to the support set"):
            made = make(learned, ticking, domain, aimed_ms, wish, least=least, int8=in_int8 is not None)
        save_network(made.network, folder.model)
        if not verify:
            break
        with progress.stage("measure in fresh processes"):
            now = _measured(learned, folder, clock.name, clock.profile.shape)
        again = session is not None and before is not None and before.sizes == made.sizes
        session = session.plus(now, later=True) if again and session is not None else now
        surely_ms = measured_latency(session, asked, clock.whole_ms).upper(z_of(confidence, session))
        if surely_ms <= limit_ms:
            break
        if least:
            shutil.rmtree(folder.model)
            raise InfeasibleError(
                f"budget {limit_ms:.3g} ms is under the measured floor of {surely_ms:.3g} ms on {clock.name} (the "
                f"smallest network, at {confidence:.0%} confidence); raise the budget"
            )
        aimed_ms *= 0.98 * limit_ms / surely_ms
        least = aimed_ms < ticking.floor_ms()
    assert made is not None
    _write_head(folder, made)
    result: dict[str, Any] = {
        "budget": budget,
        "limits": {"latency": limit_ms},
        "target": clock.name,
        "classes": list(domain.classes),
        "examples": len(domain),
        "head": head,
        "precision": made.network.precision,
        "sizes": made.sizes,
        "mixture": made.alpha,
        "mixture_std": [round(float(std), 4) for std in made.posterior.std_M],
        "mixture_precision": made.posterior.precision,
        "confidence": confidence,
        "bound_confidence": ticking.confidence,
        "predicted_ms": made.predicted_ms,
        "upper_ms": made.upper_ms,
        "support_accuracy": made.accuracy,
        "adaptation": made.seconds,
        "whole_ms": clock.whole_ms,
        "met": made.upper_ms <= limit_ms,
        "run": str(out),
    }
    if session is not None:
        certificate = _certify(asked, clock, session, folder, made, confidence)
        folder.write("certificate.json", certificate.to_json())
        measured = next(iter(certificate.measured.values()))
        result |= {"measured_ms": measured.value, "utilisation": measured.value / limit_ms, "met": certificate.met}
    folder.write("result.json", result)
    return result


def find_clock(learned: Learned, target: str | None, profile: Path | None) -> Clock:
    """The clock of a target that was trained for, or of one with a profile of its own."""
    family = learned.family
    known = ", ".join(family.clocks)
    if profile is not None:
        parts = Parts.of(family.network, family.partition)
        clock = Clock.of(Profile.load(profile), parts)
        float_target(clock.name)
        if target is not None and clock.name != target:
            raise ApportionError(f"the profile is of {clock.name}, not of {target}; leave one of them out")
        return clock
    if target is None and len(family.clocks) == 1:
        return next(iter(family.clocks.values()))
    if target is None or target not in family.clocks:
        given = "no target was named" if target is None else f"the run was not trained for {target}"
        raise ApportionError(f"{given}; it knows {known}; for another one give --profile FILE (apportion calibrate)")
    return family.clocks[target]


def int8_clock(learned: Learned, clock: Clock, run: Path, precision: str, limit_ms: float) -> Clock | None:
    """The clock of int8 slices on a target, where they are asked for, or pay and were priced; None for float ones.

    It tells the milliseconds of the float clock, where the run has measured both precisions side by side.
    """
    if precision == "fp32" or (precision == "auto" and clock.whole_ms <= limit_ms):
        return None
    twin = int8_twin(clock.profile.target)
    folder = AdaptFolder(run)
    path = None if twin is None else folder.profile(twin.name)
    if path is None or not path.is_file():
        if precision == "auto":
            return None
        reason = "has no int8 that pays" if twin is None else f"was not priced in int8 by {run}; adapt with --int8"
        raise ApportionError(f"{clock.name} {reason}; or ask for fp32")
    int8 = Clock.of(Profile.load(path), Parts.of(learned.family.network, learned.family.partition))
    share = folder.shares_in_int8().get(int8.name)
    return int8 if share is None else int8.beside(clock, share)


def _as_sure(clock: Clock, confidence: float, verify: bool) -> Clock:
    """With a bound for the confidence asked for, or where a measurement follows for as much of it as there is."""
    return clock.at(min(confidence, clock.confidence) if verify else confidence)


def _write_head(folder: SpecialFolder, made: Made) -> None:
    tensors = {"weight_FW": made.weight_FW.contiguous(), "bias_W": made.bias_W.contiguous()}
    write_whole(folder.head, save(tensors))
    folder.write("classes.json", {"classes": list(made.classes)})


def _measured(learned: Learned, folder: SpecialFolder, target: str, shape: InputShape) -> Session:
    int8 = load(str(folder.model)).precision == "int8"
    return measure_pair(learned.config.model, folder.model, target, shape, int8=int8)


def measured_latency(session: Session, asked: Budget, whole_ms: float) -> Reading:
    """What a budget is judged by: milliseconds as they are, shares as a share of what the whole took when calibrated.

    A slower hour on the machine slows both and is no matter to a share; to milliseconds it is.
    """
    if not asked.relative:
        return session.latency(MADE)
    ratio = session.ratio(MADE, WHOLE)
    return Reading(value=ratio.value * whole_ms, unit="ms", stderr=ratio.stderr * whole_ms, count=ratio.count)


def z_of(confidence: float, session: Session) -> float:
    r"""Standard errors that a budget must stand above a measurement to be kept with a confidence (eq. A20).

    .. math:: z = z_{0.95} \, t_{c, n - 1} / t_{0.95, n - 1}

    Standard errors of few processes are widened so that normal quantiles apply at 95 % (eq. S3); this takes them to
    another confidence :math:`c`, :math:`n` processes.
    """
    degrees = max(1, min(len(timings) for timings in session.timings.values()) - 1)
    return normal_quantile(CONFIDENCE) * float(stdtrit(degrees, confidence) / stdtrit(degrees, CONFIDENCE))


def _certify(
    asked: Budget, clock: Clock, session: Session, folder: SpecialFolder, made: Made, confidence: float
) -> Certificate:
    measured = measured_latency(session, asked, clock.whole_ms)
    resolved = asked.resolve(dict.fromkeys(asked.keys, clock.profile.baseline))
    conditions = dict(session.conditions)
    measured_at = conditions.pop("measured_at")
    accuracy = Reading(value=made.accuracy, unit="ratio", count=made.num_examples)
    return Certificate(
        asked=str(asked),
        budget=resolved,
        baseline={limit.key: clock.profile.baseline for limit in resolved.limits},
        measured={limit.key: measured for limit in resolved.limits},
        quality={"support": accuracy},
        artefact=folder_digest(folder.model),
        target=clock.name,
        conditions={"machine": machine(), **conditions, "shape": vars(clock.profile.shape)},
        measured_at=measured_at,
        confidence=confidence,
        z=z_of(confidence, session),
    )


class Specialised:
    """A specialised model read back, ready to classify."""

    def __init__(self, path: Path) -> None:
        folder = SpecialFolder(path)
        self.classes = tuple(str(name) for name in folder.read("classes.json")["classes"])
        self.network = as_run(load(str(folder.model)))
        tensors = load_file(folder.head)
        self.weight_FW, self.bias_W = tensors["weight_FW"], tensors["bias_W"]
        if self.weight_FW.shape[-1] != len(self.classes) or len(self.bias_W) != len(self.classes):
            raise ApportionError(f"{path} has a head of {len(self.bias_W)} classes and names {len(self.classes)}")

    @torch.inference_mode()
    def probabilities(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Probability of every class for a batch of inputs, shape (N, W)."""
        feature_NF = functional.normalize(read_out(self.network, inputs).float(), dim=-1)
        return (feature_NF @ self.weight_FW + self.bias_W).softmax(-1)


def verify_specialised(path: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Measures a specialised model again, beside the whole network; ``met`` says whether it keeps its promise."""
    folder = SpecialFolder(path)
    certificate = folder.certificate()
    asked = folder.config()
    if not folder.model.is_dir() or folder_digest(folder.model) != certificate.artefact:
        raise ApportionError(f"{folder.model} is not the model that was certified; specialise again")
    learned = read_learned(Path(asked["run"]))
    with (progress or Silent()).stage("measure in fresh processes"):
        shape = InputShape(**certificate.conditions["shape"])
        session = _measured(learned, folder, certificate.target, shape)
    whole_ms = next(iter(certificate.baseline.values())).value
    measured = measured_latency(session, Budget.parse(certificate.asked), whole_ms)
    limits = {limit.key: limit.value for limit in certificate.budget.limits}
    return {
        "budget": certificate.asked,
        "limits": limits,
        "target": certificate.target,
        "baseline": {key: certificate.baseline[key].to_json() for key in limits},
        "final": {key: measured.to_json() for key in limits},
        "measured_ms": measured.value,
        "conditions": dict(session.conditions),
        "met": all(measured.value <= value for value in limits.values()),
        "run": str(path),
    }
