"""Pruning, low rank and zeros in one loop: a budget met by the file on disk, and a ledger that rebuilds the model."""

from __future__ import annotations

import pytest
import torch
from tests.models import zoo

from apportion.core.budget import Budget
from apportion.core.ledger import Ledger
from apportion.core.loop import budgeted_loop
from apportion.core.policy import Greedy, Scheduled
from apportion.device.meters import SizeOnDisk
from apportion.methods.compress.lowrank import LowRank, lowrank_knobs
from apportion.methods.compress.prune import Prune, prune_knobs
from apportion.methods.compress.sparsity import Sparsify, sparse_knobs
from apportion.models import Partition, load, save
from apportion.tasks.agreement import Agreement
from apportion.tasks.batches import Examples

POLICIES = {
    "greedy": Greedy(),
    "prune, factor, zero": Scheduled(("prune.*", "lowrank.*", "sparse.*")),
    "zero, factor, prune": Scheduled(("sparse.*", "lowrank.*", "prune.*")),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("name", "share"), [("bert", "50%"), ("resnet-basic", "40%")])
def test_rules_compose_in_any_order(name, share, policy, tmp_path):
    network = zoo.build(name, dtype=torch.float32)
    batches = tuple(zoo.inputs_for(name, seed=seed, dtype=torch.float32) for seed in (5, 6, 7))
    examples = Examples(batches, "noise")
    partition = Partition.of(network)
    budget = Budget.parse(f"size<={share}").resolve({"size": SizeOnDisk().read(network)})

    knobs = [
        *prune_knobs(partition, num_steps=2)[:3],  # too few to get there alone
        *lowrank_knobs(network, shares=(0.5,)),
        *sparse_knobs(network, budget, shares=(0.6,)),
    ]

    def run():
        with Ledger(tmp_path / "ledger.jsonl", run="test") as ledger:
            return budgeted_loop(
                network,
                knobs=knobs,
                rules={"prune": Prune(partition), "lowrank": LowRank(examples), "sparse": Sparsify(examples)},
                meters={"size": SizeOnDisk(), "quality": Agreement(network, examples)},
                budget=budget,
                policy=POLICIES[policy],
                ledger=ledger,
            )

    result = run()
    assert result.met
    moved = {knob.name.partition(".")[0] for knob in knobs if result.setting[knob.name] != knob.dearest}
    assert len(moved) > 1
    save(result.model, tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").stat().st_size <= budget.limits[0].value
    again, loaded = run().model, load(str(tmp_path / "model"), tokens=zoo.TOKENS)
    for other in (again, loaded):
        assert other.edits == result.model.edits
        state = other.module.state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in result.model.module.state_dict().items())
