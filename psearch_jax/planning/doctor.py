"""Checks everything that a run needs before it starts, and reports for each check the state and how to fix it."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from packaging.requirements import Requirement

from psearch_jax.assembly import build
from psearch_jax.assembly.inputs import missing_inputs, needs_retriever
from psearch_jax.assembly.policies import with_adapter_shape
from psearch_jax.assembly.questions import check_best_metric, world_of
from psearch_jax.config import Config, with_method
from psearch_jax.data.held_out import hold_out, pick
from psearch_jax.data.prepared import are_there, kinds_of, open_questions
from psearch_jax.eval.benchmarks import CLOSED_WORLD
from psearch_jax.limits import validate
from psearch_jax.planning.plan import Plan, make_plan, model_shape
from psearch_jax.planning.targets import Target
from psearch_jax.rl.rewards import never_pays_for_splitting
from psearch_jax.runtime.accelerators import GIB, Chip, chip_of
from psearch_jax.runtime.cli import CACHE_VARIABLE, DEFAULT_CACHE
from psearch_jax.runtime.paths import is_remote, locate, packaged
from psearch_jax.sharding import described, make_meshes
from psearch_jax.text.prompts import load_template
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.checkpointing import settings as recorded
from psearch_jax.train.checkpointing.checkpoint import find_checkpoint, read_loop
from psearch_jax.types import ITEM, Question, UserError
from retrieval.memory import available_memory
from retrieval.protocol import CorpusError, RetrievalError

Load = Callable[[str], Sequence[Question]]  # the questions of a location
PACKAGE = "psearch_jax"
# Device files of accelerators, and the extra of setup.py that installs the JAX build for them.
SIGNS = (("/dev/nvidiactl", "cuda"), ("/dev/accel0", "tpu"), ("/dev/vfio/0", "tpu"))
PROMPTS = 200  # questions whose prompts are measured
MANY_TOKENS = 0.6  # per byte: .2 to .3 in languages that a tokenizer was made for, 1 in single bytes
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
    for finding in _checks(config, workdir, root):
        if finding.wrong and finding.text in reported:
            continue  # another check met the same error
        reported.add(finding.text)
        yield finding


def _checks(config: Config, workdir: str, root: Path) -> Iterator[Finding]:
    yield from guarded("packages", packages)
    yield from guarded("devices", lambda: devices(root))
    yield from guarded("config", lambda: settings(config))
    config = with_method(config)
    tokenizers: list[Tokenizer] = []
    yield from guarded("model", lambda: model(config, tokenizers))
    load = functools.cache(open_questions)  # two checks read them
    plans: list[Plan] = []
    meshes = list(guarded("mesh", lambda: mesh(config)))
    yield from meshes
    if not any(finding.wrong for finding in meshes):
        yield from guarded("memory", lambda: memory(config, plans))
    yield from guarded("questions", lambda: questions(config, load))
    yield from guarded("prompt", lambda: prompt(config, load, tokenizers))
    yield from guarded("passages", lambda: passages(config))
    if plans:
        yield from guarded("disk", lambda: disk(config, plans[0], workdir))
    yield from guarded("cache", cache)
    yield from guarded("workdir", lambda: resumes(config, workdir))


def guarded(name: str, look: Callable[[], str | None]) -> Iterator[Finding]:
    """Yields the text of `look`, if any. An error becomes a finding to fix; a list of errors becomes one for each."""
    try:
        text = look()
    except (UserError, CorpusError, RetrievalError, OSError, RuntimeError) as error:  # JAX raises RuntimeError
        first, *items = str(error).split(ITEM)
        for item in items or [first]:
            yield Finding(name, " ".join(item.split()), True)
    else:
        if text:
            yield Finding(name, text)


def packages() -> str:
    """Checks that the requirements of setup.py are installed in accepted versions."""
    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires(PACKAGE) or ()]
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"{PACKAGE} is not installed: `pip install -e .`") from None
    problems, checked = [], 0
    for one in wanted:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue  # for an extra, or for another Python
        checked += 1
        try:
            version = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"{one.name} is missing")
            continue
        if not one.specifier.contains(version, prereleases=True):
            problems.append(f"{one.name} {version} is not {one.specifier}")
    if problems:
        raise UserError(f"{'; '.join(problems)}: `pip install -e .`")
    shown = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "scann"))
    python = ".".join(map(str, sys.version_info[:3]))
    return f"Python {python}, {shown}, and {checked} requirements met"


def cuda_plugins() -> list[str]:
    """The installed JAX builds for NVIDIA's GPUs, one per version of CUDA, the oldest first."""
    names = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    return sorted(name for name in names if name and re.fullmatch(r"jax-cuda\d+-plugin", name))


def devices(root: Path = Path("/")) -> str:
    """The devices that JAX uses, and whether it misses an accelerator of this machine."""
    plugins = cuda_plugins()
    if len(plugins) > 1:
        raise UserError(
            f"found {' and '.join(plugins)}, accepted: one, because JAX would load either: "
            f"`pip uninstall {plugins[0]} {plugins[0].replace('plugin', 'pjrt')}`"
        )
    used = jax.devices()
    text = f"{len(used)} x {used[0].device_kind}, {jax.process_count()} process{'es' * (jax.process_count() > 1)}"
    if used[0].platform != "cpu" or os.environ.get("JAX_PLATFORMS") == "cpu":
        return text
    for sign, extra in SIGNS:
        if not (root / sign.lstrip("/")).exists():
            continue
        if extra == "cuda" and plugins:
            raise UserError(
                f"{text}, although {sign} exists and {plugins[0]} is installed: check CUDA_VISIBLE_DEVICES, and the "
                "driver with nvidia-smi (CUDA 13 needs 580 or newer; for an older one, uninstall the plugin and "
                "`pip install -e '.[cuda12]'`)"
            )
        raise UserError(f"{text}, although {sign} exists: `pip install -e '.[{extra}]'`")
    return text


def settings(config: Config) -> str:
    """Checks that the fields agree with each other and name everything that a run needs."""
    validate(with_method(config))
    missing = missing_inputs(with_method(config))
    if missing:
        raise UserError(ITEM.join(["this run needs:", *missing]))
    group = config.train.prompts * config.rollout.samples
    return f"{config.method}, {config.train.steps} steps of {group} rollouts"


def model(config: Config, tokenizers: list[Tokenizer]) -> str | None:
    """Checks that no file of the weights is missing and that the tokenizer fits them; appends it to `tokenizers`."""
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
    shape = model_shape(config)
    tokenizer = Tokenizer.load(packaged(config.model.tokenizer) or str(directory), shape.eos_ids)
    tokenizers.append(tokenizer)
    if tokenizer.size > shape.vocab_rows:
        raise UserError(
            f"config.model.tokenizer: found {tokenizer.size} token ids for {shape.vocab_rows} embedding rows, "
            "accepted: the tokenizer of the model"
        )
    size = sum(file.stat().st_size for file in files)
    return f"{path}, {len(files)} file{'s' * (len(files) > 1)} of {size / GIB:.2f} GiB"


def mesh(config: Config) -> str:
    """Checks that the meshes fit the devices."""
    return described(*(mesh.shape for mesh in make_meshes(config.mesh)))


def memory(config: Config, plans: list[Plan]) -> str:
    """Compares the memory that a run holds on each device throughout with what is available; appends to `plans`."""
    first = jax.devices()[0]
    stats = first.memory_stats() if first.platform != "cpu" else None
    known = chip_of(first)
    room = int((stats or {}).get("bytes_limit", 0)) or (known.hbm_bytes if known else 0)
    if first.platform == "cpu":
        room = available_memory() // jax.local_device_count()
    target = Target("here", jax.devices(), Chip(room, 0.0, 0.0), first.device_kind)
    try:
        model_shape(config)
    except UserError as error:
        if Path(config.model.path).exists():
            raise
        return f"not counted: {error}"  # of a model that a run would download
    plan = make_plan(config, target, names=())
    plans.append(plan)
    needed = plan.held_bytes
    text = f"{needed / GIB:.2f} of {room / GIB:.2f} GiB on each device before any computation"
    if not room:
        return f"{needed / GIB:.2f} GiB on each device before any computation; the available memory is unknown"
    if needed > room:
        smaller = ", or configs/qwen0p5b_cpu.py" if first.platform == "cpu" else ""
        raise UserError(f"{text}: use more memory or chips, model.lora_rank, or fewer rollout.slots{smaller}")
    return text if first.platform == "cpu" else f"{text}; launch/plan.py computes the peak"


def questions(config: Config, load: Load) -> str | None:
    """The number of questions for training and for validation."""
    data = config.data
    if data.source == CLOSED_WORLD:
        _check_count(config, data.world_questions)
        return f"{data.world_questions} from the closed world"
    if not data.source or not are_there(data.source):
        return None
    train, held = load(data.source), []
    kinds = _kinds(config, train)
    if data.validation_share:
        train, held = hold_out(train, data.validation_share)
    if data.validation:
        held = load(data.validation)
    _check_count(config, len(train))
    check_best_metric(config, pick(held, config.eval.questions_per_kind))
    epochs = config.train.steps * config.train.prompts / len(train)
    validation = f", {len(held)} for validation" if held else ""
    return f"{len(train)} in {data.source} ({kinds}), seen {epochs:.2g} times{validation}"


def _check_count(config: Config, count: int) -> None:
    if count < config.train.prompts:
        raise UserError(
            f"{config.data.source}: found {count} questions for steps of {config.train.prompts}, accepted: more "
            f"questions{_smaller_steps(config, count)}"
        )


def _kinds(config: Config, train: Sequence[Question]) -> str:
    """The kinds of the questions, and what the reward does not pay for if none is parallel."""
    kinds = kinds_of(train)
    text = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    if never_pays_for_splitting(kinds, config.reward):
        text += "; the reward for splitting needs questions with metadata.type parallel"
    return text


def _smaller_steps(config: Config, questions: int) -> str:
    """Flags for the largest step for which `questions` suffice, with one update per step; "" if there is none."""
    samples, rows = config.rollout.samples, config.learning.micro_batch_rows
    fitting = [n for n in range(1, questions + 1) if n * samples % rows == 0]
    if not fitting:
        return ""
    count = fitting[-1]
    return f", or --config.train.prompts={count} --config.learning.mini_batch_rollouts={count * samples}"


def prompt(config: Config, load: Load, tokenizers: Sequence[Tokenizer]) -> str | None:
    """Checks the prompt template, and the length of the prompts of the first questions.

    Args:
      tokenizers: the tokenizer, if it is already loaded.
    """
    data, limit = config.data, config.rollout.prompt_tokens
    build.check_template(config)
    if data.prompt == "row":
        name = "the prompts of the rows"
    else:
        name = data.template
        load_template(name)
    directory = packaged(config.model.tokenizer or config.model.path)
    is_file = data.source != CLOSED_WORLD and data.source and are_there(data.source)
    if not (is_file and directory and Path(directory).is_dir()):
        return name
    tokenizer, asked = tokenizers[0] if tokenizers else Tokenizer.load(directory), load(data.source)
    render = build.renderer(config, tokenizer)
    lengths = [len(render(asked[i])) for i in range(min(len(asked), PROMPTS))]
    if max(lengths) > limit:
        over = sum(length > limit for length in lengths)
        raise UserError(
            f"{name}: {over} of the first {len(lengths)} prompts exceed config.rollout.prompt_tokens={limit} "
            f"(the longest has {max(lengths)} tokens); accepted: a shorter template, or more prompt_tokens"
        )
    text = f"{name}, up to {max(lengths)} of {limit} tokens"
    texts = " ".join(asked[i].text for i in range(len(lengths)))
    per_byte = len(tokenizer.encode_foreign(texts)) / len(texts.encode())
    if per_byte > MANY_TOKENS:
        text += f"; {per_byte:.1f} tokens per byte of the questions: the tokenizer was not made for their language"
    return text


def passages(config: Config) -> str | None:
    """Checks that the retriever answers, and measures how fast."""
    if not needs_retriever(config):
        return "none: the run does not search"
    world = world_of(config)
    if not (world or config.retrieval.passages):
        return None
    retriever = build.retriever_of(config, world, retry_deadline_s=0.0)
    queries = [f"a query of launch/doctor.py, number {i}" for i in range(64)]
    retriever.search(queries[:1], config.retrieval.topk)  # warm-up: the first search may load files
    begun = time.monotonic()
    retriever.search(queries[1:], config.retrieval.topk)
    seconds = time.monotonic() - begun
    about = retriever.describe()
    rows = f"{about['rows']} passages" if about.get("rows") else "passages on a server"
    return f"{rows}, {len(queries) - 1} queries in {seconds:.2f} s"


def disk(config: Config, plan: Plan, workdir: str) -> str:
    """Checks that the run's checkpoints fit on the disk."""
    if is_remote(workdir):
        return f"{workdir} is an object store"
    place = Path(workdir).absolute()
    while not place.is_dir():
        place = place.parent
    size = plan.checkpoint_bytes
    train = config.train
    count = train.keep_checkpoints + 1  # a new one is written before the oldest is removed
    count += train.steps // train.keep_every_steps if train.keep_every_steps else 0
    count = max(1, count - len(list((Path(workdir) / "checkpoints").glob("[0-9]*"))))  # those that are there stay
    free, needed = shutil.disk_usage(place).free, size * count
    text = f"{needed / GIB:.2f} GiB for {count} more checkpoints"
    if config.eval.every_steps:  # a new best checkpoint is written before the previous one is removed
        best = plan.parameter_bytes * (2 - (Path(workdir) / "best").is_dir())
        needed, text = needed + best, f"{text} and {best / GIB:.2f} for the best one"
    text += f", {free / GIB:.2f} free at {place}"
    if needed > free:
        raise UserError(f"{text}: use a larger disk, gs://BUCKET/..., or fewer train.keep_checkpoints")
    return f"{text}"


def cache() -> str:
    """Checks that compiled programs can be cached."""
    directory = os.environ.get(CACHE_VARIABLE) or str(DEFAULT_CACHE)
    if is_remote(directory):
        return f"{directory} caches compiled programs, if it is writable"
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    if not os.access(place, os.W_OK):
        raise UserError(f"{place}: not writable, accepted: another directory in {CACHE_VARIABLE}")
    return f"{place} caches compiled programs"


def resumes(config: Config, workdir: str) -> str:
    """Whether the run starts anew or resumes, with the same settings, and can write its files."""
    place = locate(workdir)
    if not is_remote(place):
        existing = next(p for p in (Path(place).absolute(), *Path(place).absolute().parents) if p.exists())
        if not (existing.is_dir() and os.access(existing, os.W_OK)):
            raise UserError(
                f"--workdir={workdir}: {existing} is not a writable directory, accepted: another --workdir"
            )
    if not place.is_dir():
        return f"{workdir}: starts a new run"
    try:
        step = find_checkpoint(workdir)
    except UserError:
        return f"{workdir}: starts a new run; it contains no checkpoint"
    now = recorded.record(with_adapter_shape(config), {}, unused="sft")  # contents of files are compared at the start
    recorded.accepted_changes(read_loop(step), now, Path(workdir), allow_changes=False)
    return f"{workdir}: resumes after step {step.name}"
