"""Compiles several programs at the same time.

A run has about thirty programs, of which a large model's take up to a minute each, and XLA compiles each in one thread
for most of that time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from psearch_jax.runtime import progress

MOST = 8  # threads: each needs the memory of a compilation


def compile_all(jobs: Sequence[Callable[[], None]]) -> None:
    """Runs jobs that each compile a program without running it, in several threads.

    Several processes must pass the same jobs in the same order: on GPUs they share the results of autotuning.
    """
    threads = max(2, min(MOST, (os.cpu_count() or 1) // 4))
    with progress.step("compiling", len(jobs)), ThreadPoolExecutor(threads) as pool:
        for done in as_completed([pool.submit(job) for job in jobs]):
            done.result()
            progress.advance()
