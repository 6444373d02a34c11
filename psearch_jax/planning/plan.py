"""Whether a run fits a machine, without that machine: compiles the run's real programs for it.

The memory that a chip needs is the compiler's own peak for each program, plus the arrays that stay resident while the
program runs.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.assembly.checks import check_run
from psearch_jax.assembly.policies import with_adapter_shape
from psearch_jax.assembly.programs import make_sampler
from psearch_jax.config import FAMILIES, PRESETS, Config, DecoderConfig, with_method
from psearch_jax.limits import validate
from psearch_jax.models import decoder, hf
from psearch_jax.models.lora import abstract_trained
from psearch_jax.planning.targets import Target
from psearch_jax.rollout.boundary import build_tables
from psearch_jax.rollout.copy import can_sample_in_place
from psearch_jax.rollout.sampler import SamplerShapes
from psearch_jax.runtime.accelerators import GIB, Chip
from psearch_jax.runtime.compiling import Program
from psearch_jax.runtime.paths import TOYS
from psearch_jax.sharding import STORAGE, attach_shardings, make_meshes, param_shardings
from psearch_jax.train.critic import build_critic, critic_learning, without_lm_head
from psearch_jax.train.learner import Learner
from psearch_jax.train.state import abstract_state, make_optimizer, state_shardings
from psearch_jax.types import UserError

TOKENIZER_IDS = 151_665  # of Qwen2.5; Qwen3 has four more, which changes no size

SAMPLER_PROGRAMS = ("prefill", "admit", "extend", "refresh", "generate")
LEARNER_PROGRAMS = ("reshard", "logprobs", "reference_logprobs", "accumulate", "apply")
CRITIC_PROGRAMS = ("critic_values", "critic_accumulate", "critic_apply")  # of learning.algorithm=ppo
START = "start"  # not a program: the train state is built while the loaded weights are still in memory


@dataclass(frozen=True)
class ProgramMemory:
    """What one compiled program needs on one chip, in bytes."""

    peak_bytes: int  # arguments and results included; 0 if the compiler refused the program
    resident_bytes: int  # other arrays that stay in memory while it runs
    compile_s: float
    refused: str = ""  # the compiler's reason, if the program does not fit on its own
    width: int = 0  # of the shape that it was compiled for; 0 if there is only one shape

    @property
    def total_bytes(self) -> int:
        return self.peak_bytes + self.resident_bytes

    def fits(self, chip: Chip) -> bool:
        return not self.refused and self.total_bytes <= chip.hbm_bytes


@dataclass(frozen=True)
class Plan:
    """The memory that a run needs on every chip."""

    topology: str
    chips: int
    chip: Chip
    mesh: Mapping[str, int]
    rollout_mesh: Mapping[str, int]
    model: DecoderConfig
    resident: Mapping[str, int]  # bytes per chip, by group of arrays
    checkpoint_bytes: int  # over all chips, each value counted once
    parameter_bytes: int  # of the policy's trained parameters in it
    programs: Mapping[str, ProgramMemory]  # each at the width that needs most memory, not always the largest
    in_place: bool  # the sampler uses the frozen base directly, so `resident` also counts it in sampling_copy

    @property
    def held_bytes(self) -> int:
        """Bytes of all arrays that a run holds before anything is computed, if none of them is ever freed."""
        return sum(self.resident.values()) - (self.resident["frozen_base"] if self.in_place else 0)

    @property
    def fits(self) -> bool:
        return all(p.fits(self.chip) for p in self.programs.values())

    @property
    def headroom_bytes(self) -> int:
        """Free bytes at the tightest program; below zero if it does not fit. Refused programs have no known peak."""
        return self.chip.hbm_bytes - max((p.total_bytes for p in self.programs.values()), default=0)

    def to_json(self) -> dict[str, Any]:
        programs = {name: asdict(p) | {"total_bytes": p.total_bytes} for name, p in self.programs.items()}
        return asdict(self) | {"programs": programs, "headroom_bytes": self.headroom_bytes, "fits": self.fits}


def model_shape(config: Config) -> DecoderConfig:
    """The dimensions of the config's model, without its weights: from its directory, else from the size in its name.

    Raises:
      UserError: there is no config.json, and no known size in the name.
    """
    path = config.model.path
    if not path:
        return PRESETS[config.model.preset]
    if path in TOYS:
        return hf.read_config(TOYS[path])
    if (Path(path) / "config.json").is_file():
        return hf.read_config(path)
    sizes = {p + name: shape for f in FAMILIES.values() for p in f.hub_prefixes for name, shape in f.presets.items()}
    for name, shape in sizes.items():
        if name in path.lower():
            return shape
    raise UserError(
        f"config.model.path={path}: no config.json there, and no known size in the name; accepted: names that contain "
        f"one of {', '.join(sizes)}"
    )


def make_plan(
    config: Config,
    target: Target,
    log: Callable[[str], None] = lambda _: None,
    names: Sequence[str] = (START, *SAMPLER_PROGRAMS, *LEARNER_PROGRAMS, *CRITIC_PROGRAMS),
) -> Plan:
    """Compiles the programs of a training run for a machine, in every width, and counts the memory of each chip.

    Args:
      names: the programs to compile; default: all.

    Raises:
      UserError: the config contradicts itself or does not suit the mesh.
    """
    config = with_adapter_shape(with_method(config))
    validate(config)
    mesh, rollout_mesh = make_meshes(config.mesh, target.devices)
    model, r, ppo = model_shape(config), config.rollout, config.learning.algorithm == "ppo"
    check_run(config, model, mesh, rollout_mesh, len({device.process_index for device in target.devices}))

    # ---- the arrays that a run holds, without their values ----
    lora = config.model.lora
    _, abstract = decoder.abstract_params(model)
    _, with_values = decoder.abstract_params(model, values=True)
    dtype = jnp.dtype(config.model.sampling_dtype)

    def frozen(weights: nnx.State) -> nnx.State:
        low = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), weights)
        return attach_shardings(low, param_shardings(weights, STORAGE, mesh))

    stored = frozen(abstract)
    base_of_critic = without_lm_head(stored) if lora else None
    optimizer, critic_optimizer = make_optimizer(config.learning, 1000), make_optimizer(critic_learning(config), 1000)

    def state_of(weights: nnx.State, optimizer: Any) -> Any:
        state = abstract_state(abstract_trained(weights, model, lora), optimizer)
        return attach_shardings(state, state_shardings(state, mesh))

    policy, critic = state_of(abstract, optimizer), state_of(with_values, critic_optimizer)
    n_ids = min(TOKENIZER_IDS, model.vocab_rows)
    base = stored if lora else None
    teacher, reference = None, stored if config.learning.kl_coefficient > 0 else None
    if config.learning.teacher:
        teacher = model_shape(replace(config, model=replace(config.model, path=config.learning.teacher)))
        reference = frozen(decoder.abstract_params(teacher)[1])
    learner = Learner(config, model, optimizer, mesh, n_ids, base=base, rollout_mesh=rollout_mesh, teacher=teacher)
    sampler = bare_sampler(config, model, rollout_mesh)
    shapes = SamplerShapes.of(r, rollout_mesh, sampler.by_length)
    slots = sampler.abstract_state(shapes.slots, shapes.positions)
    pool = sampler.abstract_state(shapes.pool_rows, shapes.prompts[-1])
    run_programs = sampler.programs(shapes, suspends=config.train.staleness > 0) + learner.programs(reference)
    if ppo:
        critic_programs = build_critic(config, model, critic_optimizer, mesh, base_of_critic).programs()
        run_programs += [replace(program, name=f"critic_{program.name}") for program in critic_programs]
    programs = {program.name: program for program in run_programs}
    arrays = {
        "parameters": policy.params,
        "optimizer": policy.optimizer,
        "critic": critic.params if ppo else {},
        "critic_optimizer": critic.optimizer if ppo else {},
        "frozen_base": stored if lora else {},
        "reference": reference if reference is not None and (teacher or not lora) else {},
        "sampling_copy": sampler.abstract_params(),
        "sampler_state": slots,
        "prompt_pool": pool,
    }
    resident = {name: bytes_per_chip(tree) for name, tree in arrays.items()}
    in_place = bool(lora) and mesh == rollout_mesh and can_sample_in_place(abstract, mesh)
    head = bytes_per_chip(stored) - bytes_per_chip(base_of_critic) if lora else 0

    # ---- the programs ----
    compiled = {}
    if START in names:  # a resumed run holds less: it loads its checkpoint in place of the fresh state
        state = ("parameters", "parameters", "optimizer", "critic", "critic_optimizer")
        others = resident["frozen_base"] + resident["reference"]
        compiled[START] = ProgramMemory(sum(resident[name] for name in state), others, 0.0)
    for name in [name for name in names if name in programs]:
        others = sum(resident[group] for group in _resident_during(name, in_place))
        if name in ("critic_values", "critic_accumulate"):  # their argument is the base without its lm head
            others += head
        if name == "reference_logprobs" and teacher:  # otherwise its argument is the base, if there is one
            others += resident["frozen_base"]
        variants = []
        for width in programs[name].widths:
            p = _compile(programs[name], width, others)
            variants.append(replace(p, width=width))
            log(f"{name} {width or ''}: {p.refused or f'{p.total_bytes / GIB:.2f} GiB'} ({p.compile_s:.0f} s)")
        worst = max(variants, key=lambda p: (bool(p.refused), p.total_bytes))
        compiled[name] = replace(worst, compile_s=sum(p.compile_s for p in variants))
    saved = [arrays[name] for name in ("parameters", "optimizer", "critic", "critic_optimizer")]
    return Plan(
        topology=target.topology,
        chips=len(target.devices),
        chip=target.chip,
        mesh=dict(mesh.shape),
        rollout_mesh=dict(rollout_mesh.shape),
        model=model,
        resident=resident,
        checkpoint_bytes=_total_bytes(saved),
        parameter_bytes=_total_bytes(policy.params),
        programs=compiled,
        in_place=in_place,
    )


def _resident_during(program: str, in_place: bool) -> tuple[str, ...]:
    """The groups of arrays that stay in memory while a program runs and are not its arguments."""
    both = ("critic", "critic_optimizer")
    if program in SAMPLER_PROGRAMS:
        state = ("parameters", "optimizer", *both, "reference", *(() if in_place else ("frozen_base",)))
        more = {
            "prefill": ("sampler_state",),
            "admit": ("sampling_copy",),
            "extend": ("prompt_pool",),
            "generate": ("prompt_pool",),
        }
        return (*state, *more.get(program, ()))
    return {
        "reshard": ("optimizer", *both, "reference", *(("frozen_base",) if in_place else ())),
        "logprobs": ("optimizer", *both, "reference"),
        "reference_logprobs": ("parameters", "optimizer", *both),
        "accumulate": ("optimizer", *both, "reference"),
        "apply": ("frozen_base", *both, "reference"),
        "critic_values": ("parameters", "optimizer", "reference", "critic_optimizer"),
        "critic_accumulate": ("parameters", "optimizer", "reference", "critic_optimizer"),
        "critic_apply": ("parameters", "optimizer", "reference", "frozen_base"),
    }[program]


def bytes_per_chip(tree: Any) -> int:
    """Bytes of a tree of sharded arrays on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _total_bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def advice(plan: Plan, config: Config) -> list[str]:
    """The settings to change, a line for each program that does not fit."""
    rows = plan.mesh["data"] * plan.mesh["fsdp"]
    micro = f"lower config.learning.micro_batch_rows={config.learning.micro_batch_rows} (a multiple of {rows})"
    chips = "use more chips (config.mesh.fsdp)"
    slots = f"lower config.rollout.slots={config.rollout.slots}"
    changes = {
        **dict.fromkeys(("accumulate", "logprobs", "reference_logprobs", "critic_accumulate", "critic_values"), micro),
        **dict.fromkeys(("apply", "critic_apply", START), chips),
        **dict.fromkeys(("extend", "refresh"), f"{slots} or obs_tokens={config.rollout.obs_tokens}"),
        "reshard": f"raise config.mesh.rollout_tensor={plan.rollout_mesh['tensor']}, or use more chips",
    }
    lines = []
    for name, p in plan.programs.items():
        change = changes.get(name, f"{slots} or context_tokens={config.rollout.context_tokens}")
        if p.refused:
            lines.append(f"{name} does not fit even on its own ({p.refused}): {change}")
        elif not p.fits(plan.chip):
            lines.append(f"{name} is {(p.total_bytes - plan.chip.hbm_bytes) / GIB:.2f} GiB over: {change}")
    return lines


def bare_sampler(config: Config, model: DecoderConfig, mesh: Mesh) -> Any:
    """The config's sampler without a tokenizer: the size of its tables does not depend on the vocabulary's content."""
    tables = build_tables([b""], model.vocab_rows)
    return make_sampler(config, model, mesh, tables, min(TOKENIZER_IDS, model.vocab_rows), [0])


def _compile(program: Program, width: int, resident: int) -> ProgramMemory:
    """Compiles a program for one width. `resident`: bytes of the other arrays in memory."""
    start = time.monotonic()
    try:
        analysis = program.compile(width).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needs = re.search(r"\(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)", str(error))
        reason = f"{needs[1]} GiB of temporaries, {needs[2]} available" if needs else "out of memory"
        return ProgramMemory(0, resident, time.monotonic() - start, reason)
    if program.mesh.devices.flat[0].platform == "tpu":
        peak = analysis.peak_memory_in_bytes
    else:  # other compilers leave temporary arrays out of peak_memory_in_bytes
        arguments_and_results = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
        peak = arguments_and_results - analysis.alias_size_in_bytes + analysis.temp_size_in_bytes
    return ProgramMemory(int(peak), resident, time.monotonic() - start)
