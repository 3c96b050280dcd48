"""What the rules of a run offer: knobs that change what its budget limits, and lines on rules that can't."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from apportion.core.budget import Budget
from apportion.core.knob import Knob
from apportion.core.rule import Rule
from apportion.device.build import needs_build
from apportion.device.target import Target
from apportion.methods.compress.importance import global_sizes, importance
from apportion.methods.compress.lowrank import PREFIX as LOWRANK
from apportion.methods.compress.lowrank import LowRank, lowrank_knobs
from apportion.methods.compress.prune import GLOBAL, Prune, PruneAll, global_knob, prune_knobs
from apportion.methods.compress.prune import PREFIX as PRUNE
from apportion.methods.compress.quantise import PREFIX as QUANTISE
from apportion.methods.compress.quantise import Quantise, QuantiseParts, mixed_knobs, precision_groups, quantise_knob
from apportion.methods.compress.rulenames import patterns_in
from apportion.methods.compress.rundir import FitConfig
from apportion.methods.compress.sparsity import PREFIX as SPARSE
from apportion.methods.compress.sparsity import Sparsify, sparse_knobs
from apportion.methods.compress.tokens import DEPTH, TOKENS, Depth, Tokens, depth_knobs, tokens_knob
from apportion.models.network import Network
from apportion.models.partition import Partition
from apportion.tasks.batches import Examples

FINER = 4  # steps of the one knob for all modules, for each of a module's own


@dataclass(frozen=True)
class Offer:
    """Knobs, the rule of each by name or prefix, and a line on every rule that was allowed and offers none."""

    knobs: tuple[Knob, ...] = ()
    rules: Mapping[str, Rule[Network]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def __or__(self, other: Offer) -> Offer:
        rules = {**self.rules, **other.rules}
        return Offer((*self.knobs, *other.knobs), rules, (*self.left_out, *other.left_out))


def cuts(
    network: Network, partition: Partition, calibration: Examples, config: FitConfig, allowed: frozenset[str]
) -> Offer:
    """Pruning, module by module or all at once, and depth."""
    offer = Offer()
    if "prune" in allowed:
        knobs = prune_knobs(partition, num_steps=config.num_steps)
        offer |= Offer(tuple(knobs), {PRUNE: Prune(partition, calibration)})
    if "prune-all" in allowed:
        scores = importance(network, partition, config.importance, calibration)  # type: ignore[arg-type]
        sizes = global_sizes(network, partition, scores, num_steps=FINER * config.num_steps)
        offer |= Offer((global_knob(sizes),), {GLOBAL: PruneAll(partition, sizes, calibration)})
    if "depth" in allowed:
        offer |= Offer(tuple(depth_knobs(partition)), {DEPTH: Depth(partition, calibration)})
    return offer


def precisions(
    network: Network, partition: Partition, rule: Quantise, num_mixed: int, allowed: frozenset[str], where: str
) -> Offer:
    """One knob for the precision of all, or one for every block where that was asked for and can be.

    Args:
        num_mixed: layers that the runtime can leave in float one by one; 0 where it can't.
        where: the name of the target.
    """
    if "mixed" in allowed and num_mixed:
        groups = precision_groups(network, partition, rule.recipe)
        return Offer(tuple(mixed_knobs(groups)), {QUANTISE: QuantiseParts(rule, groups)})
    line = f"mixed is left out: {where} can't leave single modules of this model in float"
    return Offer((quantise_knob(num_mixed),), {QUANTISE: rule}, (line,) if "mixed" in allowed else ())


def thinnings(
    network: Network,
    partition: Partition,
    calibration: Examples,
    asked: Budget,
    allowed: frozenset[str],
    target: Target,
) -> Offer:
    """What leaves every unit in place: lower ranks, fewer tokens, zeros."""
    offer = Offer()
    if "lowrank" in allowed:
        offer |= Offer(tuple(lowrank_knobs(network)), {LOWRANK: LowRank(calibration)})
    if "tokens" in allowed:
        knob = tokens_knob(network, partition)
        if knob is None:
            offer |= Offer(left_out=("tokens is left out: the model's tokens can't be merged",))
        else:
            assert isinstance(knob.dearest, int)
            offer |= Offer((knob,), {TOKENS: Tokens(partition, knob.dearest)})
    patterns = patterns_in(allowed)
    if "sparse" in allowed or patterns:
        knobs = sparse_knobs(network, asked, patterns=patterns)
        if needs_build(target):
            line = f"sparse is left out: the files that {target.name} opens hold zeros like other numbers"
            offer |= Offer(left_out=(line,))
        elif knobs:
            offer |= Offer(tuple(knobs), {SPARSE: Sparsify(calibration)})
        else:
            quantities = ", ".join(limit.quantity for limit in asked.limits)
            line = f"sparse is left out: zeros save bytes of the file and no {quantities}; add a limit on size"
            offer |= Offer(left_out=(line,))
    return offer
