"""Checks everything that a run needs before it starts, and reports for each check the state and how to fix it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from psearch_jax.assembly import build
from psearch_jax.assembly.checks import MEASURED, check_vocabulary, missing_inputs, needs_retriever
from psearch_jax.assembly.policies import load_tokenizer, with_adapter_shape
from psearch_jax.assembly.questions import check_best_metric, make_world
from psearch_jax.assembly.tools import make_dialect, make_tools
from psearch_jax.config import Config, with_method
from psearch_jax.data.held_out import hold_out, pick
from psearch_jax.data.prepared import count_kinds, location_exists, open_questions
from psearch_jax.eval.benchmarks import CLOSED_WORLD
from psearch_jax.limits import validate
from psearch_jax.planning.plan import Plan, make_plan, model_shape
from psearch_jax.planning.targets import Target
from psearch_jax.rl.own_terms import load_terms
from psearch_jax.rl.rewards import never_pays_for_splitting
from psearch_jax.runtime.accelerators import GIB, Chip, chip_of
from psearch_jax.runtime.memory import available_memory
from psearch_jax.runtime.paths import is_remote, locate, packaged
from psearch_jax.sharding import describe_meshes, make_meshes
from psearch_jax.text.prompts import load_template
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.checkpointing import settings as recorded
from psearch_jax.train.checkpointing.checkpoint import find_checkpoint, read_loop
from psearch_jax.types import ITEM, UserError, format_items
from retrieval.protocol import CorpusError, RetrievalError

# Device files of accelerators, and what to do if JAX uses none.
DEVICE_FILES = {
    "/dev/nvidiactl": "`pip install -e '.[cuda]'`; if it is installed, check CUDA_VISIBLE_DEVICES, and with "
    "nvidia-smi the driver (CUDA 13 needs 580 or newer; for an older one `pip install -e '.[cuda12]'` instead)",
    "/dev/accel0": "`pip install -e '.[tpu]'`",
    "/dev/vfio/0": "`pip install -e '.[tpu]'`",
}
SHARDS = re.compile(r"-\d{5}-of-(\d{5})\.safetensors$")


@dataclass(frozen=True)
class Finding:
    """The result of one check; with `wrong`, the text says how to fix it."""

    name: str
    text: str
    wrong: bool = False

    def __str__(self) -> str:
        return f"{'FIX' if self.wrong else 'ok':<5} {self.name:<10} {self.text}"


def examine(config: Config, workdir: str, root: Path = Path("/")) -> Iterator[Finding]:
    """Yields each finding as soon as it is known; leaves out checks whose prerequisites are missing.

    Args:
      config: the config of a training run.
      workdir: the directory of the run.
      root: the root of the file system.
    """
    reported: set[str] = set()
    for finding in _run_checks(config, workdir, root):
        if not (finding.wrong and finding.text in reported):  # another check met the same error
            yield finding
        reported.add(finding.text)


def _run_checks(config: Config, workdir: str, root: Path) -> Iterator[Finding]:
    yield from run_check("devices", check_devices, root)
    yield from run_check("config", check_settings, config)
    config = with_method(config)
    yield from run_check("reward", lambda: ", ".join(term.name for term in load_terms(config)))
    yield from run_check("model", check_model, config)
    meshes = list(run_check("mesh", lambda: describe_meshes(*(mesh.shape for mesh in make_meshes(config.mesh)))))
    yield from meshes
    plans: list[Plan] = []
    if not any(finding.wrong for finding in meshes):
        yield from run_check("memory", check_memory, config, plans)
    yield from run_check("questions", check_questions, config)
    yield from run_check("prompt", check_prompt, config)
    yield from run_check("passages", check_passages, config)
    if plans:
        yield from run_check("disk", check_disk, config, plans[0], workdir)
    yield from run_check("workdir", check_workdir, config, workdir)


def run_check(name: str, check: Callable[..., str | None], *arguments: Any) -> Iterator[Finding]:
    """Yields the text of a check, if any. An error becomes a finding to fix; a list of errors becomes one for each."""
    try:
        text = check(*arguments)
    except (UserError, CorpusError, RetrievalError, OSError, RuntimeError) as error:  # JAX raises RuntimeError
        first, *items = str(error).split(ITEM)
        for item in items or [first]:
            yield Finding(name, " ".join(item.split()), True)
    else:
        if text:
            yield Finding(name, text)


def check_devices(root: Path = Path("/")) -> str:
    """The devices that JAX uses, and whether it misses an accelerator of this machine."""
    used, processes = jax.devices(), jax.process_count()
    text = f"{len(used)} x {used[0].device_kind}, {processes} process{'es' * (processes > 1)}, jax {jax.__version__}"
    if used[0].platform == "cpu" and os.environ.get("JAX_PLATFORMS") != "cpu":
        for file, fix in DEVICE_FILES.items():
            if (root / file.lstrip("/")).exists():
                raise UserError(f"{text}, although {file} exists: {fix}")
    return text


def check_settings(config: Config) -> str:
    """Checks that the fields agree with each other and name everything that a run needs."""
    config = with_method(config)
    validate(config)
    missing = missing_inputs(config)
    if missing:
        raise UserError(format_items("this run needs:", missing))
    return f"{config.method}, {config.train.steps} steps of {config.train.prompts * config.rollout.samples} rollouts"


def check_model(config: Config) -> str | None:
    """Checks that no file of the weights is missing and that the tokenizer fits them."""
    path = config.model.path
    directory = Path(packaged(path))
    if not path:
        return f"random weights of {config.model.preset}"
    if not directory.is_dir():
        return None
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{path}: no *.safetensors found, accepted: a complete Hugging Face directory")
    numbered = [match for file in files if (match := SHARDS.search(file.name))]
    if numbered and len(numbered) != int(numbered[0][1]):
        count = f"{path}: found {len(numbered)} of {int(numbered[0][1])} files of weights"
        raise UserError(f"{count}, accepted: all of them (`hf download` resumes an interrupted download)")
    load_tokenizer(config, model_shape(config), str(directory))
    size = sum(file.stat().st_size for file in files)
    return f"{path}, {len(files)} file{'s' * (len(files) > 1)} of {size / GIB:.2f} GiB"


def check_memory(config: Config, plans: list[Plan]) -> str:
    """Compares the memory that a run holds on each device throughout with what is available; appends to `plans`."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        room = available_memory() // jax.local_device_count()
    else:
        chip = chip_of(device)
        room = int((device.memory_stats() or {}).get("bytes_limit", 0)) or (chip.hbm_bytes if chip else 0)
    try:
        model_shape(config)
    except UserError as error:
        if Path(config.model.path).exists():
            raise
        return f"not counted: {error}"  # of a model that a run would download
    target = Target("this machine", jax.devices(), Chip(room, 0.0, 0.0), device.device_kind)
    plans.append(make_plan(config, target, names=()))
    needed = f"{plans[0].held_bytes / GIB:.2f}"
    if not room:
        return f"{needed} GiB on each device before any computation; the available memory is unknown"
    text = f"{needed} of {room / GIB:.2f} GiB on each device before any computation"
    if plans[0].held_bytes > room:
        smaller = ", or configs/qwen0p5b_cpu.py" if device.platform == "cpu" else ""
        raise UserError(f"{text}: use more memory or chips, model.lora_rank, or fewer rollout.slots{smaller}")
    return text if device.platform == "cpu" else f"{text}; launch/plan.py computes the peak"


def check_questions(config: Config) -> str | None:
    """The number of questions for training and for validation, and whether the reward suits them."""
    data, prompts = config.data, config.train.prompts

    def check_count(count: int) -> None:
        if count < prompts:
            raise UserError(
                f"{data.source}: found {count} questions for steps of {prompts}, accepted: more questions, or a lower "
                "train.prompts"
            )

    if data.source == CLOSED_WORLD:
        check_count(data.world_questions)
        return f"{data.world_questions} from the closed world"
    if not data.source or not location_exists(data.source):
        return None
    train, held = open_questions(data.source), []
    kinds = count_kinds(train)
    if data.validation_share:
        train, held = hold_out(train, data.validation_share)
    if data.validation:
        held = open_questions(data.validation)
    check_count(len(train))
    check_best_metric(config, pick(held, config.eval.questions_per_kind))
    text = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    if never_pays_for_splitting(kinds, config.reward):
        text += "; the reward for splitting needs questions with metadata.type parallel"
    validation = f", {len(held)} for validation" if held else ", none for validation"
    epochs = config.train.steps * prompts / len(train)
    return f"{len(train)} in {data.source} ({text}), seen {epochs:.2g} times{validation}"


def check_prompt(config: Config) -> str | None:
    """Checks the prompt template, and the length of the prompts of the first questions."""
    data, limit = config.data, config.rollout.prompt_tokens
    build.check_template(config)
    name = "the prompts of the rows" if data.prompts_in_rows else data.template
    if not data.prompts_in_rows:
        load_template(name)
    directory = packaged(config.model.tokenizer or config.model.path)
    is_file = data.source != CLOSED_WORLD and data.source and location_exists(data.source)
    if not (is_file and directory and Path(directory).is_dir()):
        return name
    questions, tokenizer = open_questions(data.source), Tokenizer.load(directory)
    render = build.make_renderer(config, make_dialect(config, tokenizer, make_tools(config.rollout)))
    lengths = [len(render(question)) for question in questions[:MEASURED]]
    if max(lengths) > limit:
        over = sum(length > limit for length in lengths)
        raise UserError(
            f"{name}: {over} of the first {len(lengths)} prompts exceed config.rollout.prompt_tokens={limit} "
            f"(the longest has {max(lengths)} tokens); accepted: a shorter template, or more prompt_tokens"
        )
    return f"{name}, up to {max(lengths)} of {limit} tokens, {check_vocabulary(tokenizer, questions)}"


def check_passages(config: Config) -> str | None:
    """Checks that the retriever answers."""
    if not needs_retriever(config, training=True):
        return "none: the run does not search"
    world = make_world(config)
    if not (world or config.retrieval.passages):
        return None
    retriever = build.make_retriever(config, world, retry_deadline_s=0.0)
    retriever.search(["a query of launch/doctor.py"], config.retrieval.topk)
    rows = retriever.describe().get("rows")
    return f"{rows} passages" if rows else "passages on a server"


def check_disk(config: Config, plan: Plan, workdir: str) -> str:
    """Checks that the run's checkpoints fit on the disk."""
    if is_remote(workdir):
        return f"{workdir} is an object store"
    directory = _existing(workdir)
    count = config.train.keep_checkpoints + 1  # a new one is written before the oldest is removed
    written = len(list((Path(workdir) / "checkpoints").glob("[0-9]*")))
    count = max(1, count - written)
    free, needed = shutil.disk_usage(directory).free, plan.checkpoint_bytes * count
    text = f"{needed / GIB:.2f} GiB for {count} more checkpoints"
    if config.eval.every_steps:  # a new best checkpoint is written before the previous one is removed
        best = plan.parameter_bytes * (2 - (Path(workdir) / "best").is_dir())
        needed, text = needed + best, f"{text} and {best / GIB:.2f} for the best one"
    text += f", {free / GIB:.2f} free at {directory}"
    if needed > free:
        raise UserError(f"{text}: use a larger disk, gs://BUCKET/..., or fewer train.keep_checkpoints")
    return text


def check_workdir(config: Config, workdir: str) -> str:
    """Whether the run starts anew or resumes, with the same settings, and can write its files."""
    directory = locate(workdir)
    if not is_remote(directory):
        existing = _existing(workdir)
        if not (existing.is_dir() and os.access(existing, os.W_OK)):
            raise UserError(
                f"--workdir={workdir}: {existing} is not a writable directory, accepted: another --workdir"
            )
    if not directory.is_dir():
        return f"{workdir}: starts a new run"
    try:
        step = find_checkpoint(workdir)
    except UserError:
        return f"{workdir}: starts a new run; it contains no checkpoint"
    now = recorded.record(with_adapter_shape(config), {}, unused="sft")  # contents of files are compared at the start
    recorded.check_changes(read_loop(step), now, Path(workdir), allow_changes=False)
    return f"{workdir}: resumes after step {step.name}"


def _existing(path: str) -> Path:
    """The path, or the nearest of its parents that exists."""
    absolute = Path(path).absolute()
    return next(p for p in (absolute, *absolute.parents) if p.exists())
