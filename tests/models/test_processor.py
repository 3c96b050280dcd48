"""What a processor's flags say: about sums of int8 products, and which kernels run."""

from __future__ import annotations

import platform

import pytest

from apportion.models import processor


@pytest.mark.parametrize(
    ("system", "flags", "saturates"),
    [
        ("x86_64", "fpu sse4_2 avx avx2", True),
        ("x86_64", "avx avx2 avx512f avx512bw", True),
        ("x86_64", "avx avx2 avx512f avx512_vnni", False),
        ("AMD64", "avx avx2 avx_vnni", False),
        ("AMD64", "", True),  # not told: the safe way
        ("aarch64", "", False),
        ("arm64", "asimd", False),
    ],
)
def test_int8_saturates_on_x86_without_the_instruction_for_it(monkeypatch, system, flags, saturates):
    monkeypatch.setattr(platform, "machine", lambda: system)
    monkeypatch.setattr(processor, "_cpuinfo", lambda key: flags if key == "flags" else "")
    assert processor.int8_saturates() is saturates


def test_what_decides_which_kernels_run_is_told_and_nothing_else(monkeypatch):
    flags = {"flags": "fpu avx2 avx512f avx512_vnni rdtscp"}
    monkeypatch.setattr(processor, "_cpuinfo", lambda key: flags.get(key, ""))
    assert processor.instructions() == "avx2 avx512f avx512_vnni"
    monkeypatch.setattr(processor, "_cpuinfo", lambda key: "fp asimd i8mm" if key == "Features" else "")
    assert processor.instructions() == "asimd i8mm"
    monkeypatch.setattr(processor, "_cpuinfo", lambda key: "")
    assert processor.instructions() == ""
