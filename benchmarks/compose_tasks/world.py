"""What a process of the benchmark holds, and every piece of work it can be given by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import Arms, Outcome, accuracy, fixed_merge, prototypes
from library import SOURCES, TWINS, Library, Pool, Task, draw, judged, prepared
from safetensors.torch import load_file, save_file

from apportion.methods.compose.align import align, permute_units
from apportion.methods.compose.choose import oracle
from apportion.methods.compose.resident import Resident
from apportion.methods.compose.router import Lesson, Router, load_router, save_router, source_embedding
from apportion.methods.compose.router import train as train_router
from apportion.models.load import load
from apportion.models.network import read_out
from apportion.models.partition import Partition
from apportion.numerics.simplex import entropy

GRID: dict[str, dict[str, str | float]] = {
    "soup": {"method": "soup"},
    **{f"task arithmetic {s:g}": {"method": "task-arithmetic", "scale": s} for s in (0.2, 0.35)},
    **{f"ties {s:g}": {"method": "ties", "scale": s, "density": 0.2} for s in (0.5, 1.0)},
    **{f"dare {s:g}": {"method": "dare", "scale": s, "density": 0.5} for s in (0.2, 0.35)},
}
MERGES = ("soup", "task arithmetic", "ties", "dare")
SEARCHED = ("best single", "greedy soup", "lorahub", "single + residual")
OURS = ("no-adapt", "gradient-free", "gradient")
STAYS = {"no-adapt": [0.0], "gradient-free": [0.0, 1.0, 3.0, 10.0], "gradient": [0.0, 1.0, 3.0, 10.0]}
"""Prices of leaving the router's weights, as examples that would have to gain a nat."""
TRIED = tuple(f"{mode} {stay:g}" for mode, stays in STAYS.items() for stay in stays)
ORACLES = ("oracle", "oracle, 2 sources", "oracle, by layer", "oracle + residual", "hindsight")
ALL = ("base", *MERGES, *SEARCHED, *OURS, *ORACLES, "private 8", "private 2")
FEW = ("base", "soup", "best single", "greedy soup", "oracle", "oracle, by layer", "no-adapt")
PLAIN = ("uniform", "best single", "greedy soup", "oracle")
CHANGED = ("known", "added later", "taken away")


WITHOUT = " without "


def without(name: str, hidden: str) -> str:
    """The name of something made of all sources but one."""
    return f"{name}{WITHOUT}{hidden}" if hidden else name


@dataclass(frozen=True)
class Study:
    """Settings that are compared on tasks of their own, and the methods judged at each."""

    settings: tuple[str, ...]
    names: tuple[str, ...]


TABLE, CHANGE = "table", "a source is"
STUDIES = {
    TABLE: Study(("id", "ood"), ALL),
    CHANGE: Study(SOURCES, CHANGED),
    "near-duplicates of banking77": Study(("0", "1", "3"), PLAIN),
    "order of heads and neurons": Study(("as trained", "shuffled", "shuffled, aligned"), PLAIN),
    "irrelevant sources": Study(("0", "2", "10", "26"), PLAIN),
    "residual at shots": Study(("2", "10", "20"), ("oracle", "oracle + residual", "oracle + scattered")),
    "share of the first domain": Study(("50/50", "70/30", "90/10"), FEW),
    "wrong labels": Study(("0%", "20%", "40%"), FEW),
    "typing errors in queries": Study(("none", "some"), FEW),
    "shots": Study(("1", "2", "5", "10", "20", "50", "100"), FEW),
}


@dataclass(frozen=True)
class World:
    """The sources in ``folder``; what processes leave each other lies in ``scratch``."""

    folder: Path
    scratch: Path
    device: str
    count: int
    quick: bool = False
    changed_arms: dict[str, Arms] = field(default_factory=dict, compare=False)

    @cached_property
    def library(self) -> Library:
        return Library(self.folder, device=self.device)

    @cached_property
    def blend(self) -> Resident:
        return self.library.blend()

    @cached_property
    def arms(self) -> Arms:
        merges = {name: self.library.read(self.scratch / name / "model.safetensors") for name in GRID}
        return Arms(self.library, merges, *self.router("router"))

    @cached_property
    def settled(self) -> Arms:
        """The same with the scale of every merge and the price of every mode that validation chose."""
        chosen = json.loads((self.scratch / "chosen.json").read_text())
        self.arms.fixed = {name: self.arms.fixed[best] for name, best in chosen["merges"].items()}
        self.arms.stay = chosen["stay"]
        return self.arms

    def router(self, name: str) -> tuple[Router, torch.Tensor]:
        source_SP = load_file(self.scratch / "embeddings.safetensors")["source_SP"]
        return load_router(self.scratch / f"{name}.safetensors")[0], source_SP

    def do(self, what: str, setting: str, place: int) -> Any:
        """One piece of work: a lesson, a merge, a router, a shuffled source, a validation task or a task of a study."""
        if what in STUDIES:
            return self.judge(what, setting, place)
        work: dict[str, Callable[[str, int], Any]] = {
            "lesson": lambda _, place: self.lesson(place),
            "embed": lambda *_: self.embed(),
            "merge": lambda setting, _: self.merge(*setting.split(WITHOUT)),
            "router": lambda setting, _: self.fit_router(setting),
            "shuffle": lambda setting, _: self.shuffle(setting),
            "valid": lambda _, place: self.judged_by(self.arms, self.tasks("valid", ""), place, (*GRID, *TRIED)),
            "far": lambda _, place: self.far(place),
        }
        return work[what](setting, place)

    def merge(self, name: str, hidden: str = "") -> None:
        """Writes a merge of all sources, or of all but one."""
        left = [source for source in SOURCES if source != hidden]
        fixed_merge(self.folder, left, GRID[name], self.scratch / without(name, hidden))

    def far(self, place: int) -> dict[str, Outcome]:
        """A validation task whose own source is away, from the router's training too: its domain is new to all."""
        drawn = self.tasks("far", "")
        (own,) = drawn[place].pools
        return self.judged_by(self.arms_of(without("", own)), drawn, place, (*GRID, *TRIED))

    def lesson(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """The oracle's weights on a task drawn from the sources' own training texts."""
        task = self.tasks("lesson", "")[place]
        choice = oracle(self.blend, task.support, max_steps=6)
        return prototypes(self.library, task).numpy(), choice.weight_LS.float().numpy()

    def embed(self) -> None:
        """Writes an embedding of every source, from texts without labels."""
        rng, library = np.random.default_rng(5), self.library
        probes = [
            pool.domain.content[int(row)]
            for pool in prepared()
            for row in rng.choice(len(pool.domain.content), 48, replace=False)
        ]
        inputs = library.encode(probes, [0] * len(probes)).inputs

        def features(state: dict[str, torch.Tensor]) -> torch.Tensor:
            library.set_state(state)
            with torch.no_grad():
                return read_out(library.network, inputs).cpu()

        base_NP = features(library.base)
        source_SP = torch.stack([source_embedding(base_NP, features(state)) for state in library.states.values()])
        save_file({"source_SP": source_SP}, self.scratch / "embeddings.safetensors")

    def fit_router(self, hidden: str) -> None:
        """Trains the router on all lessons, or one that has never heard of a source."""
        found = np.load(self.scratch / "lessons.npz")
        lessons = [
            Lesson(torch.from_numpy(found[f"prototype{n}"]), torch.from_numpy(found[f"teacher{n}"]))
            for n in range(len(found) // 2)
        ]
        source_SP = load_file(self.scratch / "embeddings.safetensors")["source_SP"]
        if hidden:
            others = [place for place, name in enumerate(SOURCES) if name != hidden]
            source_SP = source_SP[others]
            lessons = [Lesson(lesson.prototype_CP, lesson.teacher_LS[:, others]) for lesson in lessons]
        torch.manual_seed(0)
        router = Router(source_SP.shape[1])
        train_router(router, lessons, source_SP)
        save_router(self.scratch / f"router{hidden}.safetensors", router, {})

    def shuffle(self, name: str) -> None:
        """Writes a source with its heads and neurons in another order, and that one aligned to the first source."""
        rng = torch.Generator().manual_seed(SOURCES.index(name))
        reference, other = (load(str(self.folder / one), tokens=16) for one in (SOURCES[0], name))
        partition = Partition.of(reference)
        for part in partition:
            if part.kind != "blocks":
                permute_units(other.module, part, torch.randperm(part.num_units, generator=rng))
        state = {key: tensor.clone() for key, tensor in other.module.state_dict().items()}
        save_file(state, self.scratch / f"shuffled-{name}.safetensors")
        align(reference, other, partition)
        state = {key: tensor.contiguous() for key, tensor in other.module.state_dict().items()}
        save_file(state, self.scratch / f"aligned-{name}.safetensors")

    def judge(self, study: str, setting: str, place: int) -> dict[str, Outcome]:
        drawn = self.tasks(study, setting)
        if study == CHANGE:
            return self.changed(setting, drawn[place]) if place < len(drawn) else {}
        sources = f"{study}: {setting}" if STUDIES[study].names is PLAIN else ""
        names = tuple(name for name in STUDIES[study].names if not (self.quick and "+" in name))  # the slowest by far
        return self.judged_by(self.arms_of(sources) if sources else self.settled, drawn, place, names)

    def judged_by(self, arms: Arms, drawn: Sequence[Task], place: int, names: Sequence[str]) -> dict[str, Outcome]:
        return arms.run(drawn[place], names, seed=place)

    def changed(self, name: str, task: Task) -> dict[str, Outcome]:
        """The router's weights with a source it knows, one it was not trained with, and without it."""
        place, prototype_CP = SOURCES.index(name), prototypes(self.library, task)
        late, source_SP = self.router(f"router{name}")
        with torch.no_grad():
            known_LS, added_LS = self.arms.weights(prototype_CP), late(prototype_CP, source_SP).double()
        removed_LS = known_LS.clone()
        removed_LS[:, place] = 0
        removed_LS /= removed_LS.sum(-1, keepdim=True)
        found = {}
        for label, weight_LS in zip(CHANGED, (known_LS, added_LS, removed_LS), strict=True):
            self.arms.blend.set_weights(weight_LS)
            active = float((weight_LS > 0).sum())
            score, spread = accuracy(self.library, task), float(entropy(weight_LS).mean())
            found[label] = Outcome(score, active, spread, 0.0, float(weight_LS[0, place]))
        return found

    def arms_of(self, sources: str) -> Arms:
        """Methods over the sources of a study's setting; only the latest are kept, since they can be many."""
        if sources not in self.changed_arms:
            self.changed_arms.clear()
            torch.cuda.empty_cache()
            library = self.library.having(self.states_of(sources))
            fixed, router, source_SP = {}, None, None
            if sources.startswith(WITHOUT):
                hidden = sources.removeprefix(WITHOUT)
                fixed = {n: self.library.read(self.scratch / without(n, hidden) / "model.safetensors") for n in GRID}
                router, source_SP = self.router(f"router{hidden}")
                source_SP = source_SP[[name != hidden for name in SOURCES]]
            self.changed_arms[sources] = Arms(library, fixed, router, source_SP)
        return self.changed_arms[sources]

    def states_of(self, sources: str) -> dict[str, dict[str, torch.Tensor]]:
        study, _, setting = sources.partition(": ")
        library = self.library
        states = dict(library.states)
        if sources.startswith(WITHOUT):
            del states[sources.removeprefix(WITHOUT)]
        if study.startswith("near"):
            states |= {name: library.read(self.folder / name / "model.safetensors") for name in TWINS[: int(setting)]}
        elif study.startswith("order") and setting != "as trained":
            kind = "aligned" if "aligned" in setting else "shuffled"
            for name in SOURCES[1:]:
                states[name] = library.read(self.scratch / f"{kind}-{name}.safetensors")
        elif study.startswith("irrelevant"):
            states |= noise(library, int(setting))
        return states

    @lru_cache(maxsize=16)  # noqa: B019 - one world lives as long as its process
    def tasks(self, study: str, setting: str) -> list[Task]:
        """The tasks of a setting, the same in every process."""
        library, count = self.library, self.count
        if study == "lesson":
            return tasks(library, prepared(), 150, seed=4)
        if study == "valid":
            return tasks(library, judged("valid"), 40, seed=1)
        if study == "far":
            return [task for pool in judged("valid") for task in tasks(library, [pool], 8, seed=12)]
        if study == TABLE:
            return tasks(library, judged(setting), count, seed=22)
        if study == CHANGE:
            return [task for task in self.tasks(TABLE, "id") if setting in task.pools]
        ident = judged("id")
        if study in ("shots", "residual at shots"):
            return tasks(library, judged("many"), count, seed=27, shots=int(setting))
        if study == "share of the first domain":
            return mixtures(library, ident, count, *(int(part) // 10 for part in setting.split("/")))
        if study == "wrong labels":
            return tasks(library, ident, count, seed=28, noise=float(setting.rstrip("%")) / 100)
        if study == "typing errors in queries":
            return tasks(library, ident, count, seed=29, corrupt=typos if setting == "some" else None)
        return tasks(library, ident, count, seed=30)


def tasks(library: Library, pools: Sequence[Pool], count: int, seed: int, **settings: Any) -> list[Task]:
    """Tasks of fifteen classes; every second one has its classes from two pools."""
    rng = np.random.default_rng(seed)
    drawn = []
    for place in range(count):
        first = pools[place % len(pools)]
        if place % 2 and len(pools) > 1:
            others = [pool for pool in pools if pool is not first]
            parts = [(first, 8), (others[int(rng.integers(len(others)))], 7)]
        else:
            parts = [(first, 15)]
        drawn.append(draw(library, parts, rng, **settings))
    return drawn


def mixtures(library: Library, pools: Sequence[Pool], count: int, first: int, second: int) -> list[Task]:
    """Tasks with so many classes of one domain and so many of another."""
    rng = np.random.default_rng(31)
    drawn = []
    for place in range(count):
        others = [pool for pool in pools if pool is not pools[place % len(pools)]]
        parts = [(pools[place % len(pools)], first), (others[int(rng.integers(len(others)))], second)]
        drawn.append(draw(library, parts, rng))
    return drawn


def noise(library: Library, count: int) -> dict[str, dict[str, torch.Tensor]]:
    """Sources that know nothing: differences of real ones, their numbers shuffled."""
    generator = torch.Generator(library.device).manual_seed(0)
    made: dict[str, dict[str, torch.Tensor]] = {}
    for number in range(count):
        source = library.states[SOURCES[number % len(SOURCES)]]
        state = {}
        for name, tensor in source.items():
            delta = (tensor - library.base[name]).reshape(-1)
            order = torch.randperm(len(delta), generator=generator, device=library.device)
            state[name] = library.base[name] + delta[order].view_as(tensor)
        made[f"noise-{number}"] = state
    return made


def typos(text: str) -> str:
    """Two neighbouring letters of every third word exchanged."""
    words = text.split()
    for place in range(0, len(words), 3):
        word = words[place]
        if len(word) > 3:
            words[place] = word[0] + word[2] + word[1] + word[3:]
    return " ".join(words)
