"""The device programs of a run, and how they are compiled: several at the same time, before the first step.

A run has about thirty programs, of which a large model's take up to a minute each, and XLA compiles each in one thread
for most of that time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from psearch_jax.runtime import progress

MOST = 8  # threads: each needs the memory of a compilation


@dataclass(frozen=True)
class Program:
    """A jitted function, and all arguments that a run calls it with.

    Once compiled, calls with arguments of these shapes and shardings compile nothing.

    Attributes:
      name: as plans and logs list it.
      function: the jitted function.
      arguments: from a width to the arguments of a call, with a ShapeDtypeStruct for every array: with the sharding of
        the array, or without one for NumPy arrays.
      mesh: set while the function is traced and called.
      widths: of the calls, ascending; (0,) if there is only one shape.
    """

    name: str
    function: Any
    arguments: Callable[[int], tuple[Any, ...]]
    mesh: Mesh
    widths: tuple[int, ...] = (0,)

    def trace(self, width: int) -> jax.stages.Traced:
        """The function traced for one width; nothing is compiled."""
        with jax.set_mesh(self.mesh):
            return self.function.trace(*self.arguments(width))

    def compile(self, width: int) -> jax.stages.Compiled:
        """The function compiled for one width, also for devices that are not present (planning/targets.py)."""
        with jax.set_mesh(self.mesh):
            return self.trace(width).lower().compile()


def abstract(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """An argument as a ShapeDtypeStruct; jit ignores the sharding of an array that is not committed to its device."""
    committed = getattr(x, "committed", True)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if committed else None)


def compile_all(programs: Sequence[Program]) -> None:
    """Compiles programs for all of their widths, in several threads, without running them.

    Several processes must pass the same programs in the same order: on GPUs they share the results of autotuning.
    """
    jobs = [(program, width) for program in programs for width in program.widths]
    threads = max(2, min(MOST, (os.cpu_count() or 1) // 4))
    with progress.step("compiling", len(jobs)), ThreadPoolExecutor(threads) as pool:
        for done in as_completed([pool.submit(program.compile, width) for program, width in jobs]):
            done.result()
            progress.advance()
