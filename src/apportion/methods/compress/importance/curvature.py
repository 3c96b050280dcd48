"""Importance by curvature: the second-order change of the answers when a unit's gate closes.

Shape letters: N examples, T tokens, K outputs, U units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from apportion.methods.compress.importance.gates import gated
from apportion.models.network import Network, Readout, read_out
from apportion.models.partition import Partition
from apportion.tasks.batches import Examples


def hessian(
    network: Network, partition: Partition, examples: Examples, *, num_probes: int = 8, seed: int = 0
) -> dict[str, Tensor]:
    r"""Second-order change of the answers when a unit's gate goes from one to zero (eq. P5).

    .. math:: I_u = \tfrac12 \, \mathrm{mean}_n \frac{\partial^2 D_n}{\partial g_{nu}^2} \Big|_{g = 1}
        = \tfrac12 \, \mathrm{mean}_n \, J_{nu}^\top A_n J_{nu}

    :math:`D_n` says how far an example's answer lies from the original's: the Kullback-Leibler divergence for classes
    and tokens, half the squared distance for unit embeddings. Its slope is zero at the original, so its Hessian *is*
    the Gauss-Newton matrix, with :math:`J_{nu}` the derivative of the outputs in the gate and :math:`A_n` equal to
    :math:`\mathrm{diag}(p) - p p^\top` or the identity. The diagonal is taken with vectors :math:`v` of covariance
    :math:`A_n`, as the mean of :math:`(J_{nu}^\top v)^2`: exactly, one output at a time, where there are at most
    ``num_probes`` of them and one answer per example, else by Hutchinson's estimate with ``num_probes`` random signs,
    each example with its own; its relative standard error is at most :math:`\sqrt{2 / (N \cdot probes)}` where the
    examples weigh alike.
    """
    generator = torch.Generator().manual_seed(seed)
    scores = {part.name: torch.zeros(part.num_units) for part in partition}
    for batch in examples.batches:
        num_examples = len(next(iter(batch.values())))
        with gated(network, partition, num_examples) as gates:
            output = read_out(network, batch)
            for direction, weight in probes(network.readout, output.detach(), batch, num_probes, generator):
                gradients = torch.autograd.grad(
                    output, list(gates.values()), direction, retain_graph=True, allow_unused=True
                )
                for name, gradient_NU in zip(gates, gradients, strict=True):
                    if gradient_NU is not None:
                        scores[name] += 0.5 * weight * gradient_NU.square().sum(0) / len(examples)
    return scores


def probes(
    readout: Readout, output: Tensor, batch: Mapping[str, Tensor], num_probes: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, float]]:
    r"""Directions :math:`v` with weights that sum :math:`w v v^\top` to :math:`A` of eq. P5, exactly or on average."""
    num_outputs = output.shape[-1]
    if output.dim() == 2 and num_outputs <= num_probes:
        for sign_K in torch.eye(num_outputs, dtype=output.dtype):
            yield _root(readout, output, sign_K.expand_as(output)), 1.0
        return
    share_N1 = torch.ones((), dtype=output.dtype)
    if output.dim() == 3:  # a text's divergence is the mean over its tokens
        mask_NT = batch.get("attention_mask", torch.ones(output.shape[:2])).to(output.dtype)
        share_N1 = (mask_NT / mask_NT.sum(1, keepdim=True).clamp_min(1)).sqrt().unsqueeze(-1)
    for _ in range(num_probes):
        sign = torch.randint(0, 2, output.shape, generator=generator).to(output.dtype) * 2 - 1
        yield share_N1 * _root(readout, output, sign), 1 / num_probes


def _root(readout: Readout, output: Tensor, sign: Tensor) -> Tensor:
    r""":math:`S \xi` with :math:`S S^\top = A`; for classes :math:`S = \mathrm{diag}(\sqrt p) - p \sqrt p^\top`."""
    if readout == "embedding":
        return sign
    p = output.softmax(-1)
    return p.sqrt() * sign - p * (p.sqrt() * sign).sum(-1, keepdim=True)
