"""The processes of the benchmark: work by name, here or in several processes that share a device."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeAlias

import torch
from world import World

Job: TypeAlias = tuple[str, str, int]
_world: World | None = None


class Crew:
    """Does jobs on a world; with one worker in this process."""

    def __init__(self, world: World, workers: int) -> None:
        self.world = world
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(workers, context, _start, (world,)) if workers > 1 else None

    def map(self, jobs: Sequence[Job]) -> list[Any]:
        if self.pool is None:
            return [self.world.do(*job) for job in jobs]
        return list(self.pool.map(_do, jobs))

    def until(self, jobs: Sequence[Job], deadline: float) -> Iterator[tuple[Job, Any]]:
        """Results as they come; after the deadline (of ``time.monotonic``) no job is begun."""
        if self.pool is None:
            for job in jobs:
                if time.monotonic() > deadline:
                    return
                yield job, self.world.do(*job)
            return
        waiting = {self.pool.submit(_do_before, job, deadline): job for job in jobs}
        for done in as_completed(waiting):
            if done.result() is not None:
                yield waiting[done], done.result()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()


def _start(world: World) -> None:
    global _world
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    _world = world


def _do(job: Job) -> Any:
    assert _world is not None
    return _world.do(*job)


def _do_before(job: Job, deadline: float) -> Any:
    return _do(job) if time.monotonic() < deadline else None
