"""Fine-tunes one pretrained encoder on unlike domains: the sources of the benchmark. Needs torch, transformers, numpy.

python benchmarks/compose_tasks/train_sources.py --model MODEL_FOLDER --texts texts.json -o build/compose_tasks/sources

MODEL_FOLDER holds all-MiniLM-L6-v2; texts.json is written by ``run.py --prepare`` and holds the texts of every class
that each source may see. Uses a CUDA device where there is one. Each source is a folder that transformers loads.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--names", nargs="*", help="sources to train; snips-1 is snips with seed 1, default all once")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    domains = json.loads(options.texts.read_text())
    for name in options.names or domains:
        out, (domain, _, seed) = options.out / name, name.partition("-")
        if (out / "config.json").is_file():
            continue
        began = time.perf_counter()
        model = AutoModel.from_pretrained(options.model).to(device)
        losses = fine_tune(model, tokenizer, domains[domain], options.steps, int(seed or 0), device)
        draft = out.with_name(f".{out.name}.tmp")
        shutil.rmtree(draft, ignore_errors=True)
        model.save_pretrained(draft)
        for path in options.model.glob("*token*"):
            shutil.copyfile(path, draft / path.name)
        draft.rename(out)
        print(
            f"{out.name}: {len(domains[domain])} classes, loss {losses[0]:.3f} to {losses[1]:.3f}, "
            f"{time.perf_counter() - began:.0f} s on {device}",
            flush=True,
        )


def fine_tune(model, tokenizer, texts, steps: int, seed: int, device: str) -> tuple[float, float]:
    """Episodes of eight classes with four texts each; every text is judged by class means that leave it out."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model.train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-5, total_steps=steps)
    classes, losses = sorted(texts), []
    for _ in range(steps):
        chosen = rng.choice(len(classes), min(8, len(classes)), replace=False)
        batch, labels = [], []
        for number, place in enumerate(chosen):
            pool = texts[classes[place]]
            batch += [pool[n] for n in rng.choice(len(pool), 4, replace=False)]
            labels += [number] * 4
        encoded = tokenizer(batch, padding=True, truncation=True, max_length=64, return_tensors="pt").to(device)
        hidden = model(**encoded).last_hidden_state
        mask = encoded["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        feature = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        loss = left_out_loss(feature, torch.tensor(labels, device=device))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(float(loss.detach()))
    model.eval()
    tenth = max(1, steps // 10)
    return sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth


def left_out_loss(feature: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    onehot = torch.nn.functional.one_hot(label).to(feature.dtype)
    total, count = onehot.T @ feature, onehot.sum(0)
    score = -torch.cdist(feature[None], (total / count[:, None])[None])[0].square()
    own = -(feature - (total[label] - feature) / (count[label] - 1)[:, None]).square().sum(-1)
    return torch.nn.functional.cross_entropy(10 * score.scatter(1, label[:, None], own[:, None]), label)


if __name__ == "__main__":
    main()
