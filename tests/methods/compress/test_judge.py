"""The judge: likeness tells cuts apart that quality does not, from one pass over the examples."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.methods.compress.test_repair import examples_of

from apportion.methods.compress.judge import LIKENESS, Judge
from apportion.models.load import load
from apportion.tasks.agreement import Agreement


def test_likeness_falls_with_every_change_and_quality_is_the_meters_own(generator):
    network = load("tests.factories:small_cnn")
    examples = examples_of(network, generator)
    meter = Agreement(network, examples)
    meters = Judge(network, meter, examples).meters()
    assert set(meters) == {"quality", LIKENESS}
    assert meters[LIKENESS].read(network).value == 0
    changed = network.replace(module=_shifted(network.module, 1e-3))
    assert meters["quality"].read(changed) == meter.read(changed)
    assert meters[LIKENESS].read(changed).value < 0
    further = network.replace(module=_shifted(network.module, 1e-1))
    assert meters[LIKENESS].read(further).value < meters[LIKENESS].read(changed).value


def test_a_network_is_run_once_for_both_readings(generator):
    network = load("tests.factories:small_cnn")
    examples = examples_of(network, generator)
    meters = Judge(network, Agreement(network, examples), examples).meters()
    other = replace(network, module=_shifted(network.module, 0.1))
    calls = []
    other.module.register_forward_hook(lambda *_: calls.append(1))
    for meter in meters.values():
        meter.read(other)
    assert len(calls) == len(examples.batches)


def _shifted(module, amount):
    import copy

    module = copy.deepcopy(module)
    with torch.no_grad():
        module.head.weight.add_(
            amount * torch.randn(module.head.weight.shape, generator=torch.Generator().manual_seed(0))
        )
    return module
