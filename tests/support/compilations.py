"""Counts compilations."""

from __future__ import annotations

from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"  # the event that JAX records for every compilation


class CompilationCounter:
    """Counts the compilations of this process from its construction on.

    Attributes:
      count: the number so far, of programs of any origin.
    """

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, *_: Any, **__: Any) -> None:
        self.count += event == _COMPILED
