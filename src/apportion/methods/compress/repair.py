"""Repair: win quality back by a short training, from the original's answers or labels, which costs no latency.

Shape letters: ``N`` examples, ``D`` features, ``K`` classes.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from apportion.core.folder import write_whole
from apportion.core.knob import Choice, Knob, Value
from apportion.core.progress import Progress, Silent
from apportion.errors import DataError
from apportion.methods.compress.norms import batch_norms
from apportion.models.network import Network, read_out
from apportion.models.skip import Skip
from apportion.tasks.batches import Batch, Examples, Splits

PREFIX = "repair"
Towards = Literal["teacher", "labels", "both"]
RATE, RATE_WITH_BATCH_NORMS = 3e-4, 3e-3
_TEMPERATURE = 0.05  # of likeness between examples of a batch
MANY_ZEROS = 0.2
_SOFTNESS = 2.0  # of classes and tokens
_STAGES = {
    "teacher": "repair by distillation",
    "labels": "fine-tune on labels",
    "both": "repair by distillation and labels",
}


@dataclass(frozen=True, kw_only=True)
class DistilOptions:
    """What to train towards, how long and how fast: steps of one batch each, and the largest learning rate.

    Networks with batch norms learn ten times as fast by default.
    """

    towards: Towards = "teacher"
    steps: int = 150
    learning_rate: float | None = None
    batch: int = 32
    seed: int = 0


def repair_knob(turns: int, *, early: bool = False) -> Knob:
    """How many repairs are left; with an early one before them, or what does that and the first of them at once."""
    return Choice(PREFIX, range(turns + 1 + 2 * early), granularity="global", restores=True)


class Distil:
    """Trains a network towards its teacher's answers and hidden states, the labels of the examples, or both.

    The result depends on the network, the options and the examples alone, and is kept in ``folder`` by their digest, so
    that a resumed run trains nothing twice. A turn trains as many steps as the options say, and the first of them
    ``spare_steps`` more. Where there are ``early_steps``, a turn of so many comes before, or goes with that first one.
    """

    kind, rate, keeps_zeros = "", RATE, True

    def __init__(
        self,
        teacher: Network,
        training: Examples,
        blocks: Sequence[str],
        options: DistilOptions,
        folder: Path | None = None,
        progress: Progress | None = None,
        spare_steps: int = 0,
        early_steps: int = 0,
    ) -> None:
        self.teacher, self.blocks, self.options = teacher, tuple(blocks), options
        self.spare_steps, self.early_steps = spare_steps, early_steps
        self.batches = _rebatched(training, options.batch)
        self.spread = 1.0
        if options.towards != "teacher":
            assert training.label_N is not None
            if training.label_N.is_floating_point():
                self.spread = max(training.label_N.var(correction=0).item(), 1e-12)
        self.folder, self.progress = folder, progress or Silent()

    def apply(self, model: Network, knob: Knob, value: Value) -> Network:
        steps = self.steps(knob, value)
        kept = self._kept(model, steps)
        if kept is not None and kept.is_file():
            with suppress(SafetensorError):  # what a crash of the machine cut short is trained again
                module = copy.deepcopy(model.module)
                module.load_state_dict(load_file(kept), strict=False)
                return model.replace(module=module)
        with self.progress.stage(_STAGES[self.options.towards]) as update:
            repaired = self.train(model, update, steps)
        if kept is not None:
            tensors = {name: tensor.detach().contiguous() for name, tensor in _tensors(repaired.module)}
            write_whole(kept, save(tensors))
        return repaired

    def steps(self, knob: Knob, value: Value) -> int:
        """The steps that a turn to a value trains."""
        turn = len(knob.values) - 1 - knob.values.index(value)
        if not self.early_steps:
            return self.options.steps + (self.spare_steps if turn == 1 else 0)
        more = {1: self.early_steps - self.options.steps, 2: self.early_steps + self.spare_steps, 3: self.spare_steps}
        return self.options.steps + more.get(turn, 0)

    def train(
        self, model: Network, on_step: Callable[[float], None] | None = None, steps: int | None = None
    ) -> Network:
        """A trained copy; in evaluation mode as it was (no dropout) but for batch norms, which follow the batches."""
        steps = steps or self.options.steps
        module = copy.deepcopy(model.module).eval()
        norms = batch_norms(module)
        for norm in norms:
            norm.train()
        student = model.replace(module=module)
        generator = torch.Generator().manual_seed(self.options.seed)
        trained = self._open(module)
        sparse = [(p, p != 0) for p in trained if self.keeps_zeros and p.dim() > 1 and zeros(p) > MANY_ZEROS]
        rate = self.options.learning_rate or (RATE_WITH_BATCH_NORMS if norms else self.rate)
        optimiser = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, eps=1e-6)
        for step in range(steps):
            warm = min(1.0, (step + 1) / max(1, steps // 10))
            for group in optimiser.param_groups:
                group["lr"] = rate * warm * (1 - step / steps)
            place = int(torch.randint(len(self.batches), (), generator=generator))
            loss = self._loss(student, *self.batches[place])
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimiser.step()
            with torch.no_grad():
                for parameter, there in sparse:  # zeros were paid for; they stay
                    parameter.mul_(there)
            if on_step is not None:
                on_step((step + 1) / steps)
        module.eval()
        for parameter in trained:
            parameter.requires_grad_(False)
        self._close(module)
        return student

    def _open(self, module: nn.Module) -> list[nn.Parameter]:
        """What is trained: every weight."""
        trained = [p for p in module.parameters() if p.is_floating_point()]
        for parameter in trained:
            parameter.requires_grad_(True)
        return trained

    def _close(self, module: nn.Module) -> None:
        """Puts the module back into its own shape; whole weights need nothing."""

    def _loss(self, student: Network, batch: Batch, label_B: Tensor | None) -> Tensor:
        with torch.enable_grad(), _hidden(student.module, self.blocks) as found:
            answer = read_out(student, batch)
        loss = torch.zeros(())
        if self.options.towards != "labels":
            loss = loss + self._teacher_loss(answer, found, student.readout, batch)
        if self.options.towards != "teacher":
            assert label_B is not None
            loss = loss + label_loss(answer, label_B, self.spread)
        return loss

    def _teacher_loss(self, answer: Tensor, found: Mapping[str, Tensor], readout: str, batch: Batch) -> Tensor:
        with torch.no_grad(), _hidden(self.teacher.module, self.blocks) as wanted:
            target = read_out(self.teacher, batch)
        loss = answer_loss(answer, target, readout, batch.get("attention_mask"))
        alike = [
            (found[name] - wanted[name]).square().mean() / wanted[name].square().mean().clamp_min(1e-12)
            for name in found
            if name in wanted and found[name].shape == wanted[name].shape
        ]
        return loss + sum(alike, start=torch.zeros(())) / max(len(alike), 1)

    def _kept(self, model: Network, steps: int) -> Path | None:
        if self.folder is None:
            return None
        total = hashlib.sha256(json.dumps(asdict(self.options) | {"steps": steps}, sort_keys=True).encode())
        total.update((self.kind + json.dumps(list(model.edits.tokens.items()))).encode() if self._told(model) else b"")
        for name, tensor in _tensors(model.module):
            total.update(f"{name}{tuple(tensor.shape)}".encode())
            total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return self.folder / f"{total.hexdigest()[:32]}.safetensors"

    def _told(self, model: Network) -> bool:
        """Whether the weights and options alone don't say what is trained."""
        return bool(self.kind or model.edits.tokens)


def zeros(weight: Tensor) -> float:
    """The share of zeros."""
    return (weight == 0).float().mean().item()


def answer_loss(answer: Tensor, target: Tensor, readout: str, mask: Tensor | None = None) -> Tensor:
    r"""How far the student's answers are from the teacher's (eq. R1, R2).

    Embeddings: one minus the cosine, plus the divergence between the likeness of examples in the batch under teacher
    and student. Classes and tokens: the divergence of softened distributions. A single number: the squared error over
    the teacher's variance in the batch.
    """
    if readout == "embedding":
        cosine = (1 - (answer * target).sum(-1)).mean()
        itself = torch.eye(len(target), dtype=torch.bool)
        like, wanted = ((x @ x.T / _TEMPERATURE).masked_fill(itself, -1e9).log_softmax(-1) for x in (answer, target))
        return cosine + nn.functional.kl_div(like, wanted, log_target=True, reduction="batchmean")
    if readout == "logits" and target.shape[-1] == 1:
        return (answer - target).square().mean() / target.var(correction=0).clamp_min(1e-6)
    soft, wanted = ((x / _SOFTNESS).log_softmax(-1) for x in (answer, target))
    divergence = nn.functional.kl_div(soft, wanted, log_target=True, reduction="none").sum(-1)
    if readout == "token-logits" and mask is not None:
        divergence = divergence[mask.bool()]
    return _SOFTNESS**2 * divergence.mean()


def label_loss(answer_NK: Tensor, label_N: Tensor, spread: float = 1.0) -> Tensor:
    """How far answers are from labels (eq. R6): cross entropy of classes, squared error of numbers.

    The error is in shares of ``spread``, the variance of the numbers, so that their unit does not matter.
    """
    if label_N.is_floating_point():
        return (answer_NK[:, 0] - label_N).square().mean() / spread
    return nn.functional.cross_entropy(answer_NK, label_N)


def require_labels(network: Network, splits: Splits) -> None:
    """Raises unless there are labels to train on and the network's answers are about them."""
    label_N = splits.training.label_N
    if label_N is None:
        raise DataError(
            f"finetune needs labels, and {splits.training.description} come without; give labelled --data (not with "
            "--quality agreement), or use repair"
        )
    with torch.inference_mode():
        num_outputs = read_out(network, splits.training.batches[0]).shape[-1]
    labels = [part.label_N for part in (splits.training, splits.report) if part.label_N is not None]
    wanted = 1 if label_N.is_floating_point() else 1 + max(int(each.max()) for each in labels)
    if network.readout != "logits" or num_outputs != wanted:
        about = "numbers" if label_N.is_floating_point() else f"{wanted} classes"
        raise DataError(
            f"finetune trains answers on labels, but the model has {num_outputs} outputs ({network.readout}) and the "
            f"labels are {about}; use repair"
        )


@contextmanager
def _hidden(module: nn.Module, blocks: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Collects the outputs of blocks during a forward pass."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            found[name] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = []
    for name in blocks:
        block = module.get_submodule(name)
        if not isinstance(block, Skip):
            handles.append(block.register_forward_hook(keep(name)))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, such as the statistics of batch norms, each once."""
    return [*module.named_parameters(), *module.named_buffers()]


def _rebatched(training: Examples, size: int) -> list[tuple[Batch, Tensor | None]]:
    """The examples in batches of at most a size, each with its labels where there are any."""
    found: list[tuple[Batch, Tensor | None]] = []
    seen = 0
    for batch in training.batches:
        count = len(next(iter(batch.values())))
        for start in range(0, count, size):
            some = {name: tensor[start : start + size] for name, tensor in batch.items()}
            end = min(start + size, count)
            found.append((some, None if training.label_N is None else training.label_N[seen + start : seen + end]))
        seen += count
    return found
