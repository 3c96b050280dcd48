"""The bench of a run: its target, its measurements, and what a saved model costs there."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apportion.core.budget import Budget, Limit
from apportion.core.meter import Meter, Reading
from apportion.cost.calibrate import Anchored, calibrate_quickly, quick_sizes
from apportion.cost.parts import Parts
from apportion.cost.profile import Profile
from apportion.cost.sweep import Swept, sweep
from apportion.device.answers import answers, build
from apportion.device.build import model_files, needs_build, versions
from apportion.device.energy import find_source
from apportion.device.measure import Candidate, Session, Shape, measure
from apportion.device.memory import peak_on
from apportion.device.meters import FlopCount, ParameterCount, SizeOnDisk
from apportion.device.probe import working_target
from apportion.device.store import Store
from apportion.device.target import Target, find_target, is_sibling, machine, target_names
from apportion.errors import BudgetError, LostError
from apportion.methods.compress.judge import Scores, ScoresTokens
from apportion.methods.compress.quantise import AsRun
from apportion.methods.compress.rundir import FitConfig, RunDir
from apportion.models.network import Network, float_outputs, forward, read_output
from apportion.models.safefile import content_digest, folder_digest
from apportion.models.save import save
from apportion.tasks.batches import Examples
from apportion.tasks.sample import Sample
from apportion.tasks.shaped import shaped

FINAL = "final"
MAX_ANSWER_BYTES = 2**29
BASELINE = "baseline"
COUNTED = ("params", "size", "flops")
MEASURED = ("latency", "energy")
"""Quantities that only the device can tell: predicted while planning, measured at every check."""

ENERGY_SECONDS = 1.0  # of reading the counter, for every model in every process


class Bench:
    """Measures networks of one run on its target; sessions are stored, so that a resumed run measures nothing twice."""

    def __init__(self, rundir: RunDir, run: str, config: FitConfig, target: Target, network: Network) -> None:
        self.rundir, self.run, self.config, self.target = rundir, run, config, target
        self.store = Store(rundir.store)
        self.factory = network.origin.factory
        self.original = Candidate(name=BASELINE, ref=network.origin.ref, factory=self.factory)
        self.shape = Shape(batch=config.batch, tokens=config.tokens, seed=config.seed, size=config.size)
        limited = limit_on("energy", Budget.parse(config.budget)) is not None
        self.energy_seconds = ENERGY_SECONDS if limited else 0.0

    def calibrate(self, network: Network, parts: Parts, target: Target | None = None) -> Anchored:
        """The quick cost model through a few networks, measured once per run, on the run's target or its int8 twin."""
        target = target or self.target
        sizes = list(quick_sizes(parts).values())

        def now() -> dict[str, Any]:
            return sweep(network, parts, sizes, target, self.shape, seconds_each=0.2).to_json()

        stored = self.store.get_or_make({"run": self.run, "what": "anchors", "target": target.identity}, now)
        return calibrate_quickly(parts, Swept.from_json(stored))

    def energies(self, networks: Mapping[str, Network]) -> Session:
        """The energy of the original beside that of some networks, read once per run; those that fail are left out."""

        def now() -> dict[str, Any]:
            with tempfile.TemporaryDirectory(prefix="apportion-energy-") as scratch:
                candidates = [self.original]
                for name, network in networks.items():
                    folder = Path(scratch) / name
                    save(network, folder)
                    candidates.append(Candidate(name=name, ref=str(folder), factory=self.factory))
                processes = min(2, self.config.processes)
                session = measure(
                    candidates,
                    self.target,
                    self.shape,
                    processes=processes,
                    seconds=0.2,
                    energy_seconds=self.energy_seconds,
                )
            if BASELINE in session.failures:
                session.require()
            session.energy(BASELINE)  # a counter that gave nothing is told, not stored
            return session.to_json()

        what = {"run": self.run, "what": "energy", "target": self.target.identity}
        return Session.from_json(self.store.get_or_make(what, now))

    def known(self, network: Network, parts: Parts) -> Anchored:
        """The cost model of the profile that the run was given, with the parts under its view."""
        assert self.config.profile is not None
        profile = Profile.load(Path(self.config.profile))
        parts = parts.seen(profile.view)
        if profile.target.identity != self.target.identity or profile.shape != self.shape:
            where = f"{profile.target.identity}, {profile.shape.explain()}"
            here = f"{self.target.identity}, {self.shape.explain()}"
            raise BudgetError(f"{self.config.profile} is about {where}, the run about {here}; calibrate it")
        if parts.signature_of != dict(profile.cost.law.signature_of) or profile.floor_ms is None:
            raise BudgetError(f"{self.config.profile} is about {profile.model}, whose parts differ; calibrate again")
        return Anchored(profile.cost, parts, profile.baseline, Reading(value=profile.floor_ms, unit="ms"))

    def artefact(self, network: Network, folder: Path) -> Path | None:
        """What the target's runtime runs of a quantised model saved in a folder; None where it is not quantised."""
        return None if network.precision == "fp32" else self.opened(folder)

    def opened(self, folder: Path) -> Path | None:
        """What the target's runtime opens of the model saved in a folder; None where that is the folder itself."""
        return self.built(folder) if needs_build(self.target) else None

    def built(self, folder: Path) -> Path:
        """What a graph runtime runs of the model saved in a folder."""
        return build(self.candidate(folder), self.target, self.shape)

    def candidate(self, folder: Path, artefact: Path | None = None) -> Candidate:
        return Candidate(
            name=FINAL, ref=str(folder), factory=self.factory, artefact=None if artefact is None else str(artefact)
        )

    def read_quality(
        self, meter: Meter[Network], examples: Examples, network: Network, folder: Path, artefact: Path | None = None
    ) -> Reading:
        """Quality of a saved model: by the runtime's own answers where it is quantised, which torch can't compute.

        Args:
            artefact: what the runtime opens, where it is built already.
        """
        sample = self.token_sample(meter, examples, network, folder, artefact)
        if sample is not None:
            return sample.reading()
        answer_ND = self.answers(meter, examples, network, folder, artefact)
        if answer_ND is None:
            return AsRun(meter).read(network)
        assert isinstance(meter, Scores)
        return meter.score(answer_ND, network.readout)

    def token_sample(
        self, meter: Meter[Network], examples: Examples, network: Network, folder: Path, artefact: Path | None = None
    ) -> Sample | None:
        """The quality of a quantised language model by its runtime's own answers, which are many; None for others."""
        artefact = self._opened(network, folder, artefact)
        if artefact is None or network.readout != "token-logits" or not isinstance(meter, ScoresTokens):
            return None
        return meter.sample_tokens(self._answers(examples, network, artefact))

    def answers(
        self, meter: Meter[Network], examples: Examples, network: Network, folder: Path, artefact: Path | None = None
    ) -> Tensor | None:
        """The runtime's own answers of a quantised model; None where torch computes them or the meter takes none."""
        artefact = self._opened(network, folder, artefact)
        if artefact is None or network.readout == "token-logits" or not isinstance(meter, Scores):
            return None
        return torch.cat(list(self._answers(examples, network, artefact)))[: len(examples)]

    def _opened(self, network: Network, folder: Path, artefact: Path | None) -> Path | None:
        """The artefact of a quantised model that is asked; None where torch computes what it answers."""
        return self.artefact(network, folder) if artefact is None or network.precision == "fp32" else artefact

    def _answers(self, examples: Examples, network: Network, artefact: Path) -> Iterator[Tensor]:
        """The artefact's answers in the order of the examples, computed so many at once that they fit in memory."""
        batches = shaped(examples, network, count=None)
        with torch.inference_mode():
            outputs = float_outputs(forward(network.module, network.inputs))
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in outputs)
        step = max(1, MAX_ANSWER_BYTES // size_bytes)
        for start in range(0, len(batches), step):
            some = batches[start : start + step]
            for found, batch in zip(answers(artefact, self.target, some), some, strict=True):
                yield read_output(network, tuple(found), batch)

    def session(
        self,
        folder: Path,
        clear: Callable[[Session], bool],
        over: Callable[[Session], bool],
        within: Callable[[Session], bool],
        *,
        twice: bool = False,
    ) -> Session:
        """The measurements of the model in a folder beside the original; taken once per content.

        Args:
            twice: with the second half, which is taken when this is asked for first.
        """
        here = {"machine": machine(), "versions": versions()}  # a run may go on elsewhere, or with other packages
        what = {"run": self.run, "target": self.target.identity, "model": folder_digest(folder), **here}

        def first() -> dict[str, Any]:
            return self.measure(folder, clear, over, within).to_json()

        session = Session.from_json(self.store.get_or_make(what | {"what": "check"}, first))
        if not twice:
            return session
        both = self.store.get_or_make(
            what | {"what": "check, both halves"}, lambda: self.measure_again(session, folder, clear).to_json()
        )
        return Session.from_json(both)

    def measure(
        self,
        folder: Path,
        clear: Callable[[Session], bool] = lambda session: True,
        over: Callable[[Session], bool] = lambda session: False,
        within: Callable[[Session], bool] = lambda session: False,
        artefact: Path | None = None,
    ) -> Session:
        """A saved model, or what was built of it, against the original, side by side in several fresh processes.

        Two are enough where they say that it is far ``over`` the budget, half where they say that it is ``within``.
        Processes are added, to at most three times as many, while the session is not ``clear`` about it.
        """
        count = self.config.processes
        session = self._more(min(2, count), folder, artefact)
        if over(session):
            return session
        if (half := first_half(count)) > 2:
            session = session.plus(self._more(half - 2, folder, artefact, before=2))
        if count > half and not within(session):
            session = session.plus(self._more(count - half, folder, artefact, before=half))
        return self._until(clear, session, folder, artefact)

    def measure_again(self, session: Session, folder: Path, clear: Callable[[Session], bool]) -> Session:
        """A session with a second half, taken now; more where both together are not ``clear``."""
        done, num_more = session.conditions["processes"], self.config.processes - first_half(self.config.processes)
        if num_more:
            session = session.plus(self._more(num_more, folder, before=done), later=True)
        return self._until(clear, session, folder)

    def _until(
        self, clear: Callable[[Session], bool], session: Session, folder: Path, artefact: Path | None = None
    ) -> Session:
        while not clear(session) and (done := session.conditions["processes"]) < 3 * self.config.processes:
            session = session.plus(self._more(1, folder, artefact, before=done))
        return session

    def _more(self, processes: int, folder: Path, artefact: Path | None = None, before: int = 0) -> Session:
        session = measure(
            [self.original, self.candidate(folder, artefact)],
            self.target,
            self.shape,
            processes=processes,
            seconds=1.5,
            energy_seconds=self.energy_seconds,
            before=before,
        )
        if FINAL in session.failures and BASELINE not in session.failures:
            lost = session.failures[FINAL]
            raise LostError(f"{folder} can't be measured on {self.target.name}: {lost.kind}: {lost.message}")
        return session.require()


def first_half(processes: int) -> int:
    """How many of the processes of a check come first: half, made even, as every other one opens in reverse.

    Where they say that the model is within the budget, the others are taken when its quality was judged.
    """
    return min(processes, 2 * math.ceil(processes / 4))


def static_meters(budget: Budget | None = None, target: Target | None = None) -> dict[str, Meter[Network]]:
    """Meters that need no clock, by the name they go by in budgets; peak memory only where the budget limits it.

    Args:
        target: whose peak memory is limited.
    """
    memory = limit_on("memory", budget) if budget is not None else None
    meters: dict[str, Meter[Network]] = {"params": ParameterCount(), "size": SizeOnDisk(), "flops": FlopCount()}
    return meters | ({} if memory is None else {memory.key: peak_on(target)})


def read_artefact(
    network: Network,
    folder: Path,
    asked: Budget,
    target: Target,
    baseline: Mapping[str, Reading],
    session: Session | None,
    artefact: Path | None = None,
) -> dict[str, Reading]:
    """What a saved model costs: the size of its files (of the artefact, where a runtime opens one), its counts, its
    peak memory where the budget limits it, and its latency and energy where a session measured them.

    Under a relative limit these are the measured ratio times the baseline, so that a slower hour on the machine, which
    slows both, does not count.
    """
    readings = {name: meter.read(network) for name, meter in static_meters(asked, target).items()}
    size_bytes = (folder / "model.safetensors").stat().st_size
    if artefact is not None:
        size_bytes = sum(path.stat().st_size for path in model_files(artefact))
    readings["size"] = Reading(value=float(size_bytes), unit="B")
    for limit in measured_limits(asked) if session is not None else ():
        assert session is not None
        if limit.relative:
            ratio, base = session.ratio(FINAL, BASELINE, limit.quantity), baseline[limit.key]
            readings[limit.key] = Reading(
                value=ratio.value * base.value, unit=base.unit, stderr=ratio.stderr * base.value, count=ratio.count
            )
        else:
            readings[limit.key] = session.reading(limit.quantity, FINAL)
    return readings


def budget_target(budget: Budget, option: str | None) -> Target:
    """The one target of a budget: from its limits, or from the option; in float, as int8 is a choice of the run."""
    named = {limit.target for limit in budget.limits if limit.target} | ({option} if option else set())
    if len(named) > 1:
        raise BudgetError(f"the budget and --target name several targets ({', '.join(sorted(named))}); give one")
    name = named.pop() if named else None
    plain = find_target(name)
    if plain.precision != "fp32":
        same = next(one for one in target_names() if is_sibling(find_target(one), plain))
        raise BudgetError(f"{plain.name} is in int8, which fit chooses by itself where it pays; name {same}")
    target = working_target(name)
    if limit_on("energy", budget) is not None:
        source = find_source(target.device)
        if source.joules is None:
            possible = "latency, size, memory, params, flops"
            raise BudgetError(f"fit can't limit energy on {target.name}: {source.why}; possible are {possible}")
    return target


def counted_anywhere(budget: Budget) -> Budget:
    """The same budget; what needs no device to be counted loses the target that it was given."""
    return Budget(tuple(replace(limit, target=None) if limit.quantity in COUNTED else limit for limit in budget.limits))


def limit_on(quantity: str, budget: Budget) -> Limit | None:
    return next((limit for limit in budget.limits if limit.quantity == quantity), None)


def measured_limits(budget: Budget) -> tuple[Limit, ...]:
    """The limits that are judged by a session on the target."""
    return tuple(limit for limit in budget.limits if limit.quantity in MEASURED)


def contents_of(config: FitConfig) -> dict[str, str]:
    """Digests of the files that a run reads beside the model, by what they are to it."""
    _, _, policy = config.policy.partition(":")
    files = {"data": config.data, "profile": config.profile, "policy": policy or None}
    paths = {name: Path(file) for name, file in files.items() if file is not None}
    return {name: content_digest(path) for name, path in paths.items() if path.exists()}


def model_digest(network: Network) -> str:
    """Content digest of the original's files; a factory's model has none and goes by its reference."""
    if network.origin.folder is None:
        return network.origin.ref
    return folder_digest(network.origin.folder)
