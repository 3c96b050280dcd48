"""Pretrain the small ViT that ships as ``vit-64``: Omniglot and part of the photo classes, on a CUDA machine.

    python3 recipes/pretrain_vit.py --out FOLDER [--minutes 8]

Sees what the protocol ``vision`` lets it see, and nothing else: the published training characters in four rotations,
and three fifths of the classes of grocery, fruits360 and plantdoc. Loss: softmax over cosines to learned class vectors,
plus a supervised contrastive loss between two views. Leaves a Hugging Face style folder in half precision and the
training log; ends with few-shot accuracy on what was judged, seen or not. Needs torch, transformers and pillow.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from apportion.tasks.domain import Domain
from apportion.tasks.domains import load_domain
from apportion.tasks.episode import Sampler, Shape
from apportion.tasks.pictures import resize
from apportion.tasks.protocol import PROTOCOLS, load_protocol

SIDE, STORED = 64, 80  # pixels that the network sees, and that are kept to crop from
TEMPERATURE = 0.1
SCALE = 16.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--photos", type=float, default=0.25, help="share of photos in a batch")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / "training.jsonl").open("w")

    def tell(**fields: object) -> None:
        print(fields, flush=True)
        log.write(json.dumps(fields) + "\n")
        log.flush()

    loaded = load_protocol(PROTOCOLS["vision"], load_domain)
    train = [Images(domain, device) for domain in loaded.train]
    validation = Images(load_domain("omniglot-vinyals-val"), device)
    tell(train={one.name: [len(one.label_N), one.num_classes] for one in train}, dropped=dict(loaded.num_dropped))
    model = new_model().to(device)
    head = Head(model.config.hidden_size, sum(one.num_classes for one in train)).to(device)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    decayed = [p for p in (*model.parameters(), *head.parameters()) if p.dim() > 1]
    plain = [p for p in (*model.parameters(), *head.parameters()) if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98))
    compiled = torch.compile(model) if device == "cuda" else model
    began, step, running = time.perf_counter(), 0, 0.0
    share = 0.0
    while share < 1.0:
        share = (time.perf_counter() - began) / (60 * args.minutes)  # the schedule follows the clock
        for group in optimiser.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 500) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
        image_NCHW, label_N = draw(train, args.batch // 2, args.photos)
        view_NCHW = torch.cat([augment(image_NCHW), augment(image_NCHW)])
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            feature_ND = compiled(pixel_values=view_NCHW).last_hidden_state[:, 0].float()
        loss = head(feature_ND, label_N.repeat(2))
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *head.parameters()], 1.0)
        optimiser.step()
        average.update_parameters(model)
        step += 1
        if step == 5:  # compiled by now
            began = time.perf_counter()
        if step % 50 == 0:
            running = loss.item()
        if step % 2000 == 0:
            accuracy = judge(average.module, validation, Shape(ways=20, shots=1), 200)[0]
            tell(step=step, seconds=round(time.perf_counter() - began), loss=round(running, 4), omniglot_val=accuracy)
    final = average.module.eval()
    tell(step=step, seconds=round(time.perf_counter() - began), loss=round(running, 4))
    write(final, args.out)
    for side in ("id", "ood"):
        for domain in getattr(loaded, side):
            images = Images(domain, device)
            fine = {"5-way 5-shot": Shape(ways=5, shots=5), "5-way 1-shot": Shape(ways=5, shots=1)}
            if domain.name.startswith("omniglot"):
                fine["20-way 1-shot"] = Shape(ways=20, shots=1)
            found = {name: judge(final, images, shape, 600) for name, shape in fine.items()}
            tell(side=side, domain=domain.name, **found)
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    tell(device=gpu, torch=torch.__version__, transformers=transformers.__version__, seed=args.seed)


def new_model() -> transformers.ViTModel:
    config = transformers.ViTConfig(
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=1024,
        image_size=SIDE,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTModel(config, add_pooling_layer=False)


class Images:
    """A domain on the device, scaled to one size."""

    def __init__(self, domain: Domain, device: str) -> None:
        self.name, self.domain, self.num_classes = domain.name, domain, len(domain.classes)
        pixels = resize((domain.content[row] for row in range(len(domain))), STORED, STORED)
        self.pixel_NCHW = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().to(device)
        self.label_N = torch.from_numpy(domain.label_N).to(device)


class Head(nn.Module):
    """Cosine softmax over all classes, and contrast between examples of a class in a batch."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.class_KD = nn.Parameter(torch.randn(num_classes, width) * 0.02)
        self.project = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 128))

    def forward(self, feature_ND: Tensor, label_N: Tensor) -> Tensor:
        cosine_NK = functional.normalize(feature_ND, dim=-1) @ functional.normalize(self.class_KD, dim=-1).T
        classify = functional.cross_entropy(SCALE * cosine_NK, label_N, label_smoothing=0.1)
        point_NP = functional.normalize(self.project(feature_ND), dim=-1)
        alike_NN = point_NP @ point_NP.T / TEMPERATURE
        itself_NN = torch.eye(len(label_N), dtype=torch.bool, device=label_N.device)
        same_NN = (label_N[:, None] == label_N) & ~itself_NN
        log_NN = alike_NN - alike_NN.masked_fill(itself_NN, -1e9).logsumexp(1, keepdim=True)
        contrast = -(log_NN * same_NN).sum(1) / same_NN.sum(1).clamp_min(1)
        return classify + 0.5 * contrast.mean()


def draw(train: list[Images], num_images: int, photos: float) -> tuple[Tensor, Tensor]:
    """A batch: the share of photos spread evenly over their domains, the rest characters."""
    first = np.cumsum([0, *(one.num_classes for one in train)])
    characters = [one.name.startswith("omniglot") for one in train]
    images, labels = [], []
    for place, one in enumerate(train):
        share = (1 - photos) / sum(characters) if characters[place] else photos / (len(train) - sum(characters))
        row_N = torch.randint(len(one.label_N), (round(share * num_images),), device=one.label_N.device)
        images.append(one.pixel_NCHW[row_N])
        labels.append(one.label_N[row_N] + int(first[place]))
    return torch.cat(images), torch.cat(labels)


def augment(image_NCHW: Tensor) -> Tensor:
    """A random view: turned, scaled, moved, recoloured, inverted, partly hidden; in [-1, 1]."""
    num, device = len(image_NCHW), image_NCHW.device

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(num, *shape, device=device).uniform_(low, high)

    angle_N, scale_N = uniform(-0.3, 0.3), uniform(0.65, 1.15)
    cos_N, sin_N = scale_N * angle_N.cos(), scale_N * angle_N.sin()
    stretch_N = uniform(0.85, 1.18)
    shift_N2 = uniform(-0.15, 0.15, 2)
    affine_N23 = torch.stack(
        [
            torch.stack([cos_N * stretch_N, -sin_N, shift_N2[:, 0]], 1),
            torch.stack([sin_N, cos_N / stretch_N, shift_N2[:, 1]], 1),
        ],
        1,
    )
    grid = functional.affine_grid(affine_N23, [num, 3, SIDE, SIDE], align_corners=False)
    view = functional.grid_sample(image_NCHW.float() / 127.5 - 1, grid, padding_mode="border", align_corners=False)
    grey = view.mean(1, keepdim=True)
    view = grey + (view - grey) * uniform(0.0, 1.6, 1, 1, 1)
    view = view * uniform(0.6, 1.4, 1, 1, 1) + uniform(-0.3, 0.3, 1, 1, 1)
    view = torch.where(uniform(0, 1, 1, 1, 1) < 0.3, -view, view)
    corner_N2, length_N2 = uniform(0, 1, 2), uniform(0.1, 0.4, 2)
    place = torch.linspace(0, 1, SIDE, device=device)
    inside_NS = [(place >= corner_N2[:, i, None]) & (place < (corner_N2 + length_N2)[:, i, None]) for i in (0, 1)]
    hidden = inside_NS[0][:, None, :, None] & inside_NS[1][:, None, None, :] & (uniform(0, 1, 1, 1, 1) < 0.25)
    return view.masked_fill(hidden, 0.0).clamp(-1.2, 1.2)


@torch.no_grad()
def judge(model: nn.Module, images: Images, shape: Shape, num_episodes: int) -> tuple[float, float]:
    """Nearest class mean over episodes: accuracy in per cent and the half width of its 95 % interval."""
    model.eval()
    features = []
    for batch in images.pixel_NCHW.split(2048):
        small = functional.interpolate(batch.float() / 127.5 - 1, size=SIDE, mode="bilinear", antialias=True)
        features.append(functional.normalize(model(pixel_values=small).last_hidden_state[:, 0].float(), dim=-1))
    feature_ND = torch.cat(features).cpu()
    model.train()
    scores = []
    for episode in Sampler(images.domain, shape, seed=1).episodes(num_episodes):
        support_SD, label_S = feature_ND[episode.support.row_N], torch.from_numpy(episode.support.label_N)
        mean_WD = torch.stack([support_SD[label_S == place].mean(0) for place in range(episode.ways)])
        guess_Q = torch.cdist(feature_ND[episode.query.row_N], mean_WD).argmin(1).numpy()
        scores.append(float((guess_Q == episode.query.label_N).mean()))
    return round(100 * float(np.mean(scores)), 2), round(196 * float(np.std(scores)) / num_episodes**0.5, 2)


def write(model: nn.Module, folder: Path) -> None:
    state = {name: tensor.detach().half().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_diff_dict(), "architectures": ["ViTModel"], "model_type": "vit"}
    files = {
        "config.json": config,
        "preprocessor_config.json": {
            "size": {"height": SIDE, "width": SIDE},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        "1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
    }
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, sort_keys=True, default=str) + "\n")


if __name__ == "__main__":
    main()
