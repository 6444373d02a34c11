"""Searches for the settings with which a run is expected to be fastest on a machine, among those that fit."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from psearch_jax.assembly.policies import with_adapter_shape
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
from psearch_jax.runtime.paths import write_atomically
from psearch_jax.types import UserError

Changes = Mapping[str, Any]  # from fields such as "rollout.slots" to values
SLOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # per replica
ROWS = (1, 2, 4, 8)  # of a micro-batch, per replica
SIMILAR = 1.03  # times in this proportion count as similar
SAMPLING = ("reshard", *SAMPLER_PROGRAMS)
LEARNING = (*[name for name in LEARNER_PROGRAMS if name != "reshard"], *CRITIC_PROGRAMS)


@dataclass(frozen=True)
class Settings:
    """What to change in a config, and the expected seconds of a step."""

    changes: dict[str, Any]
    seconds: dict[str, float]  # by part


def search(
    config: Config, target: Target, tokens: float, sampled: float, log: Callable[[str], None]
) -> Settings | None:
    """Chooses `mesh.tensor`, `learning.micro_batch_rows` and `model.remat`, then `mesh.rollout_tensor` and
    `rollout.slots`. None of them changes what is learned.

    It takes the settings with which learning is expected to be fastest (planning/expected.py) among those that fit,
    and with them the fastest of sampling that fit: they need memory at different times. A candidate is compiled for
    the machine.

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
    config = with_adapter_shape(with_method(config))
    shape, chips = model_shape(config), len(target.devices)
    tensors = [t for t in range(1, chips + 1) if chips % t == 0 and shape.heads % t == 0]
    steps: dict[int, Any] = {}
    failed = set()  # sizes of `tensor` in training for which no sampler fits

    def parts(changes: Changes) -> dict[str, float]:
        """Expected seconds of what `changes` are about: sampling, if they contain the number of slots."""
        changed = with_changes(config, changes)
        job = Job(shape, changed, tokens, sampled)
        if "rollout.slots" not in changes:
            return learning_seconds(job, Machine(target.chip, chips, changes["mesh.tensor"]), Shares())
        slots = changed.rollout.slots
        if slots not in steps:
            steps[slots] = typical_step(job, slots)
        where = Machine(target.chip, chips, changes["mesh.rollout_tensor"])
        return sampling_seconds(job, where, slots, steps[slots], Shares())

    def fitting(choices: Iterable[Changes], names: Sequence[str], others: Changes) -> Iterator[Settings]:
        """Those of `choices` that fit next to `others`, from the fastest on; similar ones in their own order."""
        counted = [(least_bytes(with_changes(config, choice), shape, chips, names), choice) for choice in choices]
        possible = [choice for least, choice in counted if least <= target.chip.hbm_bytes]
        seconds = [parts(choice) for choice in possible]
        totals = [sum(each.values()) for each in seconds]
        too_large: list[Changes] = []
        for i in _from_the_fastest(totals):
            choice = possible[i]
            if choice["mesh.tensor"] in failed or any(_needs_more(choice, other) for other in too_large):
                continue
            changed = with_changes(config, {**others, **choice})
            fit = make_plan(changed, target, names=names, to_the_end=False, largest_only=True).fits
            log(f"{_shown(choice)}: {totals[i]:.3g} s, {'fits' if fit else 'does not fit'}")
            if fit:
                yield Settings(dict(choice), seconds[i])
            else:
                too_large.append(choice)

    processes = len({device.process_index for device in target.devices})
    any_sampler = {"mesh.rollout_tensor": 0, "rollout.slots": chips}  # which every mesh divides
    for learner in fitting(_learner_choices(config, tensors, chips), LEARNING, any_sampler):
        tensor = learner.changes["mesh.tensor"]
        choices = _sampler_choices(config, tensor, tensors, chips, processes)
        for sampler in fitting(choices, SAMPLING, learner.changes):
            return Settings(learner.changes | sampler.changes, sampler.seconds | learner.seconds)
        failed.add(tensor)
    return None


def _from_the_fastest(seconds: Sequence[float]) -> list[int]:
    """The order in which to try settings: by time, and in their own order where times are similar."""
    order, similar = [], []
    for i in sorted(range(len(seconds)), key=seconds.__getitem__):
        if similar and seconds[i] > SIMILAR * seconds[similar[0]]:
            order += sorted(similar)
            similar = []
        similar.append(i)
    return order + sorted(similar)


def _sampler_choices(
    config: Config, tensor: int, tensors: Sequence[int], chips: int, processes: int
) -> Iterator[Changes]:
    """From few slots to many: more of them only pay if they save time. Every process has the same number."""
    rollouts = config.train.prompts * config.rollout.samples
    nested = [t for t in tensors if t % tensor == 0 or tensor % t == 0]
    for slots, rollout_tensor in sorted((n * chips // t, t) for n, t in itertools.product(SLOTS, nested)):
        if slots <= rollouts and slots % processes == 0:
            yield {**_mesh(tensor), "mesh.rollout_tensor": rollout_tensor, "rollout.slots": slots}


def _learner_choices(config: Config, tensors: Sequence[int], chips: int) -> Iterator[Changes]:
    """From many rows to few: the products of larger micro-batches are more efficient, and with few rows the compiler
    may move activations between devices where weights would be fewer bytes."""
    group = config.learning.mini_batch_rollouts
    for tensor, remat, n in itertools.product(tensors, get_args(Remat), reversed(ROWS)):
        rows = n * chips // tensor
        if group % rows == 0:
            yield {**_mesh(tensor), "learning.micro_batch_rows": rows, "model.remat": remat}


def least_bytes(config: Config, shape: DecoderConfig, chips: int, names: Sequence[str]) -> float:
    """A lower bound on a device's bytes in the sampler's or the learner's programs, counted without compiling.

    It counts what stays for a step, and the sampler's weights and cache, or what an update stores of the layers.
    """
    m, t, rollout, section = shape, config.mesh.tensor, config.rollout, config.model
    weights, replicas = forward_flops(m, [1], 1) / 2, chips // t
    # A replica holds everything if fsdp does not divide the width.
    kept = (2 if section.lora_rank else 12) * weights / (t if m.width % replicas else chips)
    if names == SAMPLING:
        t = config.mesh.rollout_tensor or t
        held = sampler_bytes(m, section, t, rollout.slots * t / chips * rollout.context_tokens)
        unsplit = replicas == 1 or m.width % replicas
        in_place = section.lora_rank and not section.int8_weights and t == config.mesh.tensor and unsplit
        return held if in_place else kept + held  # in place: samples from the frozen weights
    tokens = config.learning.micro_batch_rows / replicas * row_widths(rollout.context_tokens)[-1]
    stored = {"none": 2 * m.width + 3 * m.mlp, "dots": 2 * m.width + 2 * m.mlp, "full": m.width}[section.remat]
    return kept + 2 * m.layers * tokens * stored / t


def _mesh(tensor: int) -> dict[str, int]:
    return {"mesh.data": 1, "mesh.fsdp": -1, "mesh.tensor": tensor}


def _needs_more(one: Changes, other: Changes) -> bool:
    """Whether `one` needs at least as much memory as `other`."""
    remats = get_args(Remat)
    if any(one.get(name) != other.get(name) for name in ("mesh.tensor", "mesh.rollout_tensor")):
        return False
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
    values = {name: json.dumps(value) if isinstance(value, str) else repr(value) for name, value in changes.items()}
    lines = [f"    config.{name} = {value}" for name, value in values.items()]
    write_atomically(
        file,
        f'"""{base.name} with settings for {topology}, by launch/plan.py --search.\n\n{expected}.\n"""\n\n'
        "import runpy\n"
        "from pathlib import Path\n\n"
        "from ml_collections import ConfigDict\n\n\n"
        "def get_config() -> ConfigDict:\n"
        f"    base = Path(__file__).parent / {json.dumps(os.path.relpath(base, file.parent))}\n"
        '    config = runpy.run_path(str(base))["get_config"]()\n' + "\n".join(lines) + "\n    return config\n",
    )
