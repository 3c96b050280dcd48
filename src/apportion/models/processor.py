"""The processor of this machine, where what it lacks changes what a network computes."""

from __future__ import annotations

import platform
from functools import cache

_X86 = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_ARM = ("asimd", "asimddp", "i8mm", "bf16", "sve")


def processor() -> str:
    """Its name."""
    return _cpuinfo("model name") or platform.processor() or "unknown"


def instructions() -> str:
    """The instruction sets that decide which kernels run: processors of one name can differ in them."""
    return " ".join(name for name in (*_X86, *_ARM) if name in _flags())


def int8_saturates() -> bool:
    """Whether sums of int8 products overflow their 16 bits here: on x86 without VNNI, if weights take more than 7 bits.

    Where the processor's flags can't be read, an x86 one is taken to be without it.
    """
    x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
    return x86 and not {"avx512_vnni", "avx_vnni"} & _flags()


def _flags() -> set[str]:
    return {*_cpuinfo("flags").split(), *_cpuinfo("Features").split()}


@cache
def _cpuinfo(key: str) -> str:
    """What Linux says about the first processor, nothing elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(key)), "")
    except OSError:
        return ""
