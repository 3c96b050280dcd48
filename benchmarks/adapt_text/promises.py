"""Ten specialised models at random budgets: made by the command, then verified by the command in fresh processes."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from judge import SHAPE
from PIL import Image
from suite import SUITES, TARGETS

from apportion.tasks.domain import Domain
from apportion.tasks.domains import load_domain
from apportion.tasks.episode import Episode, Sampler
from apportion.tasks.protocol import PROTOCOLS, load_protocol

NUM_MODELS = 10


def keep_promises(run: Path, suite: str) -> list[dict]:
    """For every model its task, budget and target, whether it was met when made and when verified, and its cost."""
    loaded = load_protocol(PROTOCOLS[SUITES[suite][1]], load_domain)
    sides = {side: getattr(loaded, side) for side in ("id", "ood")}
    samplers = {side: Sampler(domains, SHAPE, seed=99) for side, domains in sides.items()}
    chance, rows = random.Random(0), []
    for number in range(NUM_MODELS):
        side, target = ("id", "ood")[number % 2], TARGETS[number % len(TARGETS)]
        budget = f"{100 * chance.uniform(0.15, 0.9):.1f}%"
        episode = samplers[side].episode(number)
        domain = next(domain for domain in sides[side] if domain.name == episode.domain)
        with tempfile.TemporaryDirectory() as scratch:
            support, out = write_support(domain, episode, Path(scratch)), Path(scratch) / "made"
            where = ["--support", str(support), "--budget", budget, "--target", target]
            made = apportion("specialize", str(run), *where, "-o", str(out))
            again = apportion("verify", str(out)) if made is not None else None
        row = {"side": side, "domain": episode.domain, "target": target, "budget": budget}
        if made is None or again is None:
            rows.append(row | {"refused": True})
            continue
        took = made["adaptation"]
        limit = next(iter(again["limits"].values()))
        row |= {"refused": False, "met": made["met"], "verified": again["met"]}
        row |= {"utilisation": round(again["measured_ms"] / limit, 4), "adaptation": took}
        row["forward_passes"] = round((took["total"] - took["read"]) / took["encode"], 2)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def write_support(domain: Domain, episode: Episode, folder: Path) -> Path:
    """The support of an episode as a user would give it: a CSV file, or a folder of class folders."""
    rows = zip(episode.support.row_N, episode.support.label_N, strict=True)
    named = [(domain.content[int(row)], domain.classes[int(episode.class_W[label])]) for row, label in rows]
    if domain.kind == "text":
        with (folder / "support.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *named])
        return folder / "support.csv"
    for number, (image, label) in enumerate(named):
        place = folder / "support" / label.replace("/", "-")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(image)).save(place / f"{number}.png")
    return folder / "support"


def apportion(*arguments: str) -> dict | None:
    """The JSON that a command printed; None where it refused (exit code 3)."""
    done = subprocess.run([sys.executable, "-m", "apportion", *arguments, "--json"], capture_output=True, text=True)
    if done.returncode == 3:
        return None
    if done.returncode not in (0, 4):
        raise SystemExit(f"apportion {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)
