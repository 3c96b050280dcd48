"""Corruptions of texts in five severities: typos, casing, paraphrase by templates, an instruction before the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

Rewrite = Callable[[str, int, np.random.Generator], str]

_TYPO_RATIO = (0.02, 0.04, 0.08, 0.12, 0.18)  # of the letters
_CASE_RATIO = (0.1, 0.25, 0.5, 0.75, 1.0)  # of the words
_TEXT_RATIO = (0.2, 0.4, 0.6, 0.8, 1.0)  # of the texts
_ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_NEIGHBOURS = {
    letter: "".join(row[place] for place in (at - 1, at + 1) if 0 <= place < len(row))
    for row in _ROWS
    for at, letter in enumerate(row)
}
_TEMPLATES = (
    "{}, please",
    "hi there, {}",
    "i was wondering: {}",
    "quick question, {}",
    "so {} if that is possible",
    "what i mean is: {}",
    "{} thanks in advance",
    "could you help me with this: {}",
)
_SYNONYMS = {
    "what's": "what is",
    "i'm": "i am",
    "can't": "can not",
    "don't": "do not",
    "want": "would like",
    "need": "require",
    "tell": "let",
    "show": "display",
    "buy": "purchase",
    "help": "assist",
    "get": "obtain",
    "start": "begin",
    "find": "locate",
}
_INSTRUCTIONS = (
    "Classify the following request: ",
    "Below is what a user wrote. Decide what it is about. Text: ",
    "You are a helpful assistant. The user says: ",
    "### Instruction: name the intent. ### Input: ",
)


def typos(text: str, severity: int, rng: np.random.Generator) -> str:
    """Letters swapped, dropped, doubled or hit beside; at least one where the text has a letter."""
    letters = list(text)
    places = [place for place, letter in enumerate(letters) if letter.lower() in _NEIGHBOURS]
    if not places:
        return text
    count = max(1, round(_TYPO_RATIO[severity - 1] * len(places)))
    for place in sorted(rng.choice(places, size=min(count, len(places)), replace=False), reverse=True):
        kind = rng.integers(4)
        if kind == 0 and place + 1 < len(letters):
            letters[place : place + 2] = [letters[place + 1], letters[place]]
        elif kind == 1 and len(letters) > 1:
            del letters[place]
        elif kind == 2:
            letters.insert(place, letters[place])
        else:
            letters[place] = str(rng.choice(list(_NEIGHBOURS[letters[place].lower()])))
    return "".join(letters)


def casing(text: str, severity: int, rng: np.random.Generator) -> str:
    """Some words in capitals."""
    words = re.split(r"(\s+)", text)
    return "".join(word.upper() if rng.random() < _CASE_RATIO[severity - 1] else word for word in words)


def paraphrase(text: str, severity: int, rng: np.random.Generator) -> str:
    """The text with some words exchanged, inside a template of talk that does not change what is meant."""
    if rng.random() >= _TEXT_RATIO[severity - 1]:
        return text
    words = [_SYNONYMS.get(word.lower(), word) for word in text.split(" ")]
    return str(rng.choice(_TEMPLATES)).format(" ".join(words).replace("{", "").replace("}", ""))


def instruction(text: str, severity: int, rng: np.random.Generator) -> str:
    """The text after an instruction, as assistants are often fed."""
    return str(rng.choice(_INSTRUCTIONS)) + text if rng.random() < _TEXT_RATIO[severity - 1] else text


WORD_CORRUPTIONS: Mapping[str, Rewrite] = {
    "typos": typos,
    "casing": casing,
    "paraphrase": paraphrase,
    "instruction": instruction,
}
