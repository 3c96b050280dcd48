"""Questions by topic from the package ``chatterbot-corpus``, read as files without importing it."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path

import yaml

from apportion.errors import DataError
from apportion.tasks.domain import Domain, text_domain
from apportion.tasks.domains.entry import Entry

PACKAGE = "chatterbot-corpus"


def load_chatterbot() -> Domain:
    """The opening line of every English conversation; its class is the topic that the file is named after."""
    try:
        distribution = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise DataError(f"the package {PACKAGE} is not installed; run: pip install {PACKAGE}") from None
    folder = Path(str(distribution.locate_file("chatterbot_corpus/data/english")))
    texts, labels, total = [], [], hashlib.sha256()
    for path in sorted(folder.glob("*.yml")):
        data = path.read_bytes()
        total.update(data)
        for conversation in yaml.safe_load(data.decode("utf-8")).get("conversations") or []:
            texts.append(str(conversation[0]).strip())
            labels.append(path.stem)
    if not texts:
        raise DataError(f"{folder} holds no conversations; run: pip install --force-reinstall {PACKAGE}")
    return text_domain(
        name="chatterbot",
        texts=texts,
        labels=labels,
        licence="BSD-3-Clause",
        provenance=f"PyPI package {PACKAGE} {distribution.version}",
        checksum=total.hexdigest(),
    )


ENTRIES = {
    "chatterbot": Entry(
        kind="text", summary="opening lines of conversations by topic", licence="BSD-3-Clause", load=load_chatterbot
    )
}
