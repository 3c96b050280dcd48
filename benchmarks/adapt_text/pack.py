"""Pack what training and judging need on a CUDA machine that has neither this environment nor the data.

    .venv/bin/python benchmarks/adapt_text/pack.py --suite text -o build/pack

There ``cuda.sh`` takes the folder: the suite's data, the library that traces networks, and the model where it does not
ship with the package, in half precision and without the embeddings of words that no text has.
"""

from __future__ import annotations

import argparse
import shutil
import tarfile
from pathlib import Path

import torch
import torch_pruning
from safetensors.torch import load_file, save_file
from suite import SUITES, read_suite

from apportion.models.load import load
from apportion.tasks.domain import data_root

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    model, kind = SUITES[args.suite]
    out = args.out / args.suite
    shutil.rmtree(out, ignore_errors=True)
    leave = shutil.ignore_patterns("__pycache__")
    shutil.copytree(data_root() / kind, out / "data" / kind)
    shutil.copytree(Path(torch_pruning.__file__).parent, out / "lib" / "torch_pruning", ignore=leave)
    if args.suite == "text":
        pack_encoder(model, out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 1e6:.0f} MB")


def pack_encoder(model: str, out: Path) -> None:
    """The model's folder as an archive, its weights halved and compressible."""
    network = load(model, tokens=32)
    folder, draft = Path(network.origin.folder), out / model
    draft.mkdir(parents=True)
    for name in FILES:
        if (folder / name).is_file():
            shutil.copy(folder / name, draft)
    read = read_suite("text", None, 10_000).read
    seen = torch.cat([pool.inputs["input_ids"].flatten() for side in read.values() for pool in side]).unique()
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("word_embeddings.weight"):
            tensors[name] = torch.zeros_like(tensor).index_copy(0, seen, tensor[seen])
    halves = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file(halves, draft / "model.safetensors")
    with tarfile.open(out / f"{model}.tgz", "w:gz") as archive:
        archive.add(draft, model)
    shutil.rmtree(draft)


if __name__ == "__main__":
    main()
