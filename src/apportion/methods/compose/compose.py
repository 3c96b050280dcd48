"""Composing a model: check that the sources fit, merge them block by block, and leave a folder that transformers loads.

The merges people know (soup, task arithmetic, TIES, DARE, SLERP) need no data and no torch. Those that choose weights
by a support set are in ``fewshot``.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apportion.core.folder import whole_folder
from apportion.core.progress import Progress, Silent
from apportion.errors import ModelError
from apportion.methods.compose.compat import check_sources, fingerprint, kinship, skipped
from apportion.methods.compose.folder import RECORD, refuse_foreign
from apportion.methods.compose.merge import write_merged
from apportion.methods.compose.recipes import Dare, Linear, Recipe, Slerp, TaskArithmetic, Ties
from apportion.methods.compose.source import Source, open_source

FORMAT = 1
BLIND = ("soup", "linear", "task-arithmetic", "ties", "dare", "dare-ties", "slerp")
CHOSEN = ("oracle", "router", "greedy-soup", "best-single")
METHODS = (*CHOSEN, *BLIND)
DTYPES = ("F32", "F16", "BF16")
_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FAR = 0.9  # sources farther apart than this share of their size were hardly tuned from one base


@dataclass(frozen=True, kw_only=True)
class ComposeConfig:
    """What to compose and how; checks itself."""

    sources: tuple[str, ...]
    method: str = "soup"
    base: str | None = None
    weights: tuple[float, ...] | None = None
    density: float | None = None
    scale: float = 1.0
    position: float = 0.5
    skip: tuple[str, ...] = ()
    dtype: str | None = None
    seed: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ModelError(f"method {self.method!r} is not known; possible are {', '.join(METHODS)}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ModelError(f"dtype {self.dtype!r} is not written; possible are {', '.join(DTYPES)}")
        if not math.isfinite(self.scale):
            raise ModelError(f"scale {self.scale:g} is not a number to multiply with; 1 leaves all as it is")
        if self.threads is not None and self.threads < 1:
            raise ModelError(f"threads {self.threads} is not possible; give 1 or more")
        if self.weights is not None:
            if len(self.weights) != len(self.sources):
                raise ModelError(
                    f"{len(self.weights)} weights were given for {len(self.sources)} sources; give one each"
                )
            for source, weight in zip(self.sources, self.weights, strict=True):
                if not math.isfinite(weight):
                    raise ModelError(f"the weight of {source!r} is {weight}; give a finite number")
            if not any(self.weights):
                raise ModelError("all weights are zero; give at least one another")
        if len(self.sources) < 2 and self.base is None and self.method not in CHOSEN:
            raise ModelError(f"{self.method} takes at least two sources, {len(self.sources)} given")
        if self.seed < 0:
            raise ModelError(f"seed {self.seed} is not possible; give 0 or more")


@dataclass(frozen=True)
class Opened:
    """Sources that were found to fit one another, and remarks on what differs."""

    sources: Sequence[Source]
    base: Source | None
    copied: Sequence[str]
    remarks: Sequence[str]


def open_all(config: ComposeConfig, store: Path | None) -> Opened:
    """Opens the sources of a config and checks that they fit; reads headers, configs and a sample of the weights."""
    sources = _named_apart([open_source(ref, store=store) for ref in config.sources])
    base = None if config.base is None else open_source(config.base, store=store)
    first = base or sources[0]
    copied = skipped(first, config.skip)
    remarks = check_sources(sources, base, skip=config.skip)
    for other in sources if base is not None else sources[1:]:
        apart = kinship(first, other)
        if apart > _FAR:
            remarks.append(
                f"{other.name!r} lies {apart:.2f} of its size away from {first.name!r}: hardly tuned from one base, so "
                "mixing may destroy both; align it first"
            )
    return Opened(sources, base, copied, remarks)


def compose(
    config: ComposeConfig, out: Path, *, store: Path | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Merges without data and writes the folder ``out``; returns what was done."""
    refuse_foreign(out)
    opened = open_all(config, store)
    recipe = make_recipe(config)
    if recipe.needs_base and opened.base is None:
        raise ModelError(f"{config.method} works on differences to a base; name the common ancestor with --base")
    return write(config, opened, recipe, out, progress=progress)


def make_recipe(config: ComposeConfig) -> Recipe:
    """The recipe of a blind method."""
    weight_S = config.weights or (1.0,) * len(config.sources)
    density = config.density
    if config.method in ("soup", "linear"):
        return Linear(weight_S=weight_S)
    if config.method == "task-arithmetic":
        return TaskArithmetic(weight_S=weight_S, scale=config.scale)
    if config.method == "ties":
        return Ties(weight_S=weight_S, density=0.2 if density is None else density, scale=config.scale)
    if config.method in ("dare", "dare-ties"):
        return Dare(
            weight_S=weight_S,
            density=0.5 if density is None else density,
            scale=config.scale,
            seed=config.seed,
            elect=config.method == "dare-ties",
        )
    if config.method == "slerp":
        if config.weights is not None:
            raise ModelError("slerp takes a position between its two sources, not weights; give --position 0.3, say")
        return Slerp(t=config.position)
    raise ModelError(f"{config.method} chooses weights by a support set; give --support FILE")


def write(
    config: ComposeConfig,
    opened: Opened,
    recipe: Recipe,
    out: Path,
    *,
    found: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes the model folder: weights, the files beside them, ``compose.json`` and a README; whole or not at all."""
    began = time.perf_counter()
    first = opened.base or opened.sources[0]
    weights = [float(weight) for weight in recipe.weights("")]
    record = {
        "apportion_compose": FORMAT,
        "method": config.method,
        "config": {key: value for key, value in asdict(config).items() if value not in (None, ())},
        "sources": [
            {"name": source.name, "weight": weight, "fingerprint": fingerprint(source)}
            for source, weight in zip(opened.sources, weights, strict=True)
        ],
        "base": None if opened.base is None else {"name": opened.base.name, "fingerprint": fingerprint(opened.base)},
        "remarks": list(opened.remarks),
        **(found or {}),
    }
    with whole_folder(out) as draft:
        write_merged(
            draft / "model.safetensors",
            recipe,
            opened.sources,
            opened.base,
            dtype=config.dtype,
            copied=opened.copied,
            threads=config.threads,
            progress=progress or Silent(),
        )
        for name, path in first.body.files().items():
            (draft / name).parent.mkdir(exist_ok=True)
            if name == "config.json":
                (draft / name).write_text(_config_text(first.body.config, config.dtype), encoding="utf-8")
            else:
                shutil.copyfile(path, draft / name)
        record["config"]["sources"] = [source.name for source in opened.sources]  # where they lay is no part of it
        if opened.base is not None:
            record["config"]["base"] = opened.base.name
        (draft / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        (draft / "README.md").write_text(render_readme(out.name, record), encoding="utf-8")
    return {**record, "out": str(out), "seconds": round(time.perf_counter() - began, 3)}


def render_readme(title: str, record: Mapping[str, Any]) -> str:
    """A page that says what the model is made of."""
    lines = [f"# {title}", "", f"Composed by apportion with the method `{record['method']}`.", ""]
    lines += ["| source | weight | fingerprint |", "|---|---|---|"]
    for source in record["sources"]:
        lines.append(f"| {source['name']} | {source['weight']:.6g} | {source['fingerprint'][:16]} |")
    if record["base"] is not None:
        lines += ["", f"Base: {record['base']['name']} ({record['base']['fingerprint'][:16]})."]
    if record.get("residual"):
        lines += ["", "Edited tensors: " + ", ".join(f"`{name}`" for name in record["residual"]) + "."]
    lines += [f"\nNote: {remark}." for remark in record["remarks"]]
    return "\n".join([*lines, "", f"All settings: `{RECORD}`.", ""])


def _config_text(fields: Mapping[str, Any], dtype: str | None) -> str:
    kept = {key: value for key, value in fields.items() if key not in ("_name_or_path", "quantization_config")}
    if dtype is not None:
        for key in ("dtype", "torch_dtype"):
            if key in kept:
                kept[key] = _TORCH_NAMES[dtype]
    return json.dumps(kept, indent=2, sort_keys=True) + "\n"


def _named_apart(sources: Sequence[Source]) -> list[Source]:
    """Sources with different names: folders of one name are numbered."""
    count: dict[str, int] = {}
    found = []
    for source in sources:
        count[source.name] = count.get(source.name, 0) + 1
        number = count[source.name]
        found.append(source if number == 1 else Source(f"{source.name}-{number}", source.ref, source.body))
    return found
