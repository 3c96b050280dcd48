"""Quality of regression: the share of a numeric target's variance that a network explains, with its standard error."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from apportion.core.meter import Reading
from apportion.errors import DataError
from apportion.models.network import Network, read_out
from apportion.tasks.batches import Examples, Splits
from apportion.tasks.domains import load_domain
from apportion.tasks.domains.table import has_labels
from apportion.tasks.sample import Sample

RIDGE = 1e-2  # of the mean square of a feature
MAX_HEAD_EXAMPLES = 1024


class R2:
    r"""One minus the squared error over the target's variance (eq. Q1).

    .. math:: R^2 = 1 - \frac{\sum_n (y_n - \hat y_n)^2}{\sum_n (y_n - \bar y)^2}

    A network with one output predicts itself. Of any other the features are read by a linear head that is fitted to
    the *original's* features on (up to 1,024 of) the training examples and stays as it is. Examples without targets
    are compared with the original's own predictions. The standard error is the jackknife's, which leaves out one
    example at a time; ``rmse`` is in the unit of the target.
    """

    unit = "ratio"

    def __init__(self, original: Network, training: Examples, examples: Examples) -> None:
        self.original = original
        self.head_D: Tensor | None = None
        if training.label_N is not None:
            step = max(1, len(training) // MAX_HEAD_EXAMPLES)
            answer_ND, target_N = _answers(original, training, step), _targets(training, step)
            if answer_ND.shape[-1] != 1:
                self.head_D = _ridge(answer_ND, target_N)
        elif not is_regressor(original, examples):
            raise DataError(
                f"{examples.description} have no numeric target, and the model has more than one output; give a table "
                "with a numeric column label or target, or a .safetensors file with a tensor target"
            )
        self.examples, self.target_N = examples, self._wanted(examples)
        if len(self.target_N) < 2 or not self.target_N.var() > 0:
            raise DataError(f"the target does not vary over {examples.description}; give more examples")

    def over(self, examples: Examples) -> R2:
        """The same meter, with the same head, over other examples."""
        other = copy.copy(self)
        other.examples, other.target_N = examples, self._wanted(examples)
        return other

    def read(self, model: Network) -> Reading:
        return self.sample(model).reading()

    def score(self, answer_ND: Tensor, readout: str) -> Reading:
        """The reading of answers computed elsewhere, in the order of the examples."""
        return self.sample_of(answer_ND, readout).reading()

    def sample(self, model: Network) -> Sample:
        return self.sample_of(_answers(model, self.examples), model.readout)

    def sample_of(self, answer_ND: Tensor, readout: str) -> Sample:
        """What an example adds is its pseudo-value, by which the jackknife's error is that of a mean."""
        error_N = (self.target_N - self._predicted(answer_ND)).double().square()
        count = len(error_N)
        target_N = self.target_N.double()
        away_N = (target_N - target_N.mean()).square()
        value = 1 - error_N.sum() / away_N.sum()
        left_N = 1 - (error_N.sum() - error_N) / (away_N.sum() - away_N * count / (count - 1)).clamp_min(1e-30)
        return Sample(value.item(), count * value - (count - 1) * left_N, counted=False)

    def rmse(self, answer_ND: Tensor) -> float:
        """The root of the mean squared error, in the target's unit."""
        return (self.target_N - self._predicted(answer_ND)).square().mean().sqrt().item()

    def _wanted(self, examples: Examples) -> Tensor:
        if examples.label_N is not None:
            return examples.label_N.float()
        return self._predicted(_answers(self.original, examples))

    def _predicted(self, answer_ND: Tensor) -> Tensor:
        if self.head_D is None:
            return answer_ND[:, 0]
        return answer_ND @ self.head_D[:-1] + self.head_D[-1]


def is_regressor(network: Network, examples: Examples) -> bool:
    """Whether a network answers with one number for each example."""
    with torch.inference_mode():
        first = {name: tensor[:1] for name, tensor in examples.batches[0].items()}
        return network.readout == "logits" and read_out(network, first).shape[-1] == 1


def has_numbers(examples: Examples) -> bool:
    """Whether the examples come with numbers to predict, not with classes."""
    return examples.label_N is not None and examples.label_N.is_floating_point()


def without_targets(splits: Splits) -> Splits:
    """The same examples; what they are compared with is what the original says."""
    return _each(splits, lambda part: Examples(part.batches, part.description))


def with_numbers(splits: Splits, data: str | None) -> Splits:
    """The splits with labels read as numbers, of a table of texts or a file of tensors; others without targets."""
    if data is not None and Path(data).suffix == ".safetensors":
        return _each(splits, lambda part: replace(part, label_N=None if part.label_N is None else part.label_N.float()))
    if data is None or not Path(data).is_file() or not has_labels(Path(data)):
        return without_targets(splits)
    names = load_domain(data).classes
    wrong = next((name for name in names if not _is_number(name)), None)
    if wrong is not None:
        raise DataError(f"{data} has the target {wrong[:40]!r}, which is no finite number; use --quality accuracy")
    value_K = torch.tensor([float(name) for name in names])

    def numeric(part: Examples) -> Examples:
        assert part.label_N is not None
        return Examples(part.batches, part.description, value_K[part.label_N])

    return _each(splits, numeric)


def _each(splits: Splits, change: Callable[[Examples], Examples]) -> Splits:
    return Splits(**{part.name: change(getattr(splits, part.name)) for part in fields(splits)})


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


@torch.inference_mode()
def _answers(network: Network, examples: Examples, step: int = 1) -> Tensor:
    return torch.cat([read_out(network, batch) for batch in examples.batches[::step]])


def _targets(examples: Examples, step: int) -> Tensor:
    assert examples.label_N is not None
    sizes = [len(next(iter(batch.values()))) for batch in examples.batches]
    return torch.cat(examples.label_N.float().split(sizes)[::step])


def _ridge(answer_ND: Tensor, target_N: Tensor) -> Tensor:
    """The weights of a ridge regression and, last, its intercept."""
    mean_D, mean = answer_ND.double().mean(0), target_N.double().mean()
    centred_ND = answer_ND.double() - mean_D
    gram_DD = centred_ND.T @ centred_ND
    gram_DD += RIDGE * gram_DD.diagonal().mean().clamp_min(1e-12) * torch.eye(len(gram_DD), dtype=torch.float64)
    weight_D = torch.linalg.solve(gram_DD, centred_ND.T @ (target_N.double() - mean))
    return torch.cat([weight_D, (mean - mean_D @ weight_D)[None]]).float()
