"""What makes checkpoints unfit for one another is told before anything is merged, naming the tensor."""

from __future__ import annotations

import json

import pytest
import torch
from tests.methods.compose.checkpoints import family, tensors, tiny_bert, write

from apportion.errors import ModelError
from apportion.methods.compose.compat import check_sources, kinship
from apportion.methods.compose.source import open_source


def opened(*folders):
    return [open_source(str(folder)) for folder in folders]


def test_a_family_fits(tmp_path):
    base, sources = family(tmp_path)
    assert check_sources(opened(*sources), open_source(str(base))) == []


def changed(tmp_path, **changes):
    state = {**tensors(1), **changes}
    return write(tmp_path / "other", {name: tensor for name, tensor in state.items() if tensor is not None})


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"layer.weight": torch.ones(40, 31)}, "'layer.weight' is 40×30"),
        ({"layer.bias": None}, "lacks the tensor 'layer.bias'"),
        ({"extra": torch.ones(2)}, "has the tensor 'extra'"),
        ({"layer.bias": torch.ones(40, dtype=torch.int32)}, "'layer.bias' is F32"),
    ],
)
def test_the_tensor_that_does_not_fit_is_named(tmp_path, changes, part):
    sources = opened(write(tmp_path / "first", tensors(0)), changed(tmp_path, **changes))
    with pytest.raises(ModelError, match=part) as caught:
        check_sources(sources)
    assert "\n" not in str(caught.value)


def test_integers_that_differ_are_refused_unless_skipped(tmp_path):
    sources = opened(
        write(tmp_path / "a", {**tensors(0), "ids": torch.arange(3)}),
        write(tmp_path / "b", {**tensors(1), "ids": torch.ones(3, dtype=torch.int64)}),
    )
    with pytest.raises(ModelError, match="'ids' of integers differs"):
        check_sources(sources)
    check_sources(sources, skip=["ids"])


def test_the_same_source_twice_is_refused_also_under_another_name(tmp_path):
    first, again = write(tmp_path / "a", tensors(0)), write(tmp_path / "b", tensors(0))
    with pytest.raises(ModelError, match="same source"):
        check_sources(opened(first, again))
    nearly = tensors(0)
    nearly["long"][2, 150_000] += 1e-3
    write(again, nearly)
    assert check_sources(opened(first, again)) == []


@pytest.mark.parametrize(
    ("field", "value"), [("architectures", ["BertForMaskedLM"]), ("num_attention_heads", 4), ("hidden_act", "relu")]
)
def test_configs_that_mean_another_network_are_refused(tmp_path, field, value):
    first, other = tiny_bert(tmp_path / "a", 0), tiny_bert(tmp_path / "b", 1)
    fields = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**fields, field: value}))
    with pytest.raises(ModelError, match="one architecture"):
        check_sources(opened(first, other))


def test_other_tokenizers_are_refused_and_other_spellings_of_one_are_not(tmp_path):
    first, other = tiny_bert(tmp_path / "a", 0), tiny_bert(tmp_path / "b", 1)
    fields = {"model": {"vocab": {"hello": 0, "world": 1}}, "added_tokens": [{"content": "[PAD]", "id": 2}]}
    (first / "tokenizer.json").write_text(json.dumps(fields))
    (other / "tokenizer.json").write_text(json.dumps({**fields, "truncation": None}, indent=3))
    check_sources(opened(first, other))
    fields["model"]["vocab"]["world"] = 3
    (other / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="token 'world'"):
        check_sources(opened(first, other))


def test_no_sources_at_all():
    with pytest.raises(ModelError, match="at least one"):
        check_sources([])


def test_kinship_tells_a_fine_tune_from_a_stranger(tmp_path):
    base, sources = family(tmp_path, 1, scale=0.1)
    stranger = write(tmp_path / "stranger", tensors(77))
    near, far = (kinship(open_source(str(base)), open_source(str(other))) for other in (sources[0], stranger))
    assert near == pytest.approx(0.1, rel=0.1)
    assert far == pytest.approx(2**0.5, rel=0.1)
