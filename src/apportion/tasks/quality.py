"""Quality meters for `fit`: accuracy or retrieval with labels, likelihood for language models, agreement otherwise."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from apportion.core.meter import Meter, Reading
from apportion.errors import DataError
from apportion.models.network import Network, read_out
from apportion.tasks.agreement import Agreement
from apportion.tasks.answered import answers_of, texts_answered
from apportion.tasks.batches import Examples
from apportion.tasks.retrieval import Retrieval
from apportion.tasks.sample import Sample

Kind = Literal["auto", "agreement", "accuracy", "retrieval", "likelihood"]
KINDS: tuple[Kind, ...] = get_args(Kind)

MAX_HEAD_EXAMPLES = 1024


def quality_meter(original: Network, training: Examples, examples: Examples, kind: Kind = "auto") -> Meter[Network]:
    """The meter of a kind over some examples; ``auto`` is accuracy where they have labels, else agreement."""
    if kind == "auto":
        kind = "accuracy" if examples.label_N is not None else "agreement"
    if kind == "agreement":
        return Agreement(original, examples)
    if kind == "likelihood":
        return Likelihood(original, examples)
    if examples.label_N is None:
        raise DataError(f"{kind} needs labels, and {examples.description} have none; use agreement")
    if examples.label_N.is_floating_point():
        raise DataError(f"{kind} needs classes, and {examples.description} have numbers as targets; use r2")
    if kind == "retrieval":
        return Retrieval(original, examples)
    return Accuracy(original, training, examples)


class Accuracy:
    """Share of labelled examples put in their class.

    A classifier whose classes are the data's answers itself. Of any other network the features are classified by the
    nearest class mean, with the means that the *original* network's features have on (up to 1,024 of) the training
    examples: the head stays as it is in use, and only the network below it changes.
    """

    unit = "ratio"

    def __init__(self, original: Network, training: Examples, examples: Examples) -> None:
        assert training.label_N is not None
        assert examples.label_N is not None
        self.examples = examples
        num_classes = int(max(training.label_N.max(), examples.label_N.max())) + 1
        chosen = []  # every n-th batch, since texts are sorted by length
        step = max(1, len(training) // MAX_HEAD_EXAMPLES)
        labels = training.label_N.split([len(next(iter(batch.values()))) for batch in training.batches])
        with torch.inference_mode():
            for batch, label_B in list(zip(training.batches, labels, strict=True))[::step]:
                chosen.append((read_out(original, batch), label_B))
        answer_ND, label_N = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        self.mean_KD: Tensor | None = None
        if original.readout != "logits" or answer_ND.shape[-1] != num_classes:
            feature_ND = nn.functional.normalize(answer_ND, dim=-1)
            total_KD = torch.zeros(num_classes, feature_ND.shape[-1]).index_add(0, label_N, feature_ND)
            self.mean_KD = nn.functional.normalize(total_KD, dim=-1)

    def over(self, examples: Examples) -> Accuracy:
        """The same meter, with the same head, over other examples."""
        other = copy.copy(self)
        other.examples = examples
        return other

    def read(self, model: Network) -> Reading:
        return self.sample(model).reading()

    def score(self, answer_ND: Tensor, readout: str) -> Reading:
        """The reading of answers computed elsewhere, in the order of the examples."""
        return self.sample_of(answer_ND, readout).reading()

    @torch.inference_mode()
    def sample(self, model: Network) -> Sample:
        return self.sample_of(torch.cat([read_out(model, batch) for batch in self.examples.batches]), model.readout)

    def sample_of(self, answer_ND: Tensor, readout: str) -> Sample:
        assert self.examples.label_N is not None
        if self.mean_KD is not None:
            answer_ND = nn.functional.normalize(answer_ND, dim=-1) @ self.mean_KD.T
        right_N = (answer_ND.argmax(-1) == self.examples.label_N).float()
        return Sample(right_N.mean().item(), right_N)


class Likelihood:
    """Geometric mean of the probability given to each next token, which is one over the perplexity.

    Of every text it reads as many tokens as the network's example inputs have, which is what an artefact takes: a
    network and an artefact made of it are judged on the same tokens.
    """

    unit = "ratio"

    def __init__(self, original: Network, examples: Examples) -> None:
        if original.readout != "token-logits":
            raise DataError("likelihood is for language models; use accuracy or agreement for this one")
        self.examples, self.num_tokens = examples, original.inputs["input_ids"].shape[1]

    def read(self, model: Network) -> Reading:
        return self.sample(model).reading()

    def sample(self, model: Network) -> Sample:
        return self.sample_tokens(answers_of(model, self.examples))

    def sample_tokens(self, answers: Iterable[Tensor]) -> Sample:
        """The quality of logits computed elsewhere, batch after batch in the order of the examples.

        What a token adds is its loss times the slope of the value at the mean loss.
        """
        losses = [
            nn.functional.cross_entropy(logit_TV[:-1], token_T[1:], reduction="none")
            for token_T, logit_TV in texts_answered(self.examples, answers, self.num_tokens)
        ]
        loss_N = torch.cat(losses)
        value = math.exp(-loss_N.mean().item())
        return Sample(value, -value * loss_N, counted=False)
