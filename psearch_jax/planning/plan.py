"""Whether a run fits a machine, without that machine: compiles the run's real programs for it.

The memory that a chip needs is the compiler's own peak for each program, plus the arrays that stay resident while the
program runs.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from psearch_jax.assembly.policies import check_context, check_shares, with_adapter_shape
from psearch_jax.assembly.programs import make_critic, make_learner, make_sampler
from psearch_jax.config import PRESETS, Config, DecoderConfig, with_method
from psearch_jax.limits import validate
from psearch_jax.models import decoder, hf
from psearch_jax.models.lora import abstract_trained
from psearch_jax.planning.hlo import Cost, cost
from psearch_jax.planning.targets import Target
from psearch_jax.rollout.boundary import build_tables
from psearch_jax.rollout.collect import pool_rows, rows_per_call, widths
from psearch_jax.rollout.copy import sampled_in_place
from psearch_jax.rollout.sampler import Sampler
from psearch_jax.runtime.accelerators import GIB, GPUS, Chip
from psearch_jax.runtime.paths import TOY_POLICY
from psearch_jax.sharding import (
    STORAGE,
    check_heads,
    check_rows,
    make_meshes,
    param_shardings,
    placed,
    stand_in,
)
from psearch_jax.train.critic import critic_learning, without_lm_head
from psearch_jax.train.state import abstract_state, make_optimizer, state_shardings
from psearch_jax.types import UserError

LARGE = 2**20  # bytes; smaller arrays are not listed
ARRAY = ("name", "shape", "sharding", "bytes_per_chip", "replicated")  # the listed fields of a large array
TOKENIZER_IDS = 151_665  # of Qwen2.5; Qwen3 has four more, which changes no size


SAMPLER_PROGRAMS = ("prefill", "admit", "extend", "refresh", "generate")
LEARNER_PROGRAMS = ("reshard", "logprobs", "accumulate", "apply")
CRITIC_PROGRAMS = ("critic_values", "critic_accumulate", "critic_apply")  # of learning.algorithm=ppo
SAMPLED = ("sampling_copy", "sampler_state", "prompt_pool")  # groups of arrays on the chips that sample
START = "start"  # not a program: the train state is built while the loaded weights are still in memory


@dataclass(frozen=True)
class Program:
    """One compiled program on one chip. `total_bytes` is its peak plus all other arrays resident at that time."""

    peak_bytes: int  # arguments and results included; 0 if the compiler refused the program
    resident_bytes: int  # other arrays that stay in memory while it runs
    compile_s: float
    refused: str = ""  # the compiler's reason, if the program does not fit on its own
    width: int = 0  # of the shape that it was compiled for; 0 if there is only one shape
    # At the largest width. Decode steps and the loop over the vocabulary are not in `flops` and `bytes`: `turn_*` is
    # one iteration. The attention kernel is not counted. TPU only: a GPU's matmuls are custom calls without a count.
    cost: Cost | None = None

    @property
    def total_bytes(self) -> int:
        return self.peak_bytes + self.resident_bytes

    def fits(self, chip: Chip) -> bool:
        return not self.refused and self.total_bytes <= chip.hbm_bytes


@dataclass(frozen=True)
class Plan:
    """The memory that a run needs on every chip. With `mesh.rollout_devices` a chip trains or samples."""

    topology: str
    chips: int
    chip: Chip
    mesh: Mapping[str, int]  # of the chips that train
    rollout_mesh: Mapping[str, int]  # of those that sample
    model: DecoderConfig
    resident: Mapping[str, int]  # bytes per chip, by group of arrays
    checkpoint_bytes: int  # over all chips, each value counted once
    parameter_bytes: int  # of the policy's trained parameters in it
    programs: Mapping[str, Program]  # each program at the width that needs most memory, not always the largest
    widths: Mapping[str, Mapping[int, int]]  # program -> width -> total bytes; -1: refused
    large: tuple[tuple[str, tuple[int, ...], str, int, bool], ...]  # fields as in ARRAY
    in_place: bool  # the sampler uses the frozen base directly, so `resident` also counts it in sampling_copy

    @property
    def held_bytes(self) -> int:
        """Bytes of all arrays that a run holds before anything is computed, if none of them is ever freed."""
        held = sum(self.resident.values()) - (self.resident["frozen_base"] if self.in_place else 0)
        sampling = sum(self.resident[name] for name in SAMPLED)
        return max(sampling, held - sampling) if self.split else held

    @property
    def split(self) -> bool:
        """Whether some chips only sample and the others only train."""
        return math.prod(self.mesh.values()) < self.chips

    @property
    def fits(self) -> bool:
        return all(p.fits(self.chip) for p in self.programs.values())

    @property
    def headroom_bytes(self) -> int:
        """Free bytes at the tightest program; below zero if it does not fit. Refused programs have no known peak."""
        return self.chip.hbm_bytes - max((p.total_bytes for p in self.programs.values()), default=0)

    @property
    def headroom_offloaded_bytes(self) -> int:
        """`headroom_bytes` if each optimizer state were in host memory except while it is applied."""
        away = {"apply": self.resident["optimizer"], "critic_apply": self.resident["critic_optimizer"]}
        both = sum(away.values())
        needs = (p.total_bytes - (both - away.get(name, 0)) for name, p in self.programs.items())
        return self.chip.hbm_bytes - max(needs, default=0)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON; `update` is the larger of `accumulate` and `apply`, with the compile time of both."""
        programs = {name: asdict(p) | {"total_bytes": p.total_bytes} for name, p in self.programs.items()}
        if {"accumulate", "apply"} <= set(programs):
            parts = [programs["accumulate"], programs["apply"]]
            seconds = {"compile_s": sum(part["compile_s"] for part in parts)}
            programs["update"] = max(parts, key=lambda part: part["total_bytes"]) | seconds
        return {
            "topology": self.topology,
            "chips": self.chips,
            "hbm_bytes": self.chip.hbm_bytes,
            "mesh": dict(self.mesh),
            "rollout_mesh": dict(self.rollout_mesh),
            "resident": dict(self.resident),
            "checkpoint_bytes": self.checkpoint_bytes,
            "parameter_bytes": self.parameter_bytes,
            "programs": programs,
            "widths": {name: dict(total_bytes) for name, total_bytes in self.widths.items()},
            "headroom_bytes": self.headroom_bytes,
            "headroom_offloaded_bytes": self.headroom_offloaded_bytes,
            "fits": self.fits,
            "arrays": [dict(zip(ARRAY, row, strict=True)) for row in self.large],
        }


def model_shape(config: Config) -> DecoderConfig:
    """The dimensions of the config's model, without its weights: from its directory, else from the size in its name.

    Raises:
      UserError: there is no config.json, and no known size in the name.
    """
    path = config.model.path
    if not path:
        return PRESETS[config.model.preset]
    if path == "toy":  # the policy that ships
        return hf.read_config(TOY_POLICY)
    if (Path(path) / "config.json").is_file():
        return hf.read_config(path)
    name = re.search(r"Qwen(2|2\.5|3)-(\d+(?:\.\d+)?)B", path)
    size = f"{'qwen3-' if name[1] == '3' else ''}{name[2]}b" if name else ""
    if size in PRESETS:
        return PRESETS[size]
    raise UserError(
        f"config.model.path={path}: no config.json there, and no known size in the name; accepted: names like "
        "Qwen/Qwen2.5-7B and Qwen/Qwen3-8B"
    )


def make_plan(
    config: Config,
    target: Target,
    log: Callable[[str], None] = lambda _: None,
    names: Sequence[str] = (START, *SAMPLER_PROGRAMS, *LEARNER_PROGRAMS, *CRITIC_PROGRAMS),
    largest_only: bool = False,
    to_the_end: bool = True,
) -> Plan:
    """Compiles the programs of a training run for a machine, in every width, and counts the memory of each chip.

    Args:
      names: the programs to compile; default: all.
      largest_only: compile only the largest width, which is quicker; a smaller one may need more memory.
      to_the_end: False stops after the first program that does not fit.

    Raises:
      UserError: the config contradicts itself or does not suit the mesh.
    """
    config = with_adapter_shape(with_method(config))
    validate(config)
    mesh, rollout_mesh = make_meshes(config.mesh, target.devices)
    split = config.mesh.rollout_devices > 0
    model = model_shape(config)
    check_context(config, model)
    check_shares(config, training=True, processes=len({device.process_index for device in target.devices}))
    check_heads(mesh, model.heads)
    check_heads(rollout_mesh, model.heads, "rollout_tensor")
    check_rows(rollout_mesh, rollout__slots=config.rollout.slots)
    check_rows(mesh, learning__micro_batch_rows=config.learning.micro_batch_rows)
    optimizer, ppo = make_optimizer(config.learning, 1000), config.learning.algorithm == "ppo"
    critic_optimizer = make_optimizer(critic_learning(config), 1000)
    prompts = pool_rows(config.rollout, rollout_mesh)

    def programs(config: Config) -> tuple[Any, Any, Any, dict[str, dict[int, Any]]]:
        r = config.rollout
        n_ids = min(TOKENIZER_IDS, model.vocab_rows)
        learner = make_learner(config, model, mesh, optimizer, n_ids, rollout_mesh=rollout_mesh)
        sampler = bare_sampler(config, model, rollout_mesh)
        rows = (r.slots, r.context_tokens, prompts, rows_per_call(r, rollout_mesh))
        slots, pool, traces = sampler.traced(*rows, widths(r, sampler.by_length), config.train.staleness > 0)
        traces |= learner.traced()
        if ppo:
            critic = make_critic(config, model, mesh, critic_optimizer)
            traces |= {f"critic_{name}": by_width for name, by_width in critic.traced(base_of_critic).items()}
        return sampler.abstract_params(), slots, pool, traces

    _, abstract = decoder.abstract_params(model)
    _, with_values = decoder.abstract_params(model, values=True)
    lora = config.model.lora
    dtype = jnp.dtype(config.model.sampling_dtype)
    low = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), abstract)
    stored = placed(low, param_shardings(abstract, STORAGE, mesh))
    base_of_critic = without_lm_head(stored) if lora else None
    policy, critic = (
        placed(state, state_shardings(state, mesh))
        for state in (
            abstract_state(abstract_trained(weights, model, lora), made)
            for weights, made in ((abstract, optimizer), (with_values, critic_optimizer))
        )
    )
    with stand_in() if target.absent else contextlib.nullcontext():
        copy, slots, pool, traces = programs(config)
        wide = programs(_in_float32(config))[-1] if target.absent else {}
    arrays = {
        "parameters": policy.params,
        "optimizer": policy.optimizer,
        "critic": critic.params if ppo else {},
        "critic_optimizer": critic.optimizer if ppo else {},
        "frozen_base": stored if lora else {},
        "reference": stored if config.learning.kl_coefficient > 0 and not lora else {},
        "sampling_copy": copy,
        "sampler_state": slots,
        "prompt_pool": pool,
    }
    resident = {name: bytes_per_chip(tree) for name, tree in arrays.items()}
    saved = [arrays[name] for name in ("parameters", "optimizer", "critic", "critic_optimizer")]

    def bytes_of(tree: Any) -> int:
        return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))

    def resident_bytes(*names: str) -> int:
        return sum(resident[name] for name in names)

    # A GPU decodes from a second copy of the layers, unstacked.
    layers = [copy[part] for part in ("layers", "adapters", "scales") if part in copy]
    unstacked = bytes_per_chip(layers) if target.absent and config.model.unstacked_decoding else 0
    # Whether the sampler uses the frozen base directly, without a copy.
    in_place = (
        bool(lora) and mesh == rollout_mesh and not config.model.int8_weights and sampled_in_place(abstract, mesh)
    )
    both = ("critic", "critic_optimizer")
    state = ("parameters", "optimizer", *both, "reference", *(() if in_place else ("frozen_base",)))
    kept = () if split else state  # on the sampler's chips, while it works
    # Resident during the critic's programs, whose arguments include the frozen base without the policy's lm head.
    during_critic = resident_bytes("parameters", "optimizer", "reference")
    head = bytes_per_chip(stored) - bytes_per_chip(base_of_critic) if lora else 0
    others = {
        "prefill": resident_bytes(*kept, "sampler_state"),
        "admit": resident_bytes(*kept, "sampling_copy"),
        "extend": resident_bytes(*kept, "prompt_pool"),
        "refresh": resident_bytes(*kept),
        "generate": resident_bytes(*kept, "prompt_pool") + unstacked,
        "reshard": resident_bytes("optimizer", *both, "reference", *(("frozen_base",) if in_place else ())),
        "logprobs": resident_bytes("optimizer", *both, "reference"),
        "accumulate": resident_bytes("optimizer", *both, "reference"),
        "apply": resident_bytes("frozen_base", *both, "reference"),
        "critic_values": during_critic + resident_bytes("critic_optimizer") + head,
        "critic_accumulate": during_critic + resident_bytes("critic_optimizer") + head,
        "critic_apply": during_critic + resident_bytes("frozen_base"),
    }
    compiled, by_width = {}, {}
    if START in names:  # a resumed run holds less: it loads its checkpoint in place of the fresh state
        loaded_and_state = resident_bytes("parameters", "parameters", "optimizer", *both)
        compiled[START] = Program(loaded_and_state, resident_bytes("frozen_base", "reference"), 0.0)
    for name in [name for name in names if name != START and traces.get(name)]:
        variants, largest = [], list(traces[name])[-1]
        for width, trace in list(traces[name].items())[-1 if largest_only else 0 :]:
            counted = to_the_end and width == largest
            where = rollout_mesh if name in SAMPLER_PROGRAMS else mesh
            p = _compile(trace, where, others[name], wide.get(name, {}).get(width), counted)
            variants.append(replace(p, width=width))
            log(f"{name} {width or ''}: {p.refused or f'{p.total_bytes / GIB:.2f} GiB'} ({p.compile_s:.0f} s)")
        worst = max(variants, key=lambda p: (bool(p.refused), p.total_bytes))
        compiled[name] = replace(worst, compile_s=sum(p.compile_s for p in variants), cost=variants[-1].cost)
        by_width[name] = {p.width: -1 if p.refused else p.total_bytes for p in variants}
        if not (to_the_end or worst.fits(target.chip)):
            break
    large = tuple(
        row for name, tree in arrays.items() for row in _large(name, tree, rollout_mesh if name in SAMPLED else mesh)
    )
    chips = len(target.devices)
    return Plan(
        target.topology,
        chips,
        target.chip,
        dict(mesh.shape),
        dict(rollout_mesh.shape),
        model,
        resident,
        bytes_of(saved),
        bytes_of(arrays["parameters"]),
        compiled,
        by_width,
        large,
        in_place,
    )


def bytes_per_chip(tree: Any) -> int:
    """Bytes of a tree of sharded arrays on one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def advice(plan: Plan, config: Config) -> list[str]:
    """The settings to change, a line for each program that does not fit."""
    rows = plan.mesh["data"] * plan.mesh["fsdp"]
    micro = f"lower config.learning.micro_batch_rows={config.learning.micro_batch_rows} (a multiple of {rows})"
    chips = "use more chips (config.mesh.fsdp)"
    split_further = f"raise config.mesh.rollout_tensor={plan.rollout_mesh['tensor']}, or use more chips"
    words = {
        **dict.fromkeys(("accumulate", "logprobs", "critic_accumulate", "critic_values"), micro),
        **dict.fromkeys(("apply", "critic_apply", START), chips),
        "reshard": chips if plan.split else split_further,
        **dict.fromkeys(
            ("extend", "refresh"),
            f"lower config.rollout.slots={config.rollout.slots} or obs_tokens={config.rollout.obs_tokens}",
        ),
    }
    default = f"lower config.rollout.slots={config.rollout.slots} or context_tokens={config.rollout.context_tokens}"
    if plan.topology.partition(":")[0] in GPUS and config.model.unstacked_decoding:
        words["generate"] = f"{default}, or set config.model.unstacked_decoding=False"
    lines = []
    for name, p in plan.programs.items():
        if p.refused:
            lines.append(f"{name} does not fit even on its own ({p.refused}): {words.get(name, default)}")
        elif p.total_bytes > plan.chip.hbm_bytes:
            over = (p.total_bytes - plan.chip.hbm_bytes) / GIB
            lines.append(f"{name} is {over:.2f} GiB over: {words.get(name, default)}")
    return lines


def bare_sampler(config: Config, model: DecoderConfig, mesh: Mesh) -> Sampler:
    """The config's sampler without a tokenizer: the size of its tables does not depend on the vocabulary's content."""
    tables = build_tables([b""], model.vocab_rows)
    return make_sampler(config, model, mesh, tables, min(TOKENIZER_IDS, model.vocab_rows), [0])


def _in_float32(config: Config) -> Config:
    return replace(config, model=replace(config.model, dtype="float32", sampling_dtype="float32"))


def _compile(
    trace: Callable[[], Any], mesh: Mesh, resident: int, wide: Callable[[], Any] | None, counted: bool
) -> Program:
    """Compiles one program. `wide`, if given, is the program whose temporary arrays are counted (`cuda_target`).

    `counted`: also computes its cost.
    """
    start = time.monotonic()
    try:
        with jax.set_mesh(mesh):
            program = trace().lower().compile()
            analysis = program.memory_analysis()
            temporary = wide().lower().compile().memory_analysis() if wide else analysis
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needs = re.search(r"\(([\d.]+)G\) exceeds available HBM \(([\d.]+)G\)", str(error))
        reason = f"{needs[1]} GiB of temporaries, {needs[2]} available" if needs else "out of memory"
        return Program(0, resident, time.monotonic() - start, reason)
    platform = mesh.devices.flat[0].platform
    if platform == "tpu":
        peak = analysis.peak_memory_in_bytes
    else:  # other compilers leave temporary arrays out of peak_memory_in_bytes
        held = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        peak = held + temporary.temp_size_in_bytes
    seconds = time.monotonic() - start
    counted = counted and platform == "tpu"
    return Program(int(peak), resident, seconds, cost=_cost_if_known(program.as_text()) if counted else None)


def _cost_if_known(text: str) -> Cost | None:
    try:
        return cost(text)
    except (AttributeError, IndexError, KeyError, ValueError, ZeroDivisionError):
        return None  # HLO in a form that `cost` cannot parse; whether the program fits is known all the same


def _large(group: str, tree: Any, mesh: Mesh) -> list[tuple[str, tuple[int, ...], str, int, bool]]:
    """A row per large array: name, shape, sharding, bytes per chip, and whether it is replicated on every chip."""
    rows = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        size = math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        if size < LARGE:
            continue
        here = bytes_per_chip(x)
        name = group + jax.tree_util.keystr(path).replace("['", ".").replace("']", "")
        rows.append((name, tuple(x.shape), str(tuple(x.sharding.spec)), here, here == size and mesh.size > 1))
    return rows
