"""Specialise: from a trained run, a few labelled examples and a budget to a small model that measurably keeps it."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional

from apportion.core.budget import Budget
from apportion.core.certificate import Certificate
from apportion.core.folder import write_whole
from apportion.core.meter import Reading
from apportion.core.progress import Progress, Silent
from apportion.cost.parts import Parts
from apportion.cost.profile import Profile
from apportion.device.measure import Candidate, Session, measure
from apportion.device.measure import Shape as InputShape
from apportion.device.probe import int8_twin, working_target
from apportion.device.target import machine
from apportion.errors import ApportionError, BudgetError, DataError
from apportion.methods.adapt.adapt import Learned, read_learned
from apportion.methods.adapt.clock import Clock
from apportion.methods.adapt.folder import AdaptFolder, SpecialFolder
from apportion.methods.adapt.pool import read_pool
from apportion.methods.adapt.solve import refine_mixture, solve
from apportion.models.load import load
from apportion.models.network import Network, read_out
from apportion.models.quantise import simulate
from apportion.models.safefile import folder_digest
from apportion.models.save import save as save_network
from apportion.numerics.stats import normal_quantile
from apportion.tasks.batches import Examples
from apportion.tasks.domain import Domain
from apportion.tasks.heads import Cosine, Head, Logistic, Prototype, class_means, cosines, left_out_means
from apportion.tasks.shaped import shaped
from apportion.tasks.support import read_support

MAX_CHECKS = 4
CONFIDENCE = 0.95
Z = normal_quantile(CONFIDENCE)
WHOLE, MADE = "whole", "made"
PRECISIONS = ("auto", "fp32", "int8")
HEADS: Mapping[str, Callable[[float], Head]] = {
    "cosine": lambda scale: Cosine(scale=scale),
    "prototype": lambda scale: Prototype(scale=scale),
    "linear": lambda scale: Logistic(),
}


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
    risk: float = 0.0,
    precision: str = "auto",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Makes a model for the task of a support set, within a budget on a target, and writes it with its certificate.

    Args:
        support: labelled examples, as a file, a folder or a domain.
        budget: one limit on latency, such as ``6ms`` or ``30%``.
        target: one that was trained for; another with ``profile``, a file that calibrate wrote for it.
        verify: measure in fresh processes, and step down while the budget is not kept at 95 % confidence.
        head: what classifies features: class means by ``cosine`` or distance (``prototype``), or ``linear``, fitted.
        refine: one step on the mixture by the examples' losses, for as many forward passes as experts and two.
        risk: weight of the variance of the examples' losses in that step; above zero it is taken.
        precision: ``fp32``, ``int8``, or ``auto``: int8 where the run has priced it on this target and the budget is
            under the whole network in float, since more of the network then fits.

    Raises:
        InfeasibleError: the budget is under the floor.
    """
    if precision not in PRECISIONS:
        raise DataError(f"precision {precision!r} is not known; possible are {', '.join(PRECISIONS)}")
    if not 0 <= risk < float("inf"):
        raise DataError(f"risk {risk:g} is not possible; give 0 or more")
    if head not in HEADS:
        raise DataError(f"head {head!r} is not known; possible are {', '.join(HEADS)}")
    progress = progress or Silent()
    folder = SpecialFolder(out)
    domain = read_support(support)
    with progress.stage("load the run"):
        learned = read_learned(run)
        clock = find_clock(learned, target, profile)
    asked = Budget.parse(budget)
    limit = asked.resolve(dict.fromkeys(asked.keys, clock.profile.baseline)).limits
    if len(limit) != 1 or limit[0].quantity != "latency" or limit[0].target not in (None, clock.name):
        raise BudgetError(f"budget {budget!r} is not one latency on {clock.name}; write it like 6ms or 30%")
    limit_ms = limit[0].value
    ticking = int8_clock(learned, clock, run, precision, limit_ms) or clock
    int8 = ticking is not clock
    asking = {"run": str(run), "support": support, "budget": budget, "target": clock.name, "precision": precision}
    folder.start({**asking, "head": head, "risk": risk, "refine": refine})
    aimed_ms, session, made = limit_ms, None, None
    for _ in range(MAX_CHECKS):
        with progress.stage("adapt to the support set"):
            made = _make(learned, ticking, domain, aimed_ms, HEADS[head], refine or risk > 0, risk, int8=int8)
        save_network(made.network, folder.model)
        _write_head(folder, made)
        if not verify:
            break
        with progress.stage("measure in fresh processes"):
            session = measure_pair(learned.config.model, folder.model, clock.name, clock.profile.shape, int8=int8)
        ratio = session.ratio(MADE, WHOLE)
        surely_ms = (ratio.value + Z * ratio.stderr) * clock.whole_ms
        if surely_ms <= limit_ms:
            break
        aimed_ms = max(ticking.floor_ms(), 0.98 * aimed_ms * limit_ms / surely_ms)
    assert made is not None
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
        "predicted_ms": made.predicted_ms,
        "upper_ms": made.upper_ms,
        "support_accuracy": made.accuracy,
        "adaptation": made.seconds,
        "whole_ms": clock.whole_ms,
        "met": made.upper_ms <= limit_ms,
        "run": str(out),
    }
    if session is not None:
        certificate = _certify(asked, clock, session, folder, made)
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
    """The clock of int8 slices on a target, where they are asked for, or pay and were priced; None for float ones."""
    if precision == "fp32" or (precision == "auto" and clock.whole_ms <= limit_ms):
        return None
    twin = int8_twin(clock.profile.target)
    path = None if twin is None else AdaptFolder(run).profile(twin.name)
    if path is None or not path.is_file():
        if precision == "auto":
            return None
        reason = "has no int8 that pays" if twin is None else f"was not priced in int8 by {run}; adapt with --int8"
        raise ApportionError(f"{clock.name} {reason}; or ask for fp32")
    return Clock.of(Profile.load(path), Parts.of(learned.family.network, learned.family.partition))


@dataclass(frozen=True, eq=False, kw_only=True)
class _Made:
    """A specialised network with its head, and what making it took."""

    network: Network
    weight_FW: Tensor
    bias_W: Tensor
    classes: tuple[str, ...]
    num_examples: int
    sizes: dict[str, int]
    alpha: list[float]
    predicted_ms: float
    upper_ms: float
    accuracy: float
    seconds: dict[str, float]


def _make(
    learned: Learned,
    clock: Clock,
    domain: Domain,
    budget_ms: float,
    head: Callable[[float], Head],
    refine: bool,
    risk: float,
    *,
    int8: bool,
) -> _Made:
    family, began = learned.family, time.perf_counter()
    rho = min(1.0, budget_ms / clock.whole_ms)
    pool = read_pool(family.network, domain)
    rows = np.arange(len(domain))
    inputs, label_S = pool.at(rows), torch.from_numpy(domain.label_N)
    ways, read = len(domain.classes), time.perf_counter()
    with torch.no_grad():
        frozen_SF = read_out(family.network, inputs).float()
        encoded = time.perf_counter()
        known = clock.name if clock.name in family.clocks else next(iter(family.clocks))
        alpha_M = family.plan(class_means(frozen_SF, label_S, ways), rho, known).alpha_M
        value_L = learned.values(rho)
    # on a device that was trained for the policy's fractions stand; another one prices them anew
    num_steps = 0 if clock.name in family.clocks else 12
    solved = solve(family, alpha_M, budget_ms, clock, value_L, num_steps=num_steps)
    keep_G = family.keep_of(solved.sizes)
    scale = float(family.log_scale.detach().exp())

    def loss(mixture_M: Tensor) -> float:
        with torch.no_grad():
            feature_SF = family.embed(inputs, family.gates(mixture_M), keep_G).float()
            return left_out_loss(feature_SF, label_S, ways, scale, risk)

    begun = time.perf_counter()
    num_passes = 0
    if refine:
        alpha_M, num_passes = refine_mixture(loss, alpha_M)
    refined = time.perf_counter()
    network = family.sliced(alpha_M, solved.sizes)
    if int8:
        network = network.replace(calibration=tuple(shaped(Examples((inputs,), domain.name), network)))
    sliced = time.perf_counter()
    with torch.no_grad():
        feature_SF = functional.normalize(read_out(as_run(network), inputs).float(), dim=-1)
        weight_FW, bias_W = head(scale).linear(feature_SF, label_S, ways)
    return _Made(
        network=network,
        weight_FW=weight_FW,
        bias_W=bias_W,
        classes=domain.classes,
        num_examples=len(domain),
        sizes=solved.sizes,
        alpha=[round(float(a), 4) for a in alpha_M],
        predicted_ms=solved.predicted_ms,
        upper_ms=solved.upper_ms,
        accuracy=float(((feature_SF @ weight_FW + bias_W).argmax(-1) == label_S).float().mean()),
        seconds={
            "read": read - began,
            "encode": encoded - read,
            "solve": begun - encoded,
            "refine": refined - begun,
            "slice": sliced - refined,
            "total": time.perf_counter() - began,
            "passes": float(num_passes + 2),
        },
    )


def left_out_loss(feature_SF: Tensor, label_S: Tensor, ways: int, scale: float, risk: float = 0.0) -> float:
    r"""Mean loss of every example against class means without it, plus its variance times a risk weight (eq. A14).

    .. math:: \hat\ell = \mathrm{mean}_i\, \ell_i + \rho\, \mathrm{var}_i\, \ell_i

    A class of one example keeps it in its mean.
    """
    cosine_SW = cosines(feature_SF, class_means(feature_SF, label_S, ways))
    own_S = functional.cosine_similarity(feature_SF, left_out_means(feature_SF, label_S, ways), dim=-1)
    cosine_SW = cosine_SW.scatter(1, label_S[:, None], own_S[:, None])
    loss_S = functional.cross_entropy(scale * cosine_SW, label_S, reduction="none")
    return float(loss_S.mean() + risk * loss_S.var(correction=0))


def _write_head(folder: SpecialFolder, made: _Made) -> None:
    tensors = {"weight_FW": made.weight_FW.contiguous(), "bias_W": made.bias_W.contiguous()}
    write_whole(folder.head, save(tensors))
    folder.write("classes.json", {"classes": list(made.classes)})


def as_run(network: Network) -> Network:
    """What the runtime computes: int8 is simulated."""
    return simulate(network) if network.precision == "int8" else network


def measure_pair(whole: str, made: Path, target: str, shape: InputShape, *, int8: bool) -> Session:
    """The model beside the whole network in float, in four fresh processes, both with the instructions it needs."""
    candidates = [Candidate(name=WHOLE, ref=whole), Candidate(name=MADE, ref=str(made))]
    where = working_target(target)
    twin = int8_twin(where) if int8 else None
    session = measure(candidates, where.with_isa(twin.isa) if twin else where, shape, processes=4, tolerance=0.01)
    session.require()
    return session


def _certify(asked: Budget, clock: Clock, session: Session, folder: SpecialFolder, made: _Made) -> Certificate:
    ratio = session.ratio(MADE, WHOLE)
    whole = clock.whole_ms
    measured = Reading(value=ratio.value * whole, unit="ms", stderr=ratio.stderr * whole, count=ratio.count)
    resolved = asked.resolve(dict.fromkeys(asked.keys, clock.profile.baseline))
    accuracy = Reading(value=made.accuracy, unit="ratio", count=made.num_examples)
    return Certificate(
        asked=str(asked),
        budget=resolved,
        baseline={limit.key: clock.profile.baseline for limit in resolved.limits},
        measured={limit.key: measured for limit in resolved.limits},
        quality={"support": accuracy},
        artefact=folder_digest(folder.model),
        target=clock.name,
        conditions={"machine": machine(), **session.conditions, "shape": vars(clock.profile.shape)},
        measured_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        confidence=CONFIDENCE,
        z=Z,
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
    asked = folder.asked({"run", "support", "budget", "target", "head", "risk", "refine", "precision"})
    if not folder.model.is_dir() or folder_digest(folder.model) != certificate.artefact:
        raise ApportionError(f"{folder.model} is not the model that was certified; specialise again")
    learned = read_learned(Path(asked["run"]))
    with (progress or Silent()).stage("measure in fresh processes"):
        shape = InputShape(**certificate.conditions["shape"])
        int8 = load(str(folder.model)).precision == "int8"
        session = measure_pair(learned.config.model, folder.model, certificate.target, shape, int8=int8)
    ratio, whole = session.ratio(MADE, WHOLE), next(iter(certificate.baseline.values())).value
    measured = Reading(value=ratio.value * whole, unit="ms", stderr=ratio.stderr * whole, count=ratio.count)
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
