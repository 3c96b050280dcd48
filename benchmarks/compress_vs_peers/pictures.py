"""The pictures of the comparison: Fashion-MNIST as a zip of class folders for the tools, and a test part for none."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import torch
from PIL import Image

from apportion.models.network import Network
from apportion.tasks.batches import Examples
from apportion.tasks.domains import load_domain
from apportion.tasks.domains.fashion import DEBIAN_FOLDER
from apportion.tasks.features import image_inputs

NUM_TEST, NUM_TEST_DEBIAN = 2_000, 10_000


def tools_zip(path: Path) -> Path:
    """All images but the last ``NUM_TEST``, written once."""
    if not path.is_file():
        domain = load_domain("fashion_mnist")
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".tmp")
        with zipfile.ZipFile(draft, "w") as archive:
            for row in range(len(domain) - NUM_TEST):
                file = io.BytesIO()
                Image.fromarray(domain.content[row]).save(file, format="PNG")
                info = zipfile.ZipInfo(f"{domain.classes[domain.label_N[row]]}/{row:05d}.png")
                archive.writestr(info, file.getvalue())
        draft.replace(path)
    return path


def test_examples(network: Network) -> Examples:
    """Images that no tool sees, with classes numbered as in the zip, by name: 10,000 of the Debian package's others.

    Without the package, the ``NUM_TEST`` that the zip leaves out.
    """
    if (DEBIAN_FOLDER / "train-images-idx3-ubyte.gz").is_file():
        domain, rows = load_domain("fashion_mnist-debian"), range(NUM_TEST_DEBIAN)  # its training images come first
    else:
        domain = load_domain("fashion_mnist")
        rows = range(len(domain) - NUM_TEST, len(domain))
    place = {name: number for number, name in enumerate(sorted(domain.classes))}
    label_N = torch.tensor([place[domain.classes[domain.label_N[row]]] for row in rows])
    batches = tuple(
        image_inputs(network, [domain.content[row] for row in rows[start : start + 100]])
        for start in range(0, len(rows), 100)
    )
    return Examples(batches, f"{len(rows)} of {domain.name} that no tool saw", label_N)
