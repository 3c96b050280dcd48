"""Model factories that tests name as ``tests.factories:…``, and ones that misbehave in a measuring child."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time

import torch
from torch import nn


class SmallCnn(nn.Module):
    """Two convolutions, a residual pair and a classifier: enough to prune, quick to measure."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.norm = nn.BatchNorm2d(32)
        self.blocks = nn.ModuleList([Residual(32) for _ in range(3)])
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, 64, 3, padding=1)
        self.second = nn.Conv2d(64, width, 3, padding=1)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))


def small_cnn():
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(7)
    model = SmallCnn().eval()
    with torch.no_grad():  # centred, so that its predictions differ from image to image
        model.head.bias -= model(torch.randn(64, 3, 16, 16)).mean(0)
    torch.random.set_rng_state(generator_state)
    return model, torch.zeros(1, 3, 16, 16)


def wide_mlp():
    """Three linear layers on the same images: few kernels, so that torch compiles it quickly."""
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(7)
    layers = [nn.Flatten(), nn.Linear(768, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10)]
    model = nn.Sequential(*layers).eval()
    torch.random.set_rng_state(generator_state)
    return model, torch.zeros(1, 3, 16, 16)


def small_regressor():
    """The same network with one output."""
    model, image = small_cnn()
    head = nn.Linear(32, 1)
    with torch.no_grad():
        head.weight.copy_(model.head.weight[:1])
        head.bias.zero_()
    model.head = head
    return model, image


class _Misbehaving(nn.Module):
    """Behaves for some calls, the first of which is the one that loading makes, then acts."""

    def __init__(self, act, num_good: int = 1) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = act
        self.num_good = num_good
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls > self.num_good:
            self.act()
        return self.linear(x)


def crashing():
    """Dies by a real segmentation fault."""
    return _Misbehaving(lambda: ctypes.string_at(0)), torch.zeros(1, 4)


def _illegal_instruction():
    """Runs the bytes 0f 0b (x86 ud2), which no processor may execute."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\x0f\x0b" if platform.machine() in ("x86_64", "AMD64") else b"\x00\x00\x00\x00")
    ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()


def illegal():
    """Dies by a real illegal instruction."""
    return _Misbehaving(_illegal_instruction), torch.zeros(1, 4)


def illegal_when_timed():
    """Loads, opens and warms up like any other, and dies in the timed rounds by a real illegal instruction."""
    return _Misbehaving(_illegal_instruction, num_good=8), torch.zeros(1, 4)


def small_linear():
    """Does what the misbehaving ones do before they misbehave."""
    return _Misbehaving(None, num_good=10**9), torch.zeros(1, 4)


class _Logging(nn.Module):
    """Writes down when it was made and every time it is called."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.log("made")

    def log(self, what):
        with open(os.environ["APPORTION_TEST_LOG"], "a", encoding="ascii") as file:
            file.write(f"{os.getpid()} {what} {time.monotonic_ns()}\n")

    def forward(self, x):
        self.log("called")
        return self.linear(x)


def logging_its_calls():
    return _Logging(), torch.zeros(1, 4)


def _eat_memory():
    held = []
    while True:
        held.append(bytearray(64 * 2**20))
        time.sleep(0.01)


def greedy_for_memory():
    """Takes 64 MiB after 64 MiB."""
    return _Misbehaving(_eat_memory), torch.zeros(1, 4)


def too_large():
    """Asks for more memory at once than any machine has."""
    return _Misbehaving(lambda: torch.zeros(2**50)), torch.zeros(1, 4)


class _Infinite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) / 0.0


def infinite():
    """Computes numbers that are not finite."""
    return _Infinite(), torch.zeros(1, 4)


def hanging():
    return _Misbehaving(lambda: time.sleep(3600)), torch.zeros(1, 4)


def exiting():
    return _Misbehaving(lambda: os._exit(3)), torch.zeros(1, 4)


def not_a_model():
    return "a string"


class _Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Conv2d(3, 8, 1)

    def forward(self, x):
        return self.linear(x).detach().mean((2, 3))


def detached():
    """Can't be traced: its output carries no autograd graph."""
    return _Detached(), torch.zeros(1, 3, 16, 16)


def slow_to_build():
    """Takes long enough to be interrupted on any machine."""
    time.sleep(8)
    return small_cnn()


def swallows_interrupts():
    """Takes its time to build, and does not let Ctrl-C through, as libraries with a bare except do."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            time.sleep(0.2)
        except BaseException:
            continue
    return small_cnn()
