"""How fast, and in how much memory, are checkpoints merged? apportion beside mergekit, in turns, on the same files.

.venv/bin/python benchmarks/compose_speed/run.py [--quick] [--threads 1]

The first run makes nine checkpoints of 438 MB and an environment of its own for mergekit under build/compose_speed
(6 GB on disk). Both tools run as commands in fresh processes, with a warm file cache.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import venv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from apportion.methods.compose.checkpoint import Checkpoint, blocks
from apportion.testing.summary import Summary

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORK = ROOT / "build" / "compose_speed"
PEER = "mergekit==0.1.5"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 16000,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
METHODS = {"linear": "linear", "ties": "ties", "dare": "dare_linear"}


@dataclass(frozen=True)
class Run:
    """One merge in a process of its own."""

    seconds: float
    anon_mb: float
    resident_mb: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four sources only, one turn each")
    parser.add_argument("--turns", type=int, help="of linear and DARE merges; TIES has one")
    parser.add_argument("--threads", type=int, default=1, help="of both tools")
    options = parser.parse_args()
    summary = Summary(HERE)
    counts, turns = ((4,), 1) if options.quick else ((4, 2, 8), 3)
    turns = options.turns or turns
    tool = _peer()
    base, sources = _checkpoints(max(counts))
    size = (base / "model.safetensors").stat().st_size
    rows = []
    for count in counts:
        for method in METHODS:
            repeats = 1 if method == "ties" else turns  # minutes each for mergekit
            rows.append(_compare(tool, method, base, sources[:count], repeats, options.threads))
            print(_line(rows[-1]), flush=True)
    share = next(row["copy_share"] for row in rows if row["method"] == "linear" and row["sources"] == 4)
    four = {row["method"]: row for row in rows if row["sources"] == 4}
    figures = {f"speedup_{method}": round(four[method]["speedup"], 2) for method in METHODS}
    figures |= {
        "peak_anon_mb": round(max(row["anon_mb"] for row in rows), 1),
        "mergekit_peak_anon_mb": round(max(row["peer_anon_mb"] for row in rows), 1),
        "copy_bandwidth_share": round(share, 3),
    }
    for row in rows:
        name = f"{row['method']}_{row['sources']}"
        figures |= {
            f"seconds_{name}": round(row["seconds"], 2),
            f"mergekit_seconds_{name}": round(row["peer_seconds"], 2),
        }
    print("\n".join(_table(rows)))
    print(f"\nshare of the machine's copy bandwidth that the linear merge of four uses, start-up left out: {share:.2f}")
    for method in ("linear", "ties"):
        worst = max(float(row["difference"]) for row in rows if row["method"] == method)
        print(f"numbers of the {method} merge that differ in any bit from mergekit's: {worst:.2%}")
    conditions = {
        "threads": options.threads,
        "load": round(os.getloadavg()[0], 2),
        "checkpoint_mb": round(size / 1e6, 1),
        "turns": turns,
    }
    peer = {"mergekit": PEER.partition("==")[2]}
    summary.write(figures, packages=("numpy",), quick=options.quick, rows=rows, conditions=conditions, peers=peer)


def _compare(tool: Path, method: str, base: Path, sources: list[Path], turns: int, threads: int) -> dict[str, object]:
    """Both tools in turns; the results of the linear merge must be the same to the last bit."""
    mine, theirs = WORK / "out_apportion", WORK / "out_mergekit"
    recipe = WORK / "recipe.yml"
    recipe.write_text(yaml.safe_dump(_recipe(method, base, sources)))
    ours: list[Run] = []
    peer: list[Run] = []
    inside: list[float] = []
    shares: list[float] = []
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    for _ in range(turns):
        for folder in (mine, theirs):
            shutil.rmtree(folder, ignore_errors=True)
        command = [str(Path(sys.executable).parent / "apportion"), "compose", *map(str, sources), "--method", method]
        command += ["--threads", str(threads), "-o", str(mine), "--json"]
        command += ["--base", str(base)] if method != "linear" else []
        command += {"linear": [], "ties": ["--density", "0.2"], "dare": ["--density", "0.5"]}[method]
        before = _copy_bandwidth(threads)
        run, output = _watch(command, env)
        ours.append(run)
        inside.append(json.loads(output)["seconds"])
        moved = (len(sources) + 1) * (base / "model.safetensors").stat().st_size
        shares.append(moved / inside[-1] / ((before + _copy_bandwidth(threads)) / 2))
        peer.append(_watch([str(tool), str(recipe), str(theirs), "--no-write-model-card"], env)[0])
    return {
        "method": method,
        "sources": len(sources),
        "turns": turns,
        "seconds": statistics.median(run.seconds for run in ours),
        "merge_seconds": statistics.median(inside),
        "copy_share": statistics.median(shares) if method == "linear" else None,
        "anon_mb": max(run.anon_mb for run in ours),
        "resident_mb": max(run.resident_mb for run in ours),
        "peer_seconds": statistics.median(run.seconds for run in peer),
        "peer_anon_mb": max(run.anon_mb for run in peer),
        "peer_resident_mb": max(run.resident_mb for run in peer),
        "speedup": statistics.median(b.seconds / a.seconds for a, b in zip(ours, peer, strict=True)),
        "difference": _difference(mine, theirs) if method != "dare" else None,
    }


def _recipe(method: str, base: Path, sources: list[Path]) -> dict[str, object]:
    parameters: dict[str, float] = {"weight": 1.0}
    if method != "linear":
        parameters["density"] = {"ties": 0.2, "dare": 0.5}[method]
    models = [{"model": str(source), "parameters": parameters} for source in sources]
    fields: dict[str, object] = {"merge_method": METHODS[method], "models": models, "dtype": "float32"}
    return fields if method == "linear" else {**fields, "base_model": str(base)}


def _watch(command: list[str], env: dict[str, str]) -> tuple[Run, str]:
    """Runs a command; its memory is read from /proc every few milliseconds."""
    peak = {"RssAnon": 0, "VmHWM": 0}
    began = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def poll() -> None:
        while process.poll() is None:
            try:
                text = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            for line in text.splitlines():
                name = line.partition(":")[0]
                if name in peak:
                    peak[name] = max(peak[name], int(line.split()[1]))
            time.sleep(0.004)

    watcher = threading.Thread(target=poll)
    watcher.start()
    out, err = process.communicate()
    seconds = time.perf_counter() - began
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{err[-2000:]}")
    return Run(seconds, peak["RssAnon"] * 1024 / 1e6, peak["VmHWM"] * 1024 / 1e6), out


def _difference(mine: Path, theirs: Path) -> float:
    """Share of the numbers that differ in any bit between the two results."""
    first, second = Checkpoint(mine), Checkpoint(theirs)
    if set(first.tensors) != set(second.tensors):
        raise SystemExit(f"the results hold different tensors: {set(first.tensors) ^ set(second.tensors)}")
    differing = total = 0
    for name, stored in first.tensors.items():
        for start, stop in blocks(stored.size):
            differing += int(np.count_nonzero(first.read(name, start, stop) != second.read(name, start, stop)))
        total += stored.size
    return differing / total


def _copy_bandwidth(threads: int) -> float:
    """Bytes read and written per second by copies of 128 MB, the best of several, on as many threads."""
    arrays = [(np.ones(1 << 25, np.float32), np.empty(1 << 25, np.float32)) for _ in range(threads)]
    best = math.inf
    for _ in range(7):
        workers = [threading.Thread(target=np.copyto, args=(to, source)) for source, to in arrays]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = min(best, time.perf_counter() - began)
    return 2 * sum(source.nbytes for source, _ in arrays) / best


def _checkpoints(count: int) -> tuple[Path, list[Path]]:
    """A base of random numbers and fine-tunes of it, of the shapes of a Llama with 109 million numbers."""
    folders = [WORK / "checkpoints" / name for name in ("base", *(f"s{n}" for n in range(8)))]
    for number, folder in enumerate(folders[: count + 1]):
        if not (folder / "config.json").is_file():
            print(f"making {folder.name}", file=sys.stderr)
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / "model.safetensors", number)
            (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
        with (folder / "model.safetensors").open("rb", buffering=0) as file:
            while file.read(1 << 24):  # warms the file cache
                pass
    return folders[0], folders[1 : count + 1]


def _write(path: Path, number: int) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in _shapes():
        size = 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    base, own = np.random.default_rng(0), np.random.default_rng(number)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, shape in _shapes():
            for start, stop in blocks(math.prod(shape)):
                value = base.standard_normal(stop - start, dtype=np.float32) * np.float32(0.02)
                if number:
                    value += own.standard_normal(stop - start, dtype=np.float32) * np.float32(0.001)
                file.write(value.tobytes())


def _shapes() -> list[tuple[str, list[int]]]:
    wide, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    shapes = [
        ("model.embed_tokens.weight", [vocab, wide]),
        ("lm_head.weight", [vocab, wide]),
        ("model.norm.weight", [wide]),
    ]
    for layer in range(12):
        stem = f"model.layers.{layer}"
        shapes += [(f"{stem}.self_attn.{part}_proj.weight", [wide, wide]) for part in "qkvo"]
        shapes += [(f"{stem}.mlp.{part}_proj.weight", [inner, wide]) for part in ("gate", "up")]
        shapes += [(f"{stem}.mlp.down_proj.weight", [wide, inner])]
        shapes += [(f"{stem}.{part}_layernorm.weight", [wide]) for part in ("input", "post_attention")]
    return sorted(shapes)


def _peer() -> Path:
    """The command of mergekit, in an environment of its own made on first use."""
    folder = WORK / "mergekit-env"
    command = folder / "bin" / "mergekit-yaml"
    if not (folder / "ready").is_file():
        print("making an environment for mergekit", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), PEER], check=True)
        (folder / "ready").touch()
    return command


def _table(rows: list[dict[str, object]]) -> list[str]:
    columns = ("merge", "sources", "apportion, s", "mergekit, s", "times faster", "anonymous, MB", "mergekit's")
    return [f"| {' | '.join((*columns, 'resident, MB', 'its'))} |", "|---" * 9 + "|", *map(_line, rows)]


def _line(row: dict[str, object]) -> str:
    numbers = [f"{row[key]:.2f}" for key in ("seconds", "peer_seconds")] + [f"{row['speedup']:.1f}"]
    numbers += [f"{row[key]:.0f}" for key in ("anon_mb", "peer_anon_mb", "resident_mb", "peer_resident_mb")]
    return f"| {' | '.join([str(row['method']), str(row['sources']), *numbers])} |"


if __name__ == "__main__":
    main()
