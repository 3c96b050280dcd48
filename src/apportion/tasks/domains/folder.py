"""A user's images: a folder, or a zip, whose subfolders are the classes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import numpy as np

from apportion.errors import DataError
from apportion.tasks.archive import MAX_MEMBER_BYTES, read_zip
from apportion.tasks.cache import Arrays, cached, file_digest
from apportion.tasks.domain import Domain
from apportion.tasks.pictures import DECODER, SUFFIXES, Pictures, decode, pillow

MAX_SIDE = 256


def load_folder(path: Path, *, strict: bool = False) -> Domain:
    """Images in ``path/<class>/…``; larger ones are scaled down to ``MAX_SIDE`` pixels.

    An unreadable image is named, left out and counted in ``notes``; ``strict`` refuses it.
    """
    files = _images(path, "*/**/*")
    if not files:
        raise DataError(f"{path} holds no images in class folders; put them in {path}/<class>/<name>.jpg or .png")
    named = ((file.relative_to(path).as_posix(), _bytes_of(file)) for file in files)
    return from_named(path.name, named, _digest(path, files), "the user's", f"folder {path.name}", strict=strict)


def is_unlabelled(path: Path) -> bool:
    """Whether a folder holds images, and none of them in a class folder."""
    return path.is_dir() and bool(_images(path, "*")) and not _images(path, "*/**/*")


def load_unlabelled(path: Path) -> Domain:
    """The images that lie in a folder itself, as one class that says nothing."""
    files = _images(path, "*")
    named = ((f"images/{file.name}", _bytes_of(file)) for file in files)
    return from_named(path.name, named, _digest(path, files), "the user's", f"folder {path.name}")


def _images(path: Path, pattern: str) -> list[Path]:
    return sorted(
        file
        for file in path.glob(pattern)
        if file.suffix.lower() in SUFFIXES and file.is_file() and file.resolve().is_relative_to(path.resolve())
    )


def _digest(path: Path, files: Iterable[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0{file_digest(file)}\n".encode())
    return total.hexdigest()


def load_archive(path: Path, *, strict: bool = False) -> Domain:
    """Images in a zip of class folders, which is read without unpacking."""
    return from_named(path.stem, read_zip(path), file_digest(path), "the user's", f"archive {path.name}", strict=strict)


def from_named(
    name: str, files: Iterable[tuple[str, bytes]], checksum: str, licence: str, provenance: str, *, strict: bool = False
) -> Domain:
    """A domain of the images among named files ``class/…``, decoded once and then read from the cache."""
    key = {"checksum": checksum, "decoder": DECODER, "max_side": MAX_SIDE, "strict": strict}
    arrays = cached("images", key, lambda: _decode_all(name, files, strict))
    classes, skipped = (_strings(arrays[part]) for part in ("classes", "skipped"))
    notes = (f"{len(skipped)} unreadable images left out: {', '.join(skipped[:4])}",) if skipped else ()
    return Domain(
        name=name,
        kind="image",
        classes=classes,
        label_N=arrays["label"],
        content=Pictures(arrays),
        licence=licence,
        provenance=provenance,
        checksum=checksum,
        notes=notes,
    )


def _decode_all(name: str, files: Iterable[tuple[str, bytes]], strict: bool) -> Arrays:
    pillow()  # what is missing is told before any file is blamed
    images, labels, skipped = [], [], []
    for file_name, data in files:
        parts = PurePosixPath(file_name).parts
        if len(parts) < 2 or PurePosixPath(file_name).suffix.lower() not in SUFFIXES:
            continue
        try:
            images.append(decode(data, max_side=MAX_SIDE))
        except DataError as error:
            if strict:
                raise DataError(f"{name}: {file_name} is unreadable ({error}); mend it or leave out --strict") from None
            skipped.append(f"{file_name} ({error})")
            continue
        labels.append(parts[-2] if len(parts) == 2 else "/".join(parts[:-1]))
    if not images:
        raise DataError(f"{name} holds no readable image in class folders ({len(skipped)} are unreadable)")
    classes = sorted(set(labels))
    index = {label: place for place, label in enumerate(classes)}
    label_N = np.array([index[label] for label in labels], dtype=np.int64)
    return {**Pictures.pack(images), "label": label_N, "classes": _packed(classes), "skipped": _packed(skipped)}


def _bytes_of(file: Path) -> bytes:
    if file.stat().st_size > MAX_MEMBER_BYTES:
        raise DataError(f"{file} is larger than {MAX_MEMBER_BYTES} bytes; scale it down")
    return file.read_bytes()


def _packed(names: Iterable[str]) -> np.ndarray:
    return np.frombuffer("\0".join(names).encode(), dtype=np.uint8)


def _strings(packed: np.ndarray) -> tuple[str, ...]:
    return tuple(packed.tobytes().decode().split("\0")) if packed.size else ()
