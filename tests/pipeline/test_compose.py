"""``apportion sources`` and ``apportion compose`` as a user runs them."""

from __future__ import annotations

import json

import pytest
import transformers
from tests.methods.compose.checkpoints import family, tensors, tiny_bert, write
from tests.pipeline.check import assert_one_line


def test_sources_are_added_listed_checked_composed_and_removed(apportion, tmp_path):
    for n in range(3):
        tiny_bert(tmp_path / f"s{n}", n)
    shop = ("--store", "store")
    assert apportion.json("sources", "add", "s0", *shop)["error_ratio"] == 0
    assert apportion.json("sources", "add", "s1", "--base", "s0", "--kind", "int8", *shop)["error_ratio"] < 0.01
    assert apportion.json("sources", "check", "s0", "s1", "s2", *shop)["fit"] is True
    listed = json.loads(apportion("sources", "list", *shop, "--json").stdout)
    assert [(row["name"], row["kind"], row["base"]) for row in listed] == [("s0", "whole", None), ("s1", "int8", "s0")]
    result = apportion.json("compose", "s1", "s2", "--method", "ties", "--base", "s0", "-o", "out", *shop)
    assert result["exit"] == 0
    transformers.AutoModel.from_pretrained(tmp_path / "out")
    assert_one_line(apportion("sources", "remove", "s0", *shop), 2, "base of s1")
    assert apportion("sources", "remove", "s1", *shop).returncode == 0
    assert apportion("sources", "check", *shop).returncode == 0


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("s0", "nowhere"), ("'nowhere'",)),
        (("s0", "s0"), ("same source",)),
        (("s0", "other"), ("layer.bias",)),
        (("s0", "s1", "--weights", "0.5,nan"), ("finite",)),
        (("s0", "s1", "--weights", "half"), ("half",)),
        (("s0", "s1", "--method", "ties"), ("--base",)),
        (("s0", "s1", "--skip", "head*"), ("head*",)),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(told, tmp_path, args, parts):
    family(tmp_path, 2)
    state = tensors(9)
    del state["layer.bias"]
    write(tmp_path / "other", state)
    assert_one_line(told("compose", *args, "-o", "out", "--json"), 2, *parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "args", "parts"),
    [
        ("text,label\nhello,a\nworld,a\n", (), ("one class",)),
        ("text,label\n", (), ("none",)),
        ("text,label\nhello,a\nworld,b\n", ("--method", "ties"), ("ties",)),
        ("text,label\nhello,a\nworld,b\n", ("--residual", "many"), ("many",)),
        ("text,label\nhello,a\nworld,b\n", ("--budget", "20MB"), ("20MB",)),
    ],
)
def test_a_support_that_makes_no_task_is_one_line(told, tmp_path, text, args, parts):
    family(tmp_path, 2)
    (tmp_path / "task.csv").write_text(text)
    assert_one_line(told("compose", "s0", "s1", "--support", "task.csv", *args, "-o", "out", "--json"), 2, *parts)
    assert not (tmp_path / "out").exists()


def test_settings_of_a_search_need_a_support(told, tmp_path):
    family(tmp_path, 2)
    assert_one_line(told("compose", "s0", "s1", "--max-sources", "1", "-o", "out", "--json"), 2, "--support")
