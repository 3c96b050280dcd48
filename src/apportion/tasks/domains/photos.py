"""Image domains in one zip of class folders each: groceries, fruits, leaf diseases, hand signs, MNIST digits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from apportion.tasks.archive import read_zip
from apportion.tasks.domain import Domain, find_file
from apportion.tasks.domains.entry import Entry
from apportion.tasks.domains.folder import from_named


@dataclass(frozen=True, kw_only=True)
class Source:
    """A zip and what it must hash to."""

    digest: str
    summary: str
    licence: str
    provenance: str


SOURCES = {
    "grocery": Source(
        digest="87f7bfb245178df6f8e171d705c44901519e7e77cdff43650a18259ede62db7b",
        summary="30 classes of groceries photographed in shops",
        licence="MIT",
        provenance="marcusklasson/GroceryStoreDataset, every n-th file, at most 128 px",
    ),
    "fruits360": Source(
        digest="a82de85cebde0d57e5f436588c03f79375af66debc9b16dfa1bcc146d3425d16",
        summary="40 fruits on white",
        licence="MIT",
        provenance="Horea94/Fruit-Images-Dataset, every n-th file",
    ),
    "plantdoc": Source(
        digest="dd3efdaacddff4dcf42ec968f5722f57a6c81d1e9ccba6c8a41b7939916cfc1c",
        summary="20 leaf diseases photographed in the field",
        licence="CC BY 4.0",
        provenance="pratikkayal/PlantDoc-Dataset, every n-th file, at most 128 px",
    ),
    "sign_digits": Source(
        digest="c6689458b9c9b9b2720f93eef6a33be1244ab64f0fa393a2d267ed9c51cd1992",
        summary="10 hand signs for digits",
        licence="Apache-2.0",
        provenance="ardamavi/Sign-Language-Digits-Dataset, every n-th file",
    ),
    "mnist": Source(
        digest="c41765c77530b80c2cc6ce4256bcf0247838fefd15294024d56fe18e53bfda51",
        summary="10 handwritten digits",
        licence="MIT",
        provenance="rasbt/mnist-pngs, every n-th file",
    ),
}


def load_photos(name: str) -> Domain:
    source = SOURCES[name]
    path = find_file(f"vision/{name}.zip", source.digest)
    return from_named(name, read_zip(path), source.digest, source.licence, source.provenance, strict=True)


ENTRIES = {
    name: Entry(kind="image", summary=source.summary, licence=source.licence, load=partial(load_photos, name))
    for name, source in SOURCES.items()
}
