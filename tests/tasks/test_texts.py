"""Texts from users' files and from the demo's package."""

from __future__ import annotations

import json

import pytest

from apportion.errors import DataError
from apportion.tasks.texts import demo_texts, load_texts


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "one\ntwo\n\none\n  three \n"),
        ("a.csv", 'id,text\n1,one\n2,two\n3,"one"\n4,three\n'),
        ("a.tsv", "label\tsentence\nx\tone\ny\ttwo\nx\tthree\n"),
        ("a.jsonl", "\n".join(json.dumps({"text": text}) for text in ("one", "two", "two", "three"))),
        ("bom.txt", "\ufeffone\ntwo\nthree"),
    ],
)
def test_every_format_gives_each_text_once_in_order(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert load_texts(path) == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"id,label\n1,x\n", "columns id, label"),
        ("a.txt", b"caf\xe9\nx\n", "not UTF-8 at byte 3"),
        ("a.txt", b"one\none\n", "1 distinct"),
        ("a.jsonl", b"{broken", "can't be read"),
        ("a.jsonl", b"[1]\n[2]\n", "one JSON object a line"),
        ("a.parquet", b"PAR1", "unknown ending"),
        ("a.csv", b"", "columns none"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_texts(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no data file .*gone\.txt"):
        load_texts(tmp_path / "gone.txt")


@pytest.mark.usefixtures("minilm_installed")
def test_the_demo_has_hundreds_of_distinct_english_sentences():
    texts = demo_texts()
    assert len(texts) > 1000
    assert len(set(texts)) == len(texts)
    assert any(text.startswith("What is") for text in texts)
