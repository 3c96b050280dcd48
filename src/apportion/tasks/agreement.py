"""Quality without labels: how often a changed model agrees with the original one."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from apportion.core.meter import Reading
from apportion.models.network import Network, read_out
from apportion.tasks.answered import answers_of, texts_answered
from apportion.tasks.batches import Examples
from apportion.tasks.sample import Sample


class Agreement:
    """Share of what the original says that a changed model says too, in [0, 1].

    For embeddings: the share of each example's nearest neighbours among the examples that stay its neighbours. For
    classifiers and language models: the share of predictions (of every token that is not padding, as many of each text
    as the network's example inputs have) that stay the same.
    """

    unit = "ratio"

    def __init__(self, original: Network, examples: Examples, *, num_neighbours: int = 10) -> None:
        self.examples = examples
        self.num_neighbours = max(1, min(num_neighbours, (len(examples) - 1) // 2))
        self.num_tokens = original.inputs["input_ids"].shape[1] if original.readout == "token-logits" else 0
        self._wanted = self._answers(original)

    def read(self, model: Network) -> Reading:
        """Mean agreement over examples with its standard error."""
        return self.sample(model).reading()

    def score(self, answer_ND: Tensor, readout: str) -> Reading:
        """The reading of answers computed elsewhere: embeddings or logits in the order of the examples."""
        return self.sample_of(answer_ND, readout).reading()

    def sample(self, model: Network) -> Sample:
        return self._compare(self._answers(model), model.readout)

    def sample_of(self, answer_ND: Tensor, readout: str) -> Sample:
        return self._compare(self._said([answer_ND], readout), readout)

    def sample_tokens(self, answers: Iterable[Tensor]) -> Sample:
        """That of logits at every token, computed elsewhere, batch after batch in the order of the examples."""
        return self._compare(self._said_tokens(answers), "token-logits")

    def _compare(self, said: Tensor, readout: str) -> Sample:
        if readout == "embedding":
            pairs = zip(said.tolist(), self._wanted.tolist(), strict=True)
            score_N = torch.tensor([len(set(a) & set(b)) / len(b) for a, b in pairs])
        else:
            score_N = (said == self._wanted).float()
        return Sample(score_N.mean().item(), score_N)

    @torch.inference_mode()
    def _answers(self, network: Network) -> Tensor:
        if network.readout == "token-logits":
            return self._said_tokens(answers_of(network, self.examples))
        return self._said([read_out(network, batch) for batch in self.examples.batches], network.readout)

    def _said_tokens(self, answers: Iterable[Tensor]) -> Tensor:
        texts = texts_answered(self.examples, answers, self.num_tokens)
        return torch.cat([logit_TV.argmax(-1) for _, logit_TV in texts])

    def _said(self, outputs: list[Tensor], readout: str) -> Tensor:
        if readout == "logits":
            return torch.cat([logits.argmax(-1) for logits in outputs])
        embedding_ND = torch.cat(outputs)
        similarity_NN = embedding_ND @ embedding_ND.T
        similarity_NN.fill_diagonal_(-torch.inf)
        return similarity_NN.topk(self.num_neighbours).indices
