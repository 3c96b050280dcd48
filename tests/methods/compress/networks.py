"""Suite mix-in for rules on networks: a network's state is its tensors, its edits and how it is quantised."""

from __future__ import annotations

import copy

import pytest
import torch

from apportion.errors import KnobError


class Networks:
    def snapshot(self, model):
        tensors = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
        for place, batch in enumerate(model.calibration):
            tensors |= {f"calibration {place} {name}": tensor.clone() for name, tensor in batch.items()}
        return tensors, copy.deepcopy(model.edits), model.int8

    def same(self, one, other):
        (tensors, *rest), (others, *other_rest) = one, other
        return (
            tensors.keys() == others.keys()
            and rest == other_rest
            and all(torch.equal(tensors[name], others[name]) for name in tensors)
        )

    def test_a_value_outside_the_domain_is_refused(self, rule, knob, model):
        before = self.snapshot(model)
        for value in (-1, 0.123, "int4"):
            with pytest.raises(KnobError, match="takes one of"):
                rule.apply(model, knob, value)
        assert self.same(self.snapshot(model), before)

    def test_values_lead_to_different_networks(self, rule, knob, model):
        found = [self.snapshot(rule.apply(model, knob, value)) for value in knob.values]
        assert not any(self.same(one, other) for i, one in enumerate(found) for other in found[:i])
