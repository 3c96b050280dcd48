"""A loss that needs no labels: what the model's own answers say about a change of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from apportion.models.network import Network, read_out


def self_loss(network: Network, batch: Mapping[str, Tensor]) -> Tensor:
    """A loss that needs no labels but has a slope at the original model.

    Classifiers: cross entropy with their own prediction. Language models: with the token that comes next. Embeddings:
    of the softmax over the other examples of the batch (temperature 0.05) with each example's nearest neighbour.
    """
    output = read_out(network, batch)
    if network.readout == "embedding":
        similarity_NN = output @ output.T / 0.05
        itself_NN = torch.eye(len(output), dtype=torch.bool)
        similarity_NN = similarity_NN.masked_fill(itself_NN, -torch.inf)
        return nn.functional.cross_entropy(similarity_NN, similarity_NN.argmax(1))
    if network.readout == "logits":
        return nn.functional.cross_entropy(output, output.argmax(-1))
    token_NT = batch["input_ids"][:, 1:]
    if "attention_mask" in batch:
        token_NT = token_NT.masked_fill(batch["attention_mask"][:, 1:] == 0, -100)
    return nn.functional.cross_entropy(output[:, :-1].flatten(0, 1), token_NT.flatten())
