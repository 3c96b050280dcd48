"""After which block is the class token of vit-s14 most useful? Its file was trained for saliency maps.

.venv/bin/python benchmarks/fewshot_reference/vit_blocks.py
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import numpy as np
import torch
from run import capped

from apportion.models import load
from apportion.models.backbones.onnx_weights import read_vit_s14
from apportion.models.registry import BUILT_IN
from apportion.tasks.domains import load_domain
from apportion.tasks.episode import Sampler, Shape
from apportion.tasks.features import Features, image_inputs
from apportion.tasks.heads import HEADS
from apportion.tasks.scores import score_episodes


def main() -> None:
    entry = BUILT_IN["vit-s14"]
    network = load("vit-s14")  # checks the file
    path = importlib.metadata.distribution(entry.package).locate_file(f"{entry.folder}/{next(iter(entry.digests))}")
    whole = read_vit_s14(Path(str(path)), num_blocks=12).eval()
    print("| domain | blocks | prototype, % | ridge, % |\n|---|---|---|---|")
    for name in ("grocery", "sign_digits"):
        domain = capped(load_domain(name), quick=True)
        episodes = list(Sampler(domain, Shape(), seed=0).episodes(200))
        with torch.inference_mode():
            tokens = []
            for start in range(0, len(domain), 25):
                images = [domain.content[row] for row in range(start, min(start + 25, len(domain)))]
                states = whole(**image_inputs(network, images), output_hidden_states=True).hidden_states
                tokens.append(torch.stack([whole.layernorm(state[:, 0]) for state in states], dim=1))
            token_NLD = torch.nn.functional.normalize(torch.cat(tokens), dim=-1)
        for blocks in range(8, 13):
            table = {domain.name: Features(np.arange(len(domain)), token_NLD[:, blocks].numpy())}
            cells = [score_episodes(episodes, table, HEADS[head]).reading().value for head in ("prototype", "ridge")]
            print(f"| {name} | {blocks} | {100 * cells[0]:.1f} | {100 * cells[1]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
