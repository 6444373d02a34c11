"""Evaluates a policy on question files and on the closed world.

    python launch/eval.py --model=HF_DIR|CHECKPOINT_DIR --benchmark=NAME:FILE ... --index=DIR --out=DIR
    python launch/eval.py --model=toy --config=configs/smoke.py --benchmark=closed_world --out=DIR

`--benchmark` may be repeated; `closed_world:KIND` is built in, `closed_world` is all of its kinds,
`closed_world:parallel4` compares four entities, more than any training question does. Budgets and prompt
are those of --config, else of the run that a checkpoint belongs to, else the defaults. OUT holds results.json,
results.md and one file of trajectories per benchmark.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from psearch_jax import launching
from psearch_jax.config import Config, from_mapping
from psearch_jax.types import Question, UserError

MODEL = flags.DEFINE_string("model", None, "HF directory or hub id, run directory, checkpoint, or toy.")
BENCHMARK = flags.DEFINE_multi_string("benchmark", [], "NAME:FILE, closed_world or closed_world:KIND; repeatable.")
OUT = flags.DEFINE_string("out", None, "The directory to write to.")
CONFIG = config_flags.DEFINE_config_file("config", None, "Budgets, prompt and retrieval of a file in configs/.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
SEED = flags.DEFINE_integer("seed", 1, "Of the sampling; without effect at temperature 0.")
SAMPLES = flags.DEFINE_integer("samples", 1, "Trajectories per question.", lower_bound=1)
COUNT = flags.DEFINE_integer("count", 0, "Questions per benchmark; 0: a whole file, 400 per closed-world kind.")
INDEX = flags.DEFINE_string("index", None, "Index directory made by launch/build_index.py.")
CORPUS = flags.DEFINE_string("corpus", None, "A jsonl corpus in place of an index (small ones only).")
URL = flags.DEFINE_string("retriever_url", None, "Server that speaks /retrieve, in place of an index; also several.")
flags.mark_flags_as_required(["model", "out"])

CLOSED_WORLD_COUNT = 400
# Flags that set one field of the config: flag -> section, type, help.
FIELDS = {
    "slots": ("rollout", int, "rows decoded together"),
    "context_tokens": ("rollout", int, "ids a row can hold"),
    "prompt_tokens": ("rollout", int, "of them, at most this many for the prompt"),
    "turn_tokens": ("rollout", int, "ids sampled per turn"),
    "obs_tokens": ("rollout", int, "ids of one observation"),
    "search_turns": ("rollout", int, "searches; one answer turn follows"),
    "initial_search": ("rollout", bool, "search the question itself before the first turn"),
    "topk": ("retrieval", int, "passages per sub-query"),
    "template": ("data", str, "packaged prompt template or a file"),
    "prompt": ("data", str, "template, or row: the prompt that comes with each question"),
    "sampling_dtype": ("model", str, "float32, bfloat16 or float16"),
    "tokenizer": ("model", str, "tokenizer directory, when the model has none beside it"),
}
DEFINE = {int: flags.DEFINE_integer, bool: flags.DEFINE_bool, str: flags.DEFINE_string}
OVERRIDES = {
    name: DEFINE[kind](name, None, f"{section}.{name}: {text}.") for name, (section, kind, text) in FIELDS.items()
}


def base_config(model: str) -> Config:
    """The config that the flags start from: --config, else that of the run a checkpoint belongs to, else defaults."""
    if CONFIG.value is not None:
        return from_mapping(CONFIG.value.to_dict())
    path = Path(model)
    in_hf_format = (path / "config.json").is_file() and not (path / "checkpoints").is_dir()
    if not path.is_dir() or in_hf_format:
        return Config()
    from psearch_jax.train.checkpoint import find_checkpoint

    file = find_checkpoint(path).resolve().parents[1] / "config.json"
    if not file.is_file():
        return Config()
    try:
        return from_mapping(json.loads(file.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: not JSON ({error}), accepted: the config.json of a run") from None


def with_flags(config: Config) -> Config:
    """The config with every field that a flag names."""
    sections: dict[str, dict[str, Any]] = {}
    for name, flag in OVERRIDES.items():
        if flag.value is not None:
            sections.setdefault(FIELDS[name][0], {})[name] = flag.value
    given = {"index": INDEX.value, "corpus": CORPUS.value, "url": URL.value}
    if any(given.values()):
        sections.setdefault("retrieval", {}).update({name: value or "" for name, value in given.items()})
    changed = {name: {**dataclasses.asdict(getattr(config, name)), **values} for name, values in sections.items()}
    return from_mapping({**dataclasses.asdict(config), **changed})


def benchmarks(world_seed: int) -> dict[str, list[Question]]:
    """The questions of every benchmark asked for, by name."""
    from psearch_jax.data.closed_world import ClosedWorld
    from psearch_jax.eval.benchmarks import CLOSED_WORLD, closed_world_benchmark, closed_world_sets, load_benchmark

    found: list[tuple[str, list[Question]]] = []
    for argument in BENCHMARK.value:
        sets = closed_world_sets(argument)
        if sets is None:
            found.append(load_benchmark(argument, COUNT.value))
            continue
        world, count = ClosedWorld.make(world_seed), COUNT.value or CLOSED_WORLD_COUNT
        found += [(f"{CLOSED_WORLD}:{name}", closed_world_benchmark(world, name, count)) for name in sets]
    names = [name for name, _ in found]
    if not found or len(set(names)) < len(names):
        raise UserError(f"--benchmark: {', '.join(names) or 'none'} found, accepted: one or more, each name once")
    return dict(found)


def with_source(config: Config, names: list[str]) -> Config:
    """The config with the passages that the benchmarks need: the closed world's own, or those of a named index."""
    closed = [name.startswith("closed_world:") for name in names]
    retrieval = config.retrieval
    if all(closed):
        if INDEX.value or CORPUS.value or URL.value:
            raise UserError(
                "--index, --corpus, --retriever_url: found with the closed world, which brings its own passages"
            )
        retrieval = dataclasses.replace(retrieval, index="", corpus="", url="")
    elif any(closed):
        raise UserError("--benchmark: the closed world and files found together, accepted: one of them per call")
    elif not (retrieval.index or retrieval.corpus or retrieval.url):
        raise UserError("--index: none given, accepted for question files: a directory of launch/build_index.py")
    data = dataclasses.replace(config.data, source="closed_world" if all(closed) else "")
    return dataclasses.replace(config, data=data, retrieval=retrieval)


def main(_: list[str]) -> None:
    config = with_flags(base_config(MODEL.value))
    questions = benchmarks(config.data.world_seed)
    config = with_source(config, list(questions))

    from tqdm import tqdm

    from psearch_jax import build  # slow to import: bad input is refused before
    from psearch_jax.eval.evaluate import evaluate, figures, results_table, trajectory_row
    from psearch_jax.metrics import write_whole
    from psearch_jax.train.trainer import EVAL_STEP

    launching.configure_jax()
    parts = build.from_path(config, MODEL.value)
    params = parts.sampling_copy()

    out = Path(OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for name, asked in questions.items():
        bar = tqdm(total=len(asked) * SAMPLES.value, desc=name, leave=False, disable=not sys.stderr.isatty())
        trajectories = evaluate(
            parts.collector,
            params,
            asked,
            seed=SEED.value,
            step=EVAL_STEP,  # a checkpoint sampled here draws what its own run drew
            temperature=TEMPERATURE.value,
            samples=SAMPLES.value,
            progress=lambda done, _, bar=bar: bar.update(done - bar.n),
        )
        bar.close()
        results[name] = figures(trajectories)
        rows = (json.dumps(trajectory_row(t, None, 0), ensure_ascii=False) for t in trajectories)
        write_whole(out / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}.jsonl", "".join(f"{row}\n" for row in rows))
    settings = {"temperature": TEMPERATURE.value, "seed": SEED.value, "samples": SAMPLES.value}
    record = {"model": MODEL.value, **settings, "config": dataclasses.asdict(config), "benchmarks": results}
    table = results_table(results)
    write_whole(out / "results.json", json.dumps(record, indent=2) + "\n")
    write_whole(out / "results.md", table + "\n\nPublished figures (arXiv 2508.09303) are those of the whole sets.\n")
    print(table)


if __name__ == "__main__":
    launching.run(main)
