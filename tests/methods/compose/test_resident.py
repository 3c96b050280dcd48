"""A blend held in memory does what a blend on disk does."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.methods.compose.checkpoints import tiny_bert

from apportion.errors import ModelError
from apportion.methods.compose.blend import Blend, layer_groups
from apportion.methods.compose.resident import Resident, states_of
from apportion.methods.compose.source import open_source
from apportion.methods.compose.support import Support
from apportion.models.load import load


@pytest.mark.parametrize("by_layer", [False, True])
def test_both_blends_agree(tmp_path, by_layer, generator):
    folders = [tiny_bert(tmp_path / f"s{n}", n) for n in range(3)]
    ids_NT = torch.randint(0, 60, (8, 6), generator=generator)
    support = Support({"input_ids": ids_NT, "attention_mask": torch.ones_like(ids_NT)}, torch.arange(8) % 2, ("a", "b"))
    sources = [open_source(str(folder)) for folder in folders]
    groups = layer_groups(list(sources[0].tensors)) if by_layer else None
    on_disk = Blend(load(str(folders[0]), tokens=8), sources, groups)
    modules = [transformers.BertModel.from_pretrained(folder) for folder in folders]
    in_memory = Resident(load(str(folders[0]), tokens=8), states_of(modules), groups)
    weight_LS = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64).expand(len(on_disk.groups), -1)
    (first, slope), (second, other) = (blend.objective(support, weight_LS) for blend in (on_disk, in_memory))
    assert first == pytest.approx(second, rel=1e-5)
    torch.testing.assert_close(slope, other, rtol=1e-3, atol=1e-5)
    assert on_disk.loss(weight_LS, support) == pytest.approx(in_memory.loss(weight_LS, support), rel=1e-5)


def test_a_state_that_lacks_a_tensor_is_refused(tmp_path):
    network = load(str(tiny_bert(tmp_path / "s", 0)), tokens=8)
    with pytest.raises(ModelError, match="lacks the tensor"):
        Resident(network, [{}])
