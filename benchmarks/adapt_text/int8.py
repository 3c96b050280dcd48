"""The whole frozen network in int8 by each runtime's own tool: its accuracy on the episodes, and its latency."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from judge import SHAPE
from suite import SUITES, read_suite

from apportion.device.answers import answers, build
from apportion.device.measure import Candidate, measure
from apportion.device.measure import Shape as InputShape
from apportion.device.probe import working_target
from apportion.methods.adapt.pool import Pool
from apportion.models.network import Network, read_output
from apportion.models.save import save
from apportion.tasks.episode import Sampler
from apportion.tasks.heads import class_means, cosines

TARGETS = ("ort-cpu-1t", "openvino-cpu-1t")
EPISODES = 60
CALIBRATION = 32


def judge_int8(suite_name: str) -> dict:
    """Accuracy by target and side on the first episodes that the methods were judged on, and the share of latency."""
    suite = read_suite(suite_name, None, 400)
    network, shape = suite.network, InputShape(batch=1, tokens=32)
    seen = [row_of(suite.read["train"][n % len(suite.read["train"])], n, network) for n in range(CALIBRATION)]
    pools = {pool.name: pool for side in ("id", "ood") for pool in suite.read[side]}
    samplers = {side: Sampler(getattr(suite.loaded, side), SHAPE, seed=77) for side in ("id", "ood")}
    episodes = [(side, sampler.episode(n)) for side, sampler in samplers.items() for n in range(EPISODES)]
    wanted = sorted({(e.domain, int(row)) for _, e in episodes for part in (e.support, e.query) for row in part.row_N})
    batches = [row_of(pools[domain], row, network) for domain, row in wanted]
    found = {}
    for name in TARGETS:
        target = working_target(name)
        with tempfile.TemporaryDirectory() as scratch:
            save(network.replace(calibration=tuple(seen)), Path(scratch))
            candidate = Candidate(name="int8", ref=scratch)
            outputs = answers(build(candidate, target, shape), target, batches)
            whole = Candidate(name="whole", ref=SUITES[suite_name][0])
            ratio = measure([whole, candidate], target, shape, processes=3).require().ratio("int8", "whole")
        feature = [
            read_output(network, tuple(out), batch)[0].float() for out, batch in zip(outputs, batches, strict=True)
        ]
        place = {key: number for number, key in enumerate(wanted)}
        accuracy: dict[str, list[float]] = {"id": [], "ood": []}
        for side, episode in episodes:
            both = [
                torch.stack([feature[place[episode.domain, int(row)]] for row in part.row_N])
                for part in (episode.support, episode.query)
            ]
            mean_WF = class_means(both[0], torch.from_numpy(episode.support.label_N), episode.ways)
            right_Q = cosines(both[1], mean_WF).argmax(-1).numpy() == episode.query.label_N
            accuracy[side].append(round(float(np.mean(right_Q)), 4))
        found[name] = {"ratio": round(ratio.value, 4), "stderr": round(ratio.stderr, 4), **accuracy}
        print(f"int8 on {name}: {ratio.value:.3f} of the latency", flush=True)
    return found


def row_of(pool: Pool, row: int, network: Network) -> dict[str, torch.Tensor]:
    """One example in exactly the shape of the network's inputs."""
    given = pool.at(np.array([row]))
    if pool.length_N is None:
        return given
    length = next(iter(network.inputs.values())).shape[1]
    padded = {name: torch.zeros(1, length, dtype=torch.long) for name in network.inputs}
    for name, tensor in given.items():
        if name in padded:
            padded[name][0, : min(length, tensor.shape[1])] = tensor[0, :length]
    return padded
