"""Text domains in one gzip'd table each: BANKING77, CLINC150, SNIPS and TREC."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from apportion.errors import DataError
from apportion.tasks.archive import read_gzip
from apportion.tasks.domain import Domain, find_file, text_domain
from apportion.tasks.domains.entry import Entry

POOL = ("train", "valid", "test")
_TREC = {"0": "description", "1": "entity", "2": "abbreviation", "3": "human", "4": "location", "5": "number"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of rows ``split, label, text`` and what it must hash to."""

    file: str
    digest: str
    summary: str
    licence: str
    provenance: str


SOURCES = {
    "banking77": Source(
        file="text/banking77.tsv.gz",
        digest="5c78d4df0dc8d77de5ae3160052c5118cf08c9af8775f4b68a7a2a40e986f1dd",
        summary="77 intents of bank customers",
        licence="CC BY 4.0",
        provenance="PolyAI task-specific-datasets, splits of jianguoz/Few-Shot-Intent-Detection",
    ),
    "clinc150": Source(
        file="text/clinc150.tsv.gz",
        digest="63f1789725d0a2c531f5d7d0fb9baf9e94df0fc0950c221ba837e294f40b8db9",
        summary="150 intents of an assistant's users, in ten domains",
        licence="CC BY 3.0",
        provenance="clinc/oos-eval, splits of jianguoz/Few-Shot-Intent-Detection",
    ),
    "snips": Source(
        file="text/snips.tsv.gz",
        digest="10b16e9dfc3f9b75ccdbeaaa85d8a1a25a595bbdbf53f7814cc9b345be61aedd",
        summary="7 intents of a voice assistant",
        licence="CC0",
        provenance="Snips NLU benchmark, splits of jianguoz/Few-Shot-Intent-Detection",
    ),
    "trec": Source(
        file="text/trec6.tsv.gz",
        digest="a598ab7108e6298a8282c244c0335db204f319841ac900b7aa850002bbbd4c28",
        summary="6 types of questions",
        licence="research use",
        provenance="UIUC question classification, file of harvardnlp/sent-conv-torch",
    ),
}


def read_rows(path: Path) -> list[tuple[str, str, str]]:
    """Rows ``split, label, text`` of a gzip'd table."""
    rows = [line.split("\t") for line in read_gzip(path).decode("utf-8").splitlines()[1:]]
    if any(len(row) != 3 for row in rows):
        raise DataError(f"{path} has rows without the three columns split, label, text; fetch it again")
    return [(split, label, text) for split, label, text in rows]


@lru_cache(maxsize=8)
def rows_of(name: str) -> tuple[tuple[str, str, str], ...]:
    """All rows of a source in the order of its file, labels in words."""
    source = SOURCES[name]
    rows = read_rows(find_file(source.file, source.digest))
    return tuple((split, _TREC[label] if name == "trec" else label, text) for split, label, text in rows)


def load_intents(name: str) -> Domain:
    """The texts of train, valid and test, each once; the fixed few-shot rows, which repeat train, are in ``fixed``."""
    source = SOURCES[name]
    rows = [row for row in rows_of(name) if row[0] in POOL]
    return text_domain(
        name=name,
        texts=[text for _, _, text in rows],
        labels=[label for _, label, _ in rows],
        splits=[split for split, _, _ in rows],
        licence=source.licence,
        provenance=source.provenance,
        checksum=source.digest,
    )


ENTRIES = {
    name: Entry(kind="text", summary=source.summary, licence=source.licence, load=partial(load_intents, name))
    for name, source in SOURCES.items()
}
