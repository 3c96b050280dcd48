"""Trains the image networks of the comparison, on the training part of the tools' images alone.

    .venv/bin/python benchmarks/compress_vs_peers/train.py [resnet20] [mobilenetv2] [resnet20_guarded]

Takes about ten seconds each on a GPU, twenty minutes on two cores; the weights that the benchmark uses are in
``weights``, in half precision. A ``_guarded`` one does without the images that ``fit --quality-floor`` guards with.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.compress_vs_peers import networks

EPOCHS, BATCH, RATE = 60, 128, 0.1


def train(module: nn.Module, pixel_NCHW: Tensor, label_N: Tensor, device: str, epochs: int = EPOCHS) -> nn.Module:
    """Plain supervised training: SGD with momentum on one cycle of the rate, images flipped and shifted by chance."""
    module.to(device).train()
    pixel_NCHW, label_N = pixel_NCHW.to(device), label_N.to(device)
    generator = torch.Generator(device).manual_seed(0)
    steps = epochs * (len(label_N) // BATCH)
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps)
    for step in range(steps):
        row_B = torch.randint(len(label_N), (BATCH,), generator=generator, device=device)
        logit_BK = module(shifted(pixel_NCHW[row_B], generator))
        loss = nn.functional.cross_entropy(logit_BK, label_N[row_B], label_smoothing=0.05)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        schedule.step()
        if step % 500 == 0:
            print(f"  step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    return module.cpu().eval()


def shifted(pixel_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Half the images mirrored, and all moved by up to three pixels to one side."""
    device, side = pixel_BCHW.device, pixel_BCHW.shape[-1]
    flip_B = torch.rand(len(pixel_BCHW), generator=generator, device=device) < 0.5
    pixel_BCHW = torch.where(flip_B[:, None, None, None], pixel_BCHW.flip(-1), pixel_BCHW)
    padded = nn.functional.pad(pixel_BCHW, (3, 3, 3, 3), value=-1.0)
    top, left = torch.randint(7, (2,), generator=generator, device=device).tolist()
    return padded[:, :, top : top + side, left : left + side]


def main() -> None:
    from benchmarks.compress_vs_peers.pictures import tools_zip
    from safetensors.torch import save_file

    from apportion.models.network import Network, Origin
    from apportion.tasks.batches import load_splits

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in sys.argv[1:] or ("resnet20", "mobilenetv2"):
        torch.manual_seed(0)
        kind, _, guarded = name.partition("_")
        module = {"resnet20": networks.ResNet20, "mobilenetv2": networks.MobileNetV2}[kind]()
        inputs = {"pixel_values": torch.zeros(1, 3, networks.SIDE, networks.SIDE)}
        network = Network(module=module, inputs=inputs, origin=Origin(ref=name), readout="logits")
        data = str(tools_zip(Path("build/compress_vs_peers/fashion.zip")))
        training = load_splits(network, data, seed=0, guard=bool(guarded)).training
        pixel_NCHW = torch.cat([batch["pixel_values"] for batch in training.batches])
        trained = train(module, pixel_NCHW, training.label_N, device)
        networks.WEIGHTS.mkdir(exist_ok=True)
        state = {key: t.half() if t.is_floating_point() else t for key, t in trained.state_dict().items()}
        save_file(state, networks.WEIGHTS / f"{name}.safetensors")


if __name__ == "__main__":
    main()
