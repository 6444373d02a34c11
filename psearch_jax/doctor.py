"""Looks at all that a run needs before it starts, and says of each thing how it stands and how to mend it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
from packaging.requirements import Requirement

from psearch_jax import build
from psearch_jax.chips import GIB, Chip, chip_of
from psearch_jax.config import Config, with_method
from psearch_jax.data.closed_world import ClosedWorld
from psearch_jax.data.held_out import hold_out
from psearch_jax.data.prepared import are_there, open_questions
from psearch_jax.eval.benchmarks import CLOSED_WORLD
from psearch_jax.launching import CACHE_VARIABLE, DEFAULT_CACHE
from psearch_jax.limits import validate
from psearch_jax.paths import TOY_POLICY, is_remote, locate
from psearch_jax.planning.plan import Plan, make_plan, model_shape
from psearch_jax.planning.targets import Target
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.checkpoint import find_checkpoint
from psearch_jax.types import ITEM, UserError
from retrieval.memory import available_memory
from retrieval.protocol import CorpusError, RetrievalError

PACKAGE = "psearch_jax"
# Where an accelerator shows itself to the system, and what installs the build of jax that uses it.
SIGNS = (("/dev/nvidiactl", "cuda"), ("/dev/accel0", "tpu"), ("/dev/vfio/0", "tpu"))
SHARDS = re.compile(r"-\d{5}-of-(\d{5})\.safetensors$")


@dataclass(frozen=True)
class Finding:
    """How one thing stands; where it has to be mended, the text says how."""

    name: str
    text: str
    wrong: bool = False

    def __str__(self) -> str:
        return f"{'MEND' if self.wrong else 'ok':<5} {self.name:<10} {self.text}"


def examine(config: Config, workdir: str, root: Path = Path("/")) -> Iterator[Finding]:
    """Every finding, as soon as it is made; what hangs on something that is missing is left out.

    Args:
      config: of a training run.
      workdir: of the run.
      root: of the system's files.
    """
    yield from guarded("packages", packages)
    yield from guarded("devices", lambda: devices(root))
    yield from guarded("config", lambda: settings(config))
    config = with_method(config)
    yield from guarded("model", lambda: model(config))
    found: list[Plan] = []
    yield from guarded("memory", lambda: memory(config, found))
    yield from guarded("questions", lambda: questions(config))
    yield from guarded("passages", lambda: passages(config))
    if found:
        yield from guarded("disk", lambda: disk(config, found[0], workdir))
    yield from guarded("cache", cache)
    yield from guarded("workdir", lambda: resumes(workdir))


def guarded(name: str, look: Callable[[], str | None]) -> Iterator[Finding]:
    """What `look` says, if anything; what it raises has to be mended, each thing of a list by itself."""
    try:
        text = look()
    except (UserError, CorpusError, RetrievalError, OSError, RuntimeError) as error:  # the last: jax, of its devices
        first, *items = str(error).split(ITEM)
        for item in items or [first]:
            yield Finding(name, " ".join(item.split()), True)
    else:
        if text:
            yield Finding(name, text)


def packages() -> str:
    """Whether what setup.py asks for is installed in versions that it takes."""
    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires(PACKAGE) or ()]
    except importlib.metadata.PackageNotFoundError:
        raise UserError(f"{PACKAGE} is not installed: `pip install -e .`") from None
    lacking, asked = [], 0
    for one in wanted:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue  # of an extra, or of another Python
        asked += 1
        try:
            version = importlib.metadata.version(one.name)
        except importlib.metadata.PackageNotFoundError:
            lacking.append(f"{one.name} is missing")
            continue
        if not one.specifier.contains(version, prereleases=True):
            lacking.append(f"{one.name} {version} is not {one.specifier}")
    if lacking:
        raise UserError(f"{'; '.join(lacking)}: `pip install -e .`")
    shown = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "scann"))
    python = ".".join(map(str, sys.version_info[:3]))
    return f"Python {python}, {shown}, and {asked} requirements met"


def devices(root: Path = Path("/")) -> str:
    """What jax computes on, and whether the machine has something better."""
    found = jax.devices()
    text = f"{len(found)} x {found[0].device_kind}, {jax.process_count()} process{'es' * (jax.process_count() > 1)}"
    if found[0].platform != "cpu" or os.environ.get("JAX_PLATFORMS") == "cpu":
        return text
    for sign, extra in SIGNS:
        if (root / sign.lstrip("/")).exists():
            raise UserError(f"{text}, though {sign} is there: `pip install -e '.[{extra}]'`")
    return text


def settings(config: Config) -> str:
    """Whether the fields agree with each other, and name all that a run needs."""
    validate(with_method(config))
    missing = build.missing_inputs(with_method(config))
    if missing:
        raise UserError(ITEM.join(["this run needs:", *missing]))
    group = config.train.prompts * config.rollout.samples
    return f"{config.method}, {config.train.steps} steps of {group} rollouts"


def model(config: Config) -> str | None:
    """Whether weights and tokenizer are whole, as far as their files tell."""
    path = config.model.path
    directory = TOY_POLICY if path == "toy" else Path(path)
    if not path:
        return f"random weights of {config.model.preset}"
    if not directory.is_dir():
        return None
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{path}: no *.safetensors there, accepted: a whole Hugging Face directory")
    numbered = [match for file in files if (match := SHARDS.search(file.name))]
    if numbered and len(numbered) != int(numbered[0][1]):
        found = f"{path}: found {len(numbered)} of {int(numbered[0][1])} files of weights"
        raise UserError(f"{found}, accepted: all of them (`hf download` goes on where it stopped)")
    shape = model_shape(config)
    tokenizer = Tokenizer.load(config.model.tokenizer or str(directory), shape.eos_ids)
    if tokenizer.size > shape.vocab_rows:
        raise UserError(
            f"config.model.tokenizer: found {tokenizer.size} ids for {shape.vocab_rows} rows of the model, accepted: "
            "the tokenizer that belongs to it"
        )
    size = sum(file.stat().st_size for file in files)
    return f"{path}, {len(files)} file{'s' * (len(files) > 1)} of {size / GIB:.2f} GiB"


def memory(config: Config, found: list[Plan]) -> str:
    """What lies in each device's memory for all of a run, beside what there is; the plan is put into `found`."""
    first = jax.devices()[0]
    told = first.memory_stats() if first.platform != "cpu" else None
    known = chip_of(first)
    room = int((told or {}).get("bytes_limit", 0)) or (known.hbm_bytes if known else 0)
    if first.platform == "cpu":
        room = available_memory() // jax.local_device_count()
    target = Target("here", jax.devices(), Chip(room, 0.0, 0.0), first.device_kind)
    plan = make_plan(config, target, names=())
    found.append(plan)
    needed = plan.held_bytes
    text = f"{needed / GIB:.2f} of {room / GIB:.2f} GiB on each device before anything is computed"
    if not room:
        return f"{needed / GIB:.2f} GiB on each device before anything is computed; what there is, is not known"
    if needed > room:
        raise UserError(f"{text}: take more chips, model.lora_rank, or fewer rollout.slots (launch/plan.py)")
    return f"{text}; launch/plan.py says what computing takes"


def questions(config: Config) -> str | None:
    """How many there are to train on and to evaluate by."""
    data = config.data
    if data.source == CLOSED_WORLD:
        return f"{data.world_questions} of the closed world"
    if not data.source or not are_there(data.source):
        return None
    train, held = open_questions(data.source), []
    if data.validation_share:
        train, held = hold_out(train, data.validation_share)
    if data.validation:
        held = open_questions(data.validation)
    if len(train) < config.train.prompts:
        raise UserError(
            f"{data.source}: found {len(train)} questions for steps of {config.train.prompts}, accepted: at least as "
            "many as config.train.prompts"
        )
    epochs = config.train.steps * config.train.prompts / len(train)
    validation = f", {len(held)} to validate by" if held else ""
    return f"{len(train)} in {data.source}, seen {epochs:.2g} times{validation}"


def passages(config: Config) -> str | None:
    """Whether the retriever answers, and how fast."""
    if not config.rollout.search_turns:
        return f"none: {config.method} does not search"
    world = ClosedWorld.make(config.data.world_seed) if config.data.source == CLOSED_WORLD else None
    if not (world or config.retrieval.index or config.retrieval.corpus or config.retrieval.url):
        return None
    retriever = build.retriever_of(config, world, patience_s=0.0)
    queries = [f"a query of launch/doctor.py, number {i}" for i in range(64)]
    retriever.search(queries[:1], config.retrieval.topk)  # what is loaded at first is not counted
    begun = time.monotonic()
    retriever.search(queries[1:], config.retrieval.topk)
    spent = time.monotonic() - begun
    about = retriever.describe()
    rows = f"{about['rows']} passages" if about.get("rows") else "passages of a server"
    return f"{rows}, {len(queries) - 1} queries in {spent:.2f} s"


def disk(config: Config, plan: Plan, workdir: str) -> str:
    """Whether the checkpoints of the run find room."""
    if is_remote(workdir):
        return f"{workdir} is an object store"
    place = Path(workdir).absolute()
    while not place.is_dir():
        place = place.parent
    one = plan.checkpoint_bytes
    train = config.train
    several = train.keep_checkpoints + 1  # one is written before the oldest goes
    several += train.steps // train.keep_every_steps if train.keep_every_steps else 0
    free = shutil.disk_usage(place).free
    text = f"{one * several / GIB:.2f} GiB for {several} checkpoints, {free / GIB:.2f} free at {place}"
    if one * several > free:
        raise UserError(f"{text}: take a larger disk, gs://BUCKET/..., or fewer train.keep_checkpoints")
    return f"{text}"


def cache() -> str:
    """Whether what is compiled can be kept."""
    named = os.environ.get(CACHE_VARIABLE) or str(DEFAULT_CACHE)
    if is_remote(named):
        return f"{named} keeps what is compiled, if it can be written to"
    place = Path(named)
    place.mkdir(parents=True, exist_ok=True)
    if not os.access(place, os.W_OK):
        raise UserError(f"{place}: cannot be written to, accepted: another directory in {CACHE_VARIABLE}")
    return f"{place} keeps what is compiled"


def resumes(workdir: str) -> str:
    """Whether the run begins or goes on."""
    if not locate(workdir).is_dir():
        return f"{workdir}: begins"
    try:
        return f"{workdir}: goes on behind step {find_checkpoint(workdir).name}"
    except UserError:
        return f"{workdir}: begins; it holds no checkpoint"
