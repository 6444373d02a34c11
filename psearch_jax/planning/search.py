"""Searches for the largest budgets with which a run fits a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from psearch_jax.config import Config, Remat
from psearch_jax.planning.plan import SAMPLER_PROGRAMS, make_plan
from psearch_jax.planning.targets import Target
from psearch_jax.sharding import make_meshes


def search(
    config: Config, target: Target, log: Callable[[str], None], fields: Sequence[str] | None = None
) -> dict[str, int | str]:
    """The largest slots, rows per micro-batch and context that fit, and the `model.remat` that recomputes least.

    Each is searched for separately (the numbers by bisection) with all other settings unchanged. If none fits, it is
    0, or "" for remat.

    Args:
      fields: those to search for; default: all four.
    """

    def fits(names: Sequence[str], changes: Mapping[str, Any]) -> bool:
        changed = config
        for field, value in changes.items():
            section, _, name = field.partition(".")
            changed = replace(changed, **{section: replace(getattr(changed, section), **{name: value})})
        fit = make_plan(changed, target, names=names, to_the_end=False).fits
        log(f"{changes}: {'fits' if fit else 'does not fit'}")
        return fit

    mesh, rollout_mesh = make_meshes(config.mesh, target.devices)
    sampled = rollout_mesh.shape["data"] * rollout_mesh.shape["fsdp"]
    rows, r, le = mesh.shape["data"] * mesh.shape["fsdp"], config.rollout, config.learning
    group = le.mini_batch_rollouts
    micro = [n for n in range(rows, group + 1, rows) if group % n == 0]
    contexts = [*range(512, 4096, 512), *range(4096, 8192, 1024), *range(8192, 32_768 + 1, 2048)]
    contexts = [n for n in contexts if n > r.prompt_tokens]
    updates = ("accumulate", "critic_accumulate")
    by_rows = (*updates, "logprobs", "critic_values")
    slots = [sampled * n for n in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)]
    searches: dict[str, Callable[[], int | str]] = {
        "rollout.slots": lambda: _largest(slots, lambda n: fits(SAMPLER_PROGRAMS, {"rollout.slots": n})),
        "learning.micro_batch_rows": lambda: _largest(
            micro, lambda n: fits(by_rows, {"learning.micro_batch_rows": n})
        ),
        "rollout.context_tokens": lambda: _largest(
            contexts, lambda n: fits((*by_rows, *SAMPLER_PROGRAMS), {"rollout.context_tokens": n})
        ),
        "model.remat": lambda: next((r for r in get_args(Remat) if fits(updates, {"model.remat": r})), ""),
    }
    return {field: searches[field]() for field in fields or searches}


def _largest(values: Sequence[int], accepted: Callable[[int], bool]) -> int:
    """The largest accepted value of a rising sequence in which all smaller ones are accepted too; 0 if none is."""
    low, high = 0, len(values)  # values[:low] are accepted, values[high:] are not
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if accepted(values[middle]) else (low, middle)
    return values[low - 1] if low else 0
