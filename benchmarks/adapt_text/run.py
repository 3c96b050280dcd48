"""Does budgeted few-shot adaptation beat its baselines at equal measured latency, and do its budgets hold?

    .venv/bin/python benchmarks/adapt_text/run.py [--suite text] [--trained FILE] [--measure] [--int8] [--promises RUN]
        [--plots] [--quick]

Methods are trained and judged by ``train.py`` and ``judge.py`` on a CUDA machine, which leave accuracies and the sizes
chosen for every target and budget (``results/trained.jsonl.gz``). Then, here: ``--measure`` measures these sizes beside
the whole network (``results/measured.json``), ``--int8`` judges and measures the whole frozen network in int8
(``results/int8.json``), and ``--promises`` specialises ten models of an assembled run at random budgets and verifies
each in fresh processes (``results/promises.json``). Without them what is saved is printed. ``--plots`` draws shadow
prices and frontiers from it (``results/*.svg``). ``--quick`` needs nothing saved: it trains ours and a baseline of one
gate for a few steps on this machine and judges and measures both, in minutes on two cores.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from cells import INT8, Cells, whole_in_int8
from int8 import judge_int8
from plots import frontier_svg, prices_svg
from promises import keep_promises
from quick import run_quick
from suite import PROFILES, SUITES, TWINS, beside
from tables import beside_table, print_tables

from apportion.cost.parts import Parts
from apportion.cost.profile import Profile
from apportion.cost.sweep import sweep
from apportion.device.measure import Shape
from apportion.device.probe import working_target
from apportion.models.load import load
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.testing.summary import Summary

FOLDERS = {"text": "adapt_text", "vision": "adapt_vision"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="text")
    parser.add_argument("--trained", type=Path, help="take over what judge.py left")
    parser.add_argument("--measure", action="store_true", help="measure the sizes again")
    parser.add_argument("--int8", action="store_true", help="judge and measure the whole network in int8 again")
    parser.add_argument("--promises", type=Path, metavar="RUN", help="specialise and verify ten models of this run")
    parser.add_argument("--plots", action="store_true", help="draw shadow prices and frontiers")
    parser.add_argument("--quick", action="store_true", help="train, judge and measure a little, here")
    args = parser.parse_args()
    model, folder = SUITES[args.suite][0], Path(__file__).parents[1] / FOLDERS[args.suite]
    summary, results = Summary(folder), folder / "results"
    results.mkdir(exist_ok=True)
    if args.quick:
        summary.write(run_quick(args.suite), packages=("torch", "onnxruntime"), quick=True)
        return
    trained = results / "trained.jsonl.gz"
    if args.trained is not None:
        trained.write_bytes(gzip.compress(args.trained.read_bytes(), mtime=0))
    methods = read_methods(trained)
    made = {
        "measured": (lambda: measure_all(model, methods)) if args.measure else None,
        "int8": (lambda: judge_int8(args.suite)) if args.int8 else None,
        "promises": (lambda: keep_promises(args.promises, args.suite)) if args.promises else None,
    }
    found = {}
    for name, make in made.items():
        path = results / f"{name}.json"
        if make is not None:
            path.write_text(json.dumps(make(), indent=1) + "\n")
        found[name] = json.loads(path.read_text()) if path.is_file() else {}
    if args.measure:  # by which sizes are chosen next time
        beside(PROFILES, model).write_text(json.dumps(wholes_in_int8(found["measured"]), indent=1) + "\n")
    figures = print_tables(methods, found["measured"], found["int8"], found["promises"])
    beside_table(by_profiles(model), wholes_in_int8(found["measured"]))
    trained_on = {"device": methods["ours"]["device"], "torch": methods["ours"]["torch"]}
    before = {} if args.measure else measured_at(results / "summary.json")
    summary.write(figures, packages=("torch", "onnxruntime", "openvino"), trained_on=trained_on, **before)
    print("\n" + json.dumps(figures, indent=1))
    if args.plots:
        title = f"adapt_{args.suite}: shadow prices of ours"
        (results / "prices.svg").write_text(prices_svg(methods["ours"], title))
        title = f"adapt_{args.suite}: accuracy over measured latency, mean of targets"
        (results / "frontier.svg").write_text(frontier_svg(Cells.of(methods, found["measured"]), title))


def measured_at(path: Path) -> dict:
    """Commit, machine, versions and time of the run that measured, which stay when it is only printed again."""
    told = json.loads(path.read_text()) if path.is_file() else {}
    return {name: told[name] for name in ("commit", "machine", "versions", "seconds") if name in told}


def wholes_in_int8(measured: dict) -> dict[str, float]:
    """By int8 target what the whole network takes there as a share of float, measured in the same processes."""
    known = {target: found for target, found in measured.items() if any(sizes.startswith(INT8) for sizes in found)}
    return {TWINS[target]: whole_in_int8(found) for target, found in known.items()}


def by_profiles(model: str) -> dict[str, float]:
    """The same by two profiles, which were calibrated one after the other."""
    times = [
        [Profile.load(PROFILES / f"{model}-{name}.json").baseline.value for name in pair] for pair in TWINS.items()
    ]
    return {twin: int8 / whole for twin, (whole, int8) in zip(TWINS.values(), times, strict=True)}


def read_methods(path: Path) -> dict[str, dict]:
    return {row["method"]: row for row in map(json.loads, gzip.decompress(path.read_bytes()).splitlines())}


def measure_all(model: str, methods: dict) -> dict:
    """Latency of every size chosen, as a share of the whole network's in the same process."""
    network = load(model, tokens=32)
    orders = [method["orders"] for method in methods.values()]
    assert all(order == orders[0] for order in orders)  # all start from the same importance, so blocks go alike
    partition = Partition.of(network).ordered(orders[0])
    rows = [row for method in methods.values() for row in method["rows"]]
    found: dict[str, dict] = {}
    for target in dict.fromkeys(row["target"] for row in methods["ours"]["rows"]):
        every = [tuple(sizes) for row in rows if row["target"] == target for sizes in row["sizes"]]
        in_float = [sizes for sizes in every if sizes[0] != INT8]
        rounded = [sizes[1:] for sizes in every if sizes[0] == INT8]
        found[target] = measure_sizes(network, partition, in_float, target)
        if rounded:  # with inputs to set ranges by, a network is built in int8; the whole one stays in float
            int8 = network.replace(calibration=(network.inputs,))
            made = measure_sizes(int8, partition, rounded, target)
            found[target] |= {f"{INT8} {sizes}": share for sizes, share in made.items()}
    return found


def measure_sizes(
    network: Network, partition: Partition, every: Sequence[tuple[int, ...]], target: str
) -> dict[str, list[float]]:
    """The share of the whole network's latency, and its standard error, of sizes in the order of the modules."""
    keys, names = list(dict.fromkeys(every)), [module.name for module in partition]
    parts, shape = Parts.of(network, partition), Shape(batch=1, tokens=32)
    swept = sweep(network, parts, [dict(zip(names, key, strict=True)) for key in keys], working_target(target), shape)
    print(f"{target}: {len(swept.samples)} of {len(keys)} measured in {network.precision}", flush=True)
    whole = swept.baseline.value
    return {
        " ".join(map(str, keys[index])): [
            round(sample.latency_ms / whole, 4),
            round((sample.stderr_ms or 0.0) / whole, 4),
        ]
        for index, sample in swept.samples.items()
    }


if __name__ == "__main__":
    main()
