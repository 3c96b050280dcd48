"""Targets: where and how a model will run. Budgets and certificates go by a target's name, stores by its identity.

A name reads ``runtime[-precision]-device[-threads]``: ``torch-cpu-1t``, ``ort-int8-cpu-2t``, ``compile-cuda``.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, replace
from typing import Any

from apportion.errors import TargetError
from apportion.models.processor import instructions, processor


@dataclass(frozen=True)
class Family:
    """What the first part of a target's name stands for."""

    runtime: str
    precision: str
    about: str


FAMILIES = {
    "torch": Family("torch", "fp32", "PyTorch eager"),
    "compile": Family("compile", "fp32", "torch.compile (Inductor)"),
    "compile-int8": Family("compile", "int8", "torch.compile, dynamic int8 of linear layers by torchao"),
    "ort": Family("ort", "fp32", "ONNX Runtime"),
    "ort-int8": Family("ort", "int8", "ONNX Runtime, static int8 (QDQ)"),
    "ort-int8dyn": Family("ort", "int8dyn", "ONNX Runtime, dynamic int8"),
    "openvino": Family("openvino", "fp32", "OpenVINO, f32 kernels"),
    "openvino-int8": Family("openvino", "int8", "OpenVINO, int8 by NNCF"),
    "executorch": Family("executorch", "fp32", "ExecuTorch with XNNPACK"),
}
ON_CUDA = ("torch", "compile")
ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Hardware, runtime, precision, threads and instruction-set cap; batch and shape are the model's example inputs.

    ``isa`` caps the instructions that oneDNN may use (its ``ONEDNN_MAX_CPU_ISA``), where probing found that the machine
    dies without a cap.
    """

    name: str
    runtime: str = "torch"
    precision: str = "fp32"
    device: str = "cpu"
    threads: int = 1
    isa: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a process on this target runs under."""
        threads = str(self.threads)
        fixed = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENVINO_TELEMETRY": "0"}
        return fixed | ({ISA_VARIABLE: self.isa} if self.isa else {})

    @property
    def identity(self) -> str:
        """The name with the instruction-set cap, which changes what is measured."""
        return f"{self.name}+{self.isa}" if self.isa else self.name

    def with_isa(self, isa: str | None) -> Target:
        return replace(self, isa=isa)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find_target(name: str | None) -> Target:
    """The target of a name, or torch eager on one thread when none is given. Says nothing on whether it works here.

    Raises:
        TargetError: no such target, or more threads than cores.
    """
    name = name or "torch-cpu-1t"
    for prefix in sorted(FAMILIES, key=len, reverse=True):
        family, rest = FAMILIES[prefix], name.removeprefix(f"{prefix}-")
        if rest == name:
            continue
        if rest == "cuda" and prefix in ON_CUDA:
            return Target(name=name, runtime=family.runtime, precision=family.precision, device="cuda")
        count = rest.removeprefix("cpu-").removesuffix("t")
        if rest == f"cpu-{count}t" and count.isascii() and count.isdigit() and int(count) > 0 and count[0] != "0":
            if int(count) > (os.cpu_count() or 1):
                raise TargetError(f"target {name!r} needs {count} cores, this machine has {os.cpu_count()}")
            return Target(name=name, runtime=family.runtime, precision=family.precision, threads=int(count))
    known = ", ".join(target_names())
    raise TargetError(f"unknown target {name!r}; possible are {known} (apportion targets says which work here)")


def is_sibling(plain: Target, other: Target) -> bool:
    """Whether a target runs in float what another runs in whatever precision, on the same hardware."""
    where = (other.runtime, other.device, other.threads)
    return plain.precision == "fp32" and (plain.runtime, plain.device, plain.threads) == where


def target_names() -> list[str]:
    """All targets that this machine's cores allow, whether their runtimes are installed or not."""
    threads = [count for count in (1, 2) if count <= (os.cpu_count() or 1)]
    return [f"{prefix}-cpu-{count}t" for prefix in FAMILIES for count in threads] + [f"{p}-cuda" for p in ON_CUDA]


def machine() -> dict[str, object]:
    """What a certificate says about the machine."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "instructions": instructions(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
