"""A front: a search at each of several anchors, and which of the results are worth having on measured cost."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from apportion.core.folder import RunFolder
from apportion.core.meter import Reading
from apportion.core.progress import Progress, Silent
from apportion.device.measure import Candidate, Shape, measure
from apportion.device.store import Store
from apportion.device.target import Target
from apportion.errors import ApportionError
from apportion.methods.search.folder import SearchFolder, SearchRunConfig
from apportion.methods.search.ground import prepare
from apportion.methods.search.pareto import nondominated
from apportion.methods.search.proxy import Executor
from apportion.methods.search.run import search, usable
from apportion.methods.search.verify import verify


@dataclass(frozen=True)
class Anchor:
    """Where one search of the front is anchored: what the user wrote, and the cost or the architecture it means."""

    text: str
    cost: str | None = None
    arch: dict[str, Any] | None = None

    @classmethod
    def parse(cls, text: str) -> Anchor:
        """A cost, or the architecture that a JSON file holds, such as a search's result."""
        path = Path(text)
        if path.suffix != ".json" and not path.is_file():
            return cls(text, cost=text)
        try:
            arch = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ApportionError(f"can't read an architecture from {path} ({error}); give a JSON object") from None
        arch = arch.get("arch", arch) if isinstance(arch, dict) else arch
        if not isinstance(arch, dict):
            raise ApportionError(f"{path} holds no architecture; give a JSON object of decisions")
        return cls(text, arch=arch)

    def of(self, config: SearchRunConfig) -> SearchRunConfig:
        return replace(config, anchor_cost=self.cost, anchor=self.arch)


class FrontFolder(RunFolder):
    """The folder of a front: one folder per anchor, named by its number, over one store of measurements."""

    what = "front"
    file = "front.json"

    def point(self, number: int) -> Path:
        return self.path / str(number)


def front(
    config: SearchRunConfig,
    anchors: Sequence[Anchor],
    path: Path,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> dict[str, Any]:
    """A search at every anchor; points that another dominates on measured cost are marked as not kept.

    All anchors are brought into the space before the first search, so that one out of reach is told early. Started
    again with the same folder it goes on.

    Raises:
        InfeasibleError: no architecture comes near one of the anchors.
    """
    began = time.perf_counter()
    progress = progress or Silent()
    asked = [anchor.of(config) for anchor in anchors]
    folder = FrontFolder(path)
    targets = usable(config, progress)
    folder.begin(_identity(asked), {"searches": [asdict(one) for one in asked]})
    finished = folder.result()
    if finished is not None:
        return finished
    centres = []
    for anchor, one in zip(anchors, asked, strict=True):
        with progress.stage(f"bring the space to {anchor.text}"):
            centres.append(_centre(one, targets, Store(folder.store)))
    order = sorted(range(len(asked)), key=lambda number: centres[number])
    for here, after in pairwise(order):
        if centres[after] <= centres[here] * (1 + 1e-9):
            raise ApportionError(
                f"anchors {anchors[here].text} and {anchors[after].text} are the same cost; give each once"
            )
    points = []
    for number, which in enumerate(order, 1):
        with progress.stage(f"anchor {anchors[which].text} ({number} of {len(order)})"):
            made = search(asked[which], folder.point(number), progress, executor, store=folder.store)
        points.append({"asked": anchors[which].text, **made})
    with progress.stage("measure the points side by side"):
        measured = _side_by_side(folder, targets, len(points))
    keys = [f"latency@{target.name}" for target in targets]
    kept = nondominated(
        [
            (tuple(costs[key].value for key in keys), point["quality_after"]["value"])
            for costs, point in zip(measured, points, strict=True)
        ]
    )
    for number, (point, costs) in enumerate(zip(points, measured, strict=True)):
        point |= {"kept": number in kept, "measured": {key: one.to_json() for key, one in costs.items()}}
    result = {
        "space": config.space,
        "targets": list(config.targets),
        "utilities": list(config.utilities),
        "points": points,
        "met": all(point["met"] for point in points),
        "seconds": time.perf_counter() - began,
        "run": str(folder.path),
    }
    folder.write("result.json", result)
    return result


def verify_front(path: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Measures every point that was kept again, each against its own certificate."""
    folder = FrontFolder(path)
    result = folder.result()
    if result is None:
        raise ApportionError(f"{path} is not finished; start it again to go on")
    points = [
        {"asked": point["asked"], **verify(folder.point(number), progress)}
        for number, point in enumerate(result["points"], 1)
        if point["kept"] and point["met"]
    ]
    return {"points": points, "met": result["met"] and all(point["met"] for point in points), "run": str(path)}


def _centre(config: SearchRunConfig, targets: list[Target], store: Store) -> float:
    """The cost that an anchor means on the first target; what is measured for it is not measured again."""
    ground = prepare(config, targets, store, Silent())
    return ground.band.anchor[f"latency@{targets[0].name}"].value


def _side_by_side(folder: FrontFolder, targets: Sequence[Target], num: int) -> list[dict[str, Reading]]:
    """Latencies of all points, taking turns in the same processes."""
    measured: list[dict[str, Reading]] = [{} for _ in range(num)]
    for target in targets:
        candidates = [
            Candidate(name=str(number), ref=str(SearchFolder(folder.point(number)).model))
            for number in range(1, num + 1)
        ]
        seconds = 3.0 * max(1.0, num / 2)
        session = measure(candidates, target, Shape(), processes=4, seconds=seconds, tolerance=0.005).require()
        for number in range(num):
            measured[number][f"latency@{target.name}"] = session.latency(str(number + 1))
    return measured


def _identity(asked: Sequence[SearchRunConfig]) -> str:
    return hashlib.sha256(json.dumps([asdict(one) for one in asked], sort_keys=True).encode()).hexdigest()
