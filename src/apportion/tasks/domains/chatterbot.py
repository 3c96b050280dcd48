"""The opening line of every English conversation in ``chatterbot-corpus``; its class is the topic of its file."""

from __future__ import annotations

import hashlib

import yaml

from apportion.tasks.domains.entry import Examples, entry, package_file


def read() -> Examples:
    folder = package_file("chatterbot-corpus", "chatterbot_corpus/data/english")
    files = {path.stem: path.read_bytes() for path in sorted(folder.glob("*.yml"))}
    talks = {topic: yaml.safe_load(data.decode()).get("conversations") or [] for topic, data in files.items()}
    pairs = [(str(talk[0]).strip(), topic) for topic, of_topic in talks.items() for talk in of_topic]
    checksum = hashlib.sha256(b"".join(files.values())).hexdigest()
    return Examples([text for text, _ in pairs], [topic for _, topic in pairs], checksum)


ENTRIES = entry(
    "chatterbot",
    read,
    kind="text",
    summary="opening lines of conversations by topic",
    licence="BSD-3-Clause",
    provenance="PyPI package chatterbot-corpus",
)
