"""Searches for the settings with which a run is expected to be fastest on a machine, among those that fit."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from psearch_jax.config import Config, DecoderConfig, Remat, with_method
from psearch_jax.models.buckets import row_widths
from psearch_jax.planning.expected import (
    Job,
    Machine,
    Shares,
    learning_seconds,
    sampler_bytes,
    sampling_seconds,
    typical_step,
)
from psearch_jax.planning.plan import CRITIC_PROGRAMS, LEARNER_PROGRAMS, SAMPLER_PROGRAMS, make_plan, model_shape
from psearch_jax.planning.targets import Target
from psearch_jax.runtime.accelerators import forward_flops
from psearch_jax.runtime.paths import write_whole
from psearch_jax.types import UserError

Changes = Mapping[str, Any]  # from fields such as "rollout.slots" to values
SLOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # per replica
ROWS = (1, 2, 4, 8)  # of a micro-batch, per replica
SIMILAR = 1.03  # settings whose times differ by less are tried in their own order


@dataclass(frozen=True)
class Settings:
    """What to change in a config, and the expected seconds of a step."""

    changes: dict[str, Any]
    seconds: dict[str, float]  # by part


def search(
    config: Config, target: Target, tokens: float, sampled: float, log: Callable[[str], None]
) -> Settings | None:
    """The `mesh.tensor`, `rollout.slots`, `learning.micro_batch_rows` and `model.remat` with the fewest expected
    seconds per step (planning/expected.py) whose programs fit. None of them changes what is learned.

    Sampling and learning need memory at different times and are searched for separately, for each size of `tensor`,
    from the fastest settings on. A candidate is compiled for the machine.

    Args:
      tokens: mean tokens per rollout.
      sampled: how many of them are sampled.

    Returns:
      None if nothing fits.

    Raises:
      UserError: the config samples on devices of its own.
    """
    if config.mesh.rollout_devices:
        raise UserError(f"--search: found config.mesh.rollout_devices={config.mesh.rollout_devices}, accepted: 0")
    config = with_method(config)
    shape, chips = model_shape(config), len(target.devices)
    tensors = [t for t in range(1, chips + 1) if chips % t == 0 and shape.heads % t == 0]
    steps: dict[int, Any] = {}

    def parts(changes: Changes) -> dict[str, float]:
        changed = with_changes(config, changes)
        job = Job(shape, changed, tokens, sampled)
        where = Machine(target.chip, chips, changes["mesh.tensor"])
        if "rollout.slots" not in changes:
            return learning_seconds(job, where, Shares())
        slots = changed.rollout.slots
        if slots not in steps:
            steps[slots] = typical_step(job, slots)
        return sampling_seconds(job, where, slots, steps[slots], Shares())

    def fastest(choices: Sequence[Changes], names: Sequence[str], limit: float) -> Settings | None:
        """The fastest of `choices` that fits and takes less than `limit`; of similar ones the first."""
        ordered = sorted(
            ((parts(choice), i, choice) for i, choice in enumerate(choices)),
            key=lambda one: (round(math.log(sum(one[0].values())) / math.log(SIMILAR)), one[1]),
        )
        too_large: list[Changes] = []
        for seconds, _, choice in ordered:
            if sum(seconds.values()) >= limit:
                continue
            if any(_needs_more(choice, other) for other in too_large):
                continue
            changed = with_changes(config, choice)
            fit = make_plan(changed, target, names=names, to_the_end=False, largest_only=True).fits
            log(f"{_shown(choice)}: {sum(seconds.values()):.3g} s, {'fits' if fit else 'does not fit'}")
            if fit:
                return Settings(dict(choice), seconds)
            too_large.append(choice)
        return None

    def possible(choices: Iterable[Changes], names: Sequence[str]) -> list[Changes]:
        counted = ((least_bytes(with_changes(config, choice), shape, chips, names), choice) for choice in choices)
        return [choice for least, choice in counted if least <= target.chip.hbm_bytes]

    best, limit, learning = None, math.inf, (*LEARNER_PROGRAMS, *CRITIC_PROGRAMS)
    for tensor in tensors:
        learners = possible(_learner_choices(config, tensor, chips // tensor), learning)
        samplers = possible(_sampler_choices(config, tensor, chips // tensor), SAMPLER_PROGRAMS)
        if not learners or not samplers:
            continue
        least = min(sum(parts(choice).values()) for choice in samplers)
        learner = fastest(learners, learning, limit - least)
        if learner is None:
            continue
        sampler = fastest(samplers, SAMPLER_PROGRAMS, limit - sum(learner.seconds.values()))
        if sampler is None:
            continue
        best = Settings(sampler.changes | learner.changes, sampler.seconds | learner.seconds)
        limit = sum(best.seconds.values())
    return best


def _sampler_choices(config: Config, tensor: int, replicas: int) -> Iterator[Changes]:
    """From few slots to many: more of them only pay if they save time."""
    rollouts = config.train.prompts * config.rollout.samples
    for n in SLOTS:
        if n * replicas <= rollouts:
            yield {**_mesh(tensor), "rollout.slots": n * replicas}


def _learner_choices(config: Config, tensor: int, replicas: int) -> Iterator[Changes]:
    """From many rows to few: the products of larger micro-batches are more efficient, and with few rows the compiler
    may move activations between devices where weights would be fewer bytes."""
    group = config.learning.mini_batch_rollouts
    rows = [n * replicas for n in ROWS if group % (n * replicas) == 0]
    for remat, n in itertools.product(get_args(Remat), reversed(rows)):
        yield {**_mesh(tensor), "learning.micro_batch_rows": n, "model.remat": remat}


def least_bytes(config: Config, shape: DecoderConfig, chips: int, names: Sequence[str]) -> float:
    """A lower bound on a device's bytes in the sampler's or the learner's programs, counted without compiling.

    It counts what stays for a step, and the sampler's weights and cache, or what an update stores of the layers.
    """
    m, t, rollout, section = shape, config.mesh.tensor, config.rollout, config.model
    weights, replicas = forward_flops(m, [1], 1) / 2, chips // t
    # A replica holds everything if fsdp does not divide the width.
    kept = (2 if section.lora_rank else 12) * weights / (t if m.width % replicas else chips)
    if names == SAMPLER_PROGRAMS:
        in_place = section.lora_rank and not section.int8_weights and replicas == 1  # samples from the frozen weights
        held = sampler_bytes(m, section, t, rollout.slots / replicas * rollout.context_tokens)
        return held if in_place else kept + held
    tokens = config.learning.micro_batch_rows / replicas * row_widths(rollout.context_tokens)[-1]
    stored = {"none": 2 * m.width + 3 * m.mlp, "dots": 2 * m.width + 2 * m.mlp, "full": m.width}[section.remat]
    return kept + 2 * m.layers * tokens * stored / t


def _mesh(tensor: int) -> dict[str, int]:
    return {"mesh.data": 1, "mesh.fsdp": -1, "mesh.tensor": tensor}


def _needs_more(one: Changes, other: Changes) -> bool:
    """Whether `one` needs at least as much memory as `other`."""
    remats = get_args(Remat)
    if "model.remat" in one and remats.index(one["model.remat"]) > remats.index(other["model.remat"]):
        return False
    counts = ("learning.micro_batch_rows", "rollout.slots")
    return all(one[name] >= other[name] for name in counts if name in one)


def with_changes(config: Config, changes: Changes) -> Config:
    """The config with other values of some fields."""
    for field, value in changes.items():
        section, _, name = field.partition(".")
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def _shown(changes: Changes) -> str:
    return " ".join(f"{name}={value}" for name, value in changes.items() if name not in ("mesh.data", "mesh.fsdp"))


def write_config(file: Path, base: Path, changes: Changes, topology: str, expected: str) -> None:
    """Writes a config file: that of `base`, with other values of some fields."""
    lines = [f"    config.{name} = {value!r}" for name, value in changes.items()]
    write_whole(
        file,
        f'"""{base.name} with settings for {topology}, by launch/plan.py --search.\n\n{expected}.\n"""\n\n'
        "import runpy\n"
        "from pathlib import Path\n\n"
        "from ml_collections import ConfigDict\n\n\n"
        "def get_config() -> ConfigDict:\n"
        f"    base = Path(__file__).parent / {json.dumps(os.path.relpath(base, file.parent))}\n"
        '    config = runpy.run_path(str(base))["get_config"]()\n' + "\n".join(lines) + "\n    return config\n",
    )
