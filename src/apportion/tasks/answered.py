"""Logits at every token, text by text, whoever computed them: the network itself, or a runtime batch after batch.

Shape letters: ``N`` texts of a batch, ``T`` tokens of a text, ``V`` the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from apportion.models.network import Network, read_out
from apportion.tasks.batches import Examples


def answers_of(network: Network, examples: Examples) -> Iterator[Tensor]:
    """What a network answers, one batch at a time, as the logits of a vocabulary are too large to keep."""
    for batch in examples.batches:
        with torch.inference_mode():
            yield read_out(network, batch)


def texts_answered(examples: Examples, answers: Iterable[Tensor], num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The tokens of every text, shape ``(T,)``, beside the logits at them, ``(T, V)``, without padding.

    Args:
        answers: of shape ``(N, T, V)``, in the order of the examples; their batches and padding may be others, and
            what comes after the last example is left out.
        num_tokens: only so many of each text, which is what a graph of fixed shape reads of it.
    """
    rows = (logit_TV for answer_NTV in answers for logit_TV in answer_NTV)
    num_answered = 0
    for batch in examples.batches:
        mask_NT = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        for token_T, mask_T, logit_TV in zip(batch["input_ids"], mask_NT, rows, strict=False):
            num_answered += 1
            count = min(num_tokens, len(token_T), len(logit_TV))
            kept_T = mask_T[:count]
            yield token_T[:count][kept_T], logit_TV[:count][kept_T]
    assert num_answered == len(examples)
