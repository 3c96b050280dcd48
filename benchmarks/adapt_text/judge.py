"""Judge trained methods on episodes at every budget, each in a process, on a CUDA machine; ``train.py`` comes first.

    python3 benchmarks/adapt_text/judge.py --suite text --model FOLDER --out FOLDER

Episodes visit the targets in turn. Leaves ``results.jsonl``: accuracy of every episode by target and budget, with the
sizes that were chosen for it. A name such as ``ours:even`` judges a method with one thing changed.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from safetensors.torch import load_file
from suite import (
    DEVICE,
    SUITES,
    TARGETS,
    TWINS,
    Suite,
    cpu_copy,
    forks,
    make_family,
    options,
    read_clocks,
    read_suite,
    shares_in_int8,
)
from together import Together
from torch import Tensor

from apportion.cost.parts import Parts
from apportion.methods.adapt.depth import near_sizes, surely_least
from apportion.methods.adapt.episodes import frozen_means
from apportion.methods.adapt.family import Family
from apportion.methods.adapt.pool import Pool
from apportion.methods.adapt.solve import refine_mixture, solve
from apportion.methods.adapt.train import module_values
from apportion.tasks.episode import Episode, Sampler, Shape
from methods import METHODS

BUDGETS = (0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 0.9)
FEW_BUDGETS = (0.15, 0.3, 0.7)  # for a method with one thing changed
SHAPE = Shape(ways=5, shots=5, queries=10)
LARGE = "20-way 1-shot"  # more images in each, so a third of the episodes
NOISE = {"noise-50": 0.5, "noise-100": 1.0}  # the share of a mixture that is drawn at random
CUT = ("10%-groups", "10%-weights", "1%-groups", "1%-weights")
VARIANTS = (*NOISE, "even", "1-shot", "2-shot", "refined", *CUT)
MANY_WAYS = ("ours", "ours-float", "template", "unconditional", "pruned")  # which are judged on LARGE, too


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--episodes", type=int, default=600, help="of each side, ID and OOD")
    parser.add_argument("--changed", metavar="METHOD", help="judge a method with each thing changed instead")
    parser.add_argument("--wall", type=float, default=1e9, help="stop after these seconds in all")
    args = parser.parse_args()
    until = time.time() + args.wall
    torch.set_num_threads(8)
    if args.changed:
        args.methods = ",".join(f"{args.changed}:{variant}" for variant in VARIANTS)
    suite = read_suite(args.suite, args.model, args.classes, ("id", "ood"))
    changed = [name for name in args.methods.split(",") if name.partition(":")[2] not in ("", *VARIANTS)]
    if changed:
        parser.error(f"{changed[0]} is not known; what can be changed is {', '.join(VARIANTS)}")
    names = [name for name in args.methods.split(",") if (args.out / f"{trained_by(name)}.trained.json").is_file()]
    workers = [forks().Process(target=work, args=(args, name, suite, until)) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    made = [path for name in names if (path := args.out / f"{name}.judged.json").is_file()]
    with (args.out / "results.jsonl").open("a") as file:
        file.writelines(path.read_text() + "\n" for path in made)
    for path in made:
        path.unlink()


def trained_by(name: str) -> str:
    """The method whose training a method, or one with something changed, takes."""
    method = name.partition(":")[0]
    return METHODS[method].of or method


def work(args, name: str, suite: Suite, until: float) -> None:
    began = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(1)
    method_name, _, variant = name.partition(":")
    trained = json.loads((args.out / f"{trained_by(name)}.trained.json").read_text())
    suite.network.module.to(DEVICE)
    scores = {module: torch.tensor(score_U) for module, score_U in trained["scores"].items()}
    family = make_family(suite, method_name, args.profiles, trained["features"], scores)
    family.load_state_dict({k: t.float() for k, t in load_file(args.out / f"{trained_by(name)}.safetensors").items()})
    family.eval()
    if "%" in variant:
        keep_part(family, float(variant.split("%")[0]) / 100, groups=variant.endswith("groups"))
    pools = suite.pools("id", "ood")
    rows = judge(family, pools, suite, args, method_name, variant, torch.tensor(trained["state"]["values"]), until)
    seconds = {**trained["seconds"], "judge": time.perf_counter() - began}
    result = {**trained, "method": name, "seconds": seconds, "rows": rows}
    del result["scores"], result["features"]
    if method_name != "ours" or variant:
        del result["state"]
    (args.out / f"{name}.judged.json").write_text(json.dumps(result))
    print(name, {key: round(value) for key, value in seconds.items()}, means(rows), flush=True)


def judge(
    family: Family, pools: dict[str, Pool], suite: Suite, args, method_name: str, variant: str, value_BL: Tensor, until
) -> list[dict]:
    """Accuracy of every episode at every budget, with the sizes chosen for it; as many episodes as time allows.

    A variant is judged on half as many.
    """
    method = METHODS[method_name]
    samplers = {side: Sampler(getattr(suite.loaded, side), SHAPE, seed=77) for side in ("id", "ood")}
    characters = [domain for domain in suite.loaded.id if domain.name.startswith("omniglot")]
    if characters and method_name in MANY_WAYS and not variant:
        samplers[LARGE] = Sampler(characters, Shape(ways=20, shots=1, queries=5), seed=77)
    parts = Parts.of(suite.network.replace(module=cpu_copy(suite.network)), family.partition)
    few = [target if target in family.clocks else f"{target}-few" for target in TARGETS]
    clocks = read_clocks(args.profiles, SUITES[args.suite][0], few, parts)
    twins = {target: twin for target, twin in TWINS.items() if method.int8}
    quick = read_clocks(args.profiles, SUITES[args.suite][0], list(twins.values()), parts)
    floats, shares = {clock.name: clock for clock in clocks}, shares_in_int8(args.profiles, SUITES[args.suite][0])
    int8_clocks = {
        target: clock.beside(floats[target], shares[clock.name]) if clock.name in shares else clock
        for target, clock in zip(twins, quick, strict=True)
    }
    budgets = (*(FEW_BUDGETS if variant else BUDGETS), 1.0)
    rows = {
        (clock.name, rho): {"target": clock.name, "rho": rho, "accuracy": [], "chosen": [], "sizes": []}
        for clock in clocks
        for rho in budgets
    }
    for row in rows.values():
        row |= {"side": [], "domain": []}
    known: dict[tuple, list[dict[str, int]]] = {}
    whole = {module.name: module.num_units for module in family.partition}
    learned = method.allocation == "learned" and method.train
    shots = int(variant[0]) if variant.endswith("-shot") else SHAPE.shots
    for number in range(args.episodes // 2 if variant else args.episodes):
        if time.time() > until and number >= 6:
            break
        clock = clocks[number % len(clocks)]
        ticking = int8_clocks.get(clock.name, clock)  # which sizes are chosen by, for a share of the float network's
        trained = ticking.name if ticking.name in family.clocks else next(iter(family.clocks))  # as solve() takes it
        for side, sampler in samplers.items():
            if side == LARGE and number // len(clocks) % 3:
                continue
            episode = fewer(sampler.episode(number), shots)
            pool = pools[episode.domain]
            with torch.no_grad():
                means_WF = frozen_means(pool, episode)
            generator = np.random.default_rng([number, len(side)])
            asked: dict[float, tuple[Tensor, list[dict[str, int]], bool]] = {}
            for rho in budgets:
                budget_ms, int8 = rho * clock.whole_ms, ticking is not clock and rho < 1
                at = min(1.0, budget_ms / ticking.whole_ms)
                with torch.no_grad():
                    alpha_M = routed(family.plan(means_WF, at, trained).alpha_M, variant, generator)
                # sizes hardly depend on the mixture: one choice for all that are alike to a tenth
                name = (clock.name, rho, tuple((10 * alpha_M).round().int().tolist()) if learned else ())
                if name not in known and rho < 1:
                    value_L = module_values(value_BL, at, family.floor)
                    steps = 0 if ticking.name in family.clocks else 12
                    worth_L = value_L if learned else None
                    known[name] = [solve(family, alpha_M, budget_ms, ticking, worth_L, num_steps=steps).sizes]
                    if method.near:
                        known[name] += near_sizes(family, alpha_M, at, ticking, worth_L, num_steps=steps)
                asked[rho] = (alpha_M, known[name] if rho < 1 else [whole], int8)
            together = Together(family, pool, episode)
            together.run(  # of several in int8 the losses in float choose
                (alpha_M, family.keep_of(sizes), int8 and len(choices) == 1)
                for alpha_M, choices, int8 in asked.values()
                for sizes in choices
            )
            chosen: dict[float, tuple[Tensor, dict[str, int], bool]] = {}
            for rho, (alpha_M, choices, int8) in asked.items():
                sizes = choices[0]
                if len(choices) > 1:
                    losses = [together.support_losses(alpha_M, family.keep_of(each)) for each in choices]
                    sizes = choices[surely_least(losses)]
                if variant == "refined":
                    alpha_M, _ = refine_mixture(partial(mean_loss, together, family.keep_of(sizes)), alpha_M)
                chosen[rho] = (alpha_M, sizes, int8)
            together.run((alpha_M, family.keep_of(sizes), int8) for alpha_M, sizes, int8 in chosen.values())
            for rho, (alpha_M, sizes, int8) in chosen.items():
                row = rows[clock.name, rho]
                if rho < 1:
                    told = [*(["int8"] if int8 else []), *sizes.values()]
                    if told not in row["sizes"]:
                        row["sizes"].append(told)
                    row["chosen"].append(row["sizes"].index(told))
                row["accuracy"].append(together.accuracy(alpha_M, family.keep_of(sizes), int8))
                row["side"].append(side)
                row["domain"].append(episode.domain)
    return [row for row in rows.values() if row["accuracy"]]


def fewer(episode: Episode, shots: int) -> Episode:
    """The episode with the first so many support rows of every class."""
    label_N = episode.support.label_N
    place_N = np.sort(np.concatenate([np.flatnonzero(label_N == label)[:shots] for label in range(episode.ways)]))
    support = replace(episode.support, row_N=episode.support.row_N[place_N], label_N=episode.support.label_N[place_N])
    return replace(episode, support=support)


def routed(alpha_M: Tensor, variant: str, generator: np.random.Generator) -> Tensor:
    """The mixture as the router says, a share of it noise, or the same for all experts."""
    if variant in NOISE:
        noise_M = torch.from_numpy(generator.dirichlet(np.ones(len(alpha_M)))).to(alpha_M)
        return (1 - NOISE[variant]) * alpha_M + NOISE[variant] * noise_M
    return torch.full_like(alpha_M, 1 / len(alpha_M)) if variant == "even" else alpha_M


def mean_loss(together: Together, keep_G: Tensor, alpha_M: Tensor) -> float:
    return float(together.support_losses(alpha_M, keep_G).mean())


@torch.no_grad()
def keep_part(family: Family, share: float, *, groups: bool) -> None:
    """Leaves a share of the delta: the largest single numbers, or a group's slices of the largest mean square."""
    for bundle in family.stacks:
        square = bundle.delta.square()
        if groups:
            other = [dim for dim in range(1, square.dim()) if dim != bundle.dim]
            square = square.mean(other, keepdim=True).expand_as(square) if other else square
        count = max(1, int(share * square.numel()))
        least = square.flatten().topk(count).values[-1]
        bundle.delta.mul_(square >= least)


def means(rows: list[dict]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        for side in dict.fromkeys(row["side"]):
            some = [a for a, s in zip(row["accuracy"], row["side"], strict=True) if s == side]
            found.setdefault(f"{row['target']} {side}", []).append(round(100 * sum(some) / len(some), 1))
    return found


if __name__ == "__main__":
    main()
