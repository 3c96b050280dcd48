"""Fewer tokens between the blocks of an encoder: those most alike are merged on the way and put back at the end.

Shape letters: N examples, T tokens of the whole sequence, S tokens now, R tokens left, A tokens at odd places, B tokens
at even places, D features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from apportion.models.skip import first_tensor

Tokens = Mapping[str, tuple[int, int]]
"""By block, in order: at most how many tokens enter it, and of how many in all."""
_FREE, _LAST, _NEVER = 2.0, -1.5, -2.0  # likeness lies between: padding merges first, into the first token nothing


def merge_once(x_NSD: Tensor, weight_NS: Tensor, num_left: int) -> Tensor:
    r"""Which token goes where when ``num_left`` are left of ``S``, at least half of them (eq. R5).

    Tokens at odd places are matched with the most alike at an even place; the best matches are merged, padding
    (weight 0) before all others. The first token, which classifiers read, stays as it is.

    Returns:
        One-hot rows of shape ``(N, S, R)``; their transpose times the weighted tokens sums what is merged.
    """
    num_tokens = x_NSD.shape[1]
    num_merged = num_tokens - num_left
    unit_NSD = nn.functional.normalize(x_NSD, dim=-1)
    alike_NAB = unit_NSD[:, 1::2] @ unit_NSD[:, ::2].transpose(1, 2)
    num_odd, num_even = alike_NAB.shape[1:]
    padding_NS = weight_NS == 0
    alike_NAB = alike_NAB.masked_fill(padding_NS[:, None, ::2], _LAST)  # several would meet there
    first_B = torch.arange(num_even, device=x_NSD.device) == 0
    alike_NAB = alike_NAB.masked_fill(padding_NS[:, 1::2, None], _FREE).masked_fill(first_B, _NEVER)
    best_NA, match_NA = alike_NAB.max(-1)
    place_A = torch.arange(num_odd, device=x_NSD.device)
    ahead_NAA = (best_NA[:, None, :] > best_NA[:, :, None]) | (
        (best_NA[:, None, :] == best_NA[:, :, None]) & (place_A[None, :] < place_A[:, None])
    )
    rank_NA = ahead_NAA.sum(-1)
    goes_NA = torch.where(rank_NA < num_merged, match_NA, num_even + rank_NA - num_merged)
    goes_NB = torch.arange(num_even, device=x_NSD.device).expand(x_NSD.shape[0], -1)
    goes_NS = torch.cat([goes_NB, goes_NA], 1)[:, _interleaved(num_tokens, x_NSD.device)]
    return (goes_NS[..., None] == torch.arange(num_left, device=x_NSD.device)).to(x_NSD.dtype)


def _interleaved(count: int, device: torch.device) -> Tensor:
    """Where the tokens stand once those at even places come first."""
    place_S = torch.arange(count, device=device)
    return torch.where(place_S % 2 == 0, place_S // 2, (count + 1) // 2 + place_S // 2)


class Stream:
    """What became of the tokens on the way through the blocks of one forward pass."""

    def __init__(self) -> None:
        self.back_NTS: Tensor | None = None
        self.weight_NS: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Stream:
        """A copy of a network starts with nothing; what is held between passes is of no use."""
        memo[id(self)] = fresh = Stream()
        return fresh

    def start(self, x_NSD: Tensor, mask: Any) -> None:
        """Every token stands for itself; those that nobody attends to are padding."""
        self.back_NTS = None
        if mask is None:
            self.weight_NS = torch.ones_like(x_NSD[..., 0])
        else:
            seen = mask[:, 0, 0] if mask.dtype == torch.bool else mask[:, 0, 0] > -1
            self.weight_NS = seen.to(x_NSD.dtype)

    def reduce(self, x_NSD: Tensor, most: int) -> Tensor:
        """Merges until at most ``most`` tokens are left, each the mean of those it stands for."""
        while x_NSD.shape[1] > max(most, 2):
            num_left = max(most, 2, -(-x_NSD.shape[1] // 2))
            assert self.weight_NS is not None
            to_NSR = merge_once(x_NSD, self.weight_NS, num_left)
            total_NRD = to_NSR.transpose(1, 2) @ (x_NSD * self.weight_NS[..., None])
            self.weight_NS = (to_NSR.transpose(1, 2) @ self.weight_NS[..., None])[..., 0]
            x_NSD = total_NRD / self.weight_NS.clamp_min(1)[..., None]
            self.back_NTS = to_NSR if self.back_NTS is None else self.back_NTS @ to_NSR
        return x_NSD

    @property
    def bias(self) -> Tensor:
        """What attention adds to its scores: a token that stands for several counts as often, padding not at all."""
        assert self.weight_NS is not None
        padding_NS = self.weight_NS == 0
        return self.weight_NS.clamp_min(1).log().masked_fill(padding_NS, -1e4)[:, None, None]

    def put_back(self, x_NSD: Tensor) -> Tensor:
        """Every token gets what the one that stood for it became."""
        return x_NSD if self.back_NTS is None else self.back_NTS @ x_NSD


class _Before:
    """Merges tokens before a block, and tells its attention how many each stands for."""

    def __init__(self, stream: Stream, most: int, *, first: bool) -> None:
        self.stream, self.most, self.first = stream, most, first

    def __call__(self, _block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x_NSD = first_tensor(args, kwargs)
        masked = "attention_mask" in kwargs
        if self.first:
            self.stream.start(x_NSD, kwargs["attention_mask"] if masked else args[1] if len(args) > 1 else None)
        x_NSD = self.stream.reduce(x_NSD, self.most)
        if self.stream.back_NTS is None:  # short enough as it is
            return args, kwargs
        rest = args[1:] if masked else (self.stream.bias, *args[2:])
        return (x_NSD, *rest), {**kwargs, "attention_mask": self.stream.bias} if masked else kwargs


class _After:
    """Puts the tokens back after the last block."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __call__(self, _block: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, Tensor):
            return self.stream.put_back(output)
        return (self.stream.put_back(output[0]), *output[1:])


def merge_tokens(module: nn.Module, tokens: Tokens) -> None:
    """Makes the blocks named merge tokens, in place; the last one named puts them back. Earlier merging is undone."""
    for part in module.modules():
        for hooks in (part._forward_pre_hooks, part._forward_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Before | _After)]:
                del hooks[key]
    stream = Stream()
    for number, (name, (most, _)) in enumerate(tokens.items()):
        block = module.get_submodule(name)
        block.register_forward_pre_hook(_Before(stream, most, first=number == 0), with_kwargs=True)
        if number == len(tokens) - 1:
            block.register_forward_hook(_After(stream))
