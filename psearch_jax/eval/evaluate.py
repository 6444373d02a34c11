"""Evaluation: runs the training engine at a temperature of its own, writes rows, and resumes a killed evaluation.

Letters: Q questions, R samples per question.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from psearch_jax.config import Config, with_method
from psearch_jax.eval.benchmarks import file_name
from psearch_jax.eval.parts import begin_parts, check_settings, read_field, read_settings, run_parts
from psearch_jax.eval.scores import DIGITS, Score, from_row, score
from psearch_jax.rollout.collect import Collector
from psearch_jax.rollout.rollouts import Progress
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.runtime import processes
from psearch_jax.runtime.paths import locate, remove_tree, write_atomically
from psearch_jax.text.prompts import load_template
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Question, RewardParts, Trajectory, Turn, UserError, digest

PARTS, RESULTS = "parts", "results.json"
FILLS = 8  # trajectories per part / slots; slots idle at the end of a part, so a part fills each several times


def evaluate(
    collector: Collector,
    weights: SamplingWeights,
    questions: Sequence[Question],
    *,
    seed: int,
    step: int,
    temperature: float,
    samples: int = 1,
    progress: Progress | None = None,
) -> list[Trajectory]:
    """Q x R trajectories of the policy, the samples of a question adjacent. Several processes share the work.

    Args:
      collector: the same class as in training.
      weights: of the policy.
      seed, step: parts of every rollout's random key; no effect at temperature 0.
      temperature: 0 is greedy.
      samples: R.
    """
    trajectories = collector.collect(
        weights, processes.share(questions), samples, seed=seed, step=step, temperature=temperature, progress=progress
    )
    return processes.in_order(trajectories, samples)


def evaluate_benchmarks(
    out: str | Path,
    benchmarks: Mapping[str, Sequence[Question]],
    settings: Mapping[str, Any],
    roll_out: Callable[..., Sequence[Trajectory]],
    questions_per_part: int,
) -> dict[str, list[Score]]:
    """Evaluates benchmarks into a directory and returns their scores; resumes an evaluation that was interrupted.

    The questions of all benchmarks form one queue, so no slot idles at the end of a small benchmark. The first process
    writes one file of rows per benchmark, and gets the scores.

    Args:
      benchmarks: questions by name.
      settings: everything that determines the rows, JSON-serialisable.
      roll_out: `evaluate` of a list of questions, with its `progress`.

    Raises:
      UserError: `out` contains an evaluation with other settings.
    """
    out = locate(out)
    settings = {**settings, "questions": {name: questions_digest(asked) for name, asked in benchmarks.items()}}
    if processes.broadcast(lambda: begin_evaluation(out, settings)):
        return read_scores(out)

    def evaluate_part(tasks: Sequence[tuple[str, Question]], report: Progress) -> str:
        trajectories = roll_out([question for _, question in tasks], progress=report)
        samples = len(trajectories) // len(tasks)
        return json_lines(evaluation_row(tasks[i // samples][0], t) for i, t in enumerate(trajectories))

    tasks = [(name, question) for name in sorted(benchmarks) for question in benchmarks[name]]
    files = run_parts(out / PARTS, tasks, questions_per_part, evaluate_part)
    if not processes.first():
        return {}
    rows = [pair for file in files for pair in read_rows(file)]
    scores = {}
    for name in benchmarks:
        group = [(row, s) for row, s in rows if row["benchmark"] == name]
        write_atomically(out / f"{file_name(name)}.jsonl", json_lines(row for row, _ in group))
        scores[name] = [s for _, s in group]
    return scores


def begin_evaluation(out: Path, settings: Mapping[str, Any]) -> bool:
    """Starts or resumes an evaluation; returns whether it is finished already. Call it in one process only."""
    results = out / RESULTS
    if results.is_file():
        saved = read_field(results, "settings")
        if saved is None:
            raise UserError(f"{results}: not the results of an evaluation; accepted: another --out")
        check_settings(out, saved, settings)
        if not (out / PARTS).is_dir():
            return True
    begin_parts(out / PARTS, settings, out)
    return False


def write_results(out: str | Path, results: Mapping[str, Any], table: str) -> None:
    """Finishes an evaluation: writes results.json and results.md, and removes the parts."""
    out = locate(out)
    settings = read_settings(out / PARTS) or read_field(out / RESULTS, "settings")
    write_atomically(out / "results.md", table)
    write_atomically(out / RESULTS, json.dumps({"settings": settings, **results}, indent=2) + "\n")
    remove_tree(out / PARTS)


def read_scores(out: str | Path) -> dict[str, list[Score]]:
    """The scores of a finished evaluation by benchmark.

    Raises:
      UserError: `out` contains none, or a row cannot be read.
    """
    out = locate(out)
    names = read_field(out / RESULTS, "benchmarks")
    if not isinstance(names, dict):
        raise UserError(f"{out / 'results.json'}: no results found, accepted: the --out of a finished launch/eval.py")
    try:
        return {name: [s for _, s in read_rows(out / f"{file_name(name)}.jsonl")] for name in names}
    except OSError as error:
        raise UserError(f"{out}: cannot be read as an evaluation ({error})") from None


def read_rows(file: Path) -> Iterator[tuple[dict[str, Any], Score]]:
    """The rows that an evaluation has written, and their scores. Raises UserError for any other row."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                yield row, from_row(row)
            except (ValueError, KeyError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"
                raise UserError(f"{file}: line {number}: {reason}, accepted: a row of an evaluation") from None


@jax.jit
def sum_all_bits(params: Any) -> jax.Array:
    def sum_bits(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
        index = jnp.zeros(x.shape, jnp.uint32)  # row-major; a reshape would gather a sharded array
        for axis in range(x.ndim):
            stride = math.prod(x.shape[axis + 1 :]) % 2**32
            index += np.uint32(stride) * jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)

    return jnp.stack([sum_bits(x) for x in jax.tree.leaves(params)])


def policy_settings(
    config: Config,
    tokenizer: Tokenizer,
    params: nnx.State,
    passages: Mapping[str, Any],
    code: Mapping[str, tuple[str, str]],
) -> dict[str, Any]:
    """The settings and contents on which a policy's rollouts depend, to be recorded with them.

    Args:
      config: with the scale of the adapters in `params`, if there are any.
      passages: as `Retriever.describe` returns them; empty without a retriever.
      code: by config field, the code that it names, and a fingerprint of its content.
    """
    config = with_method(config)
    sections = asdict(config)
    settings = {"weights": weights_digest(params), "sampling_dtype": config.model.sampling_dtype}
    settings |= {"lora_alpha": config.model.lora_alpha} if "adapters" in params else {}
    settings["tokenizer"] = hashlib.sha256(json.dumps(tokenizer.identity).encode()).hexdigest()[:16]
    settings |= {name: sections[name] for name in ("method", "data", "rollout")}
    if not config.data.prompts_in_rows:  # a file of the same name may have other contents
        settings["template"] = hashlib.sha256(load_template(config.data.template).encode()).hexdigest()
    settings |= {"code": {field: digest for field, (named, digest) in code.items() if named}}
    # Without the url of a server that describes its passages: it may move.
    names = ("index", "corpus", "topk", "max_sub_queries", "service")
    names += () if passages.get("corpus_sha256") else ("url",)
    retrieval = {name: sections["retrieval"][name] for name in names}
    return settings | {"retrieval": retrieval | {k: v for k, v in passages.items() if k != "corpus"}}


def weights_digest(params: nnx.State) -> str:
    """A short hash of the parameters' float32 bits, independent of sharding and device."""
    return hashlib.sha256(processes.fetch(sum_all_bits(nnx.to_pure_dict(params))).tobytes()).hexdigest()[:16]


def trajectory_row(trajectory: Trajectory, reward: RewardParts | None, step: int) -> dict[str, Any]:
    """One trajectory as it is written to disk: JSON-serialisable, without clock times.

    `ids`, `mask` (1: sampled) and `logprobs` have the same length. `reward` has its terms and their `total`, or
    is empty if `reward` is None. `source`, `question` and `golden_answers` are for human readers.
    """
    t, question, scored = trajectory, trajectory.question, score(trajectory)
    return {
        "question_id": question.id,
        "source": question.source,
        "kind": question.kind,
        "question": question.text,
        "golden_answers": list(question.answers),
        "sample": t.sample,
        "step": step,
        "status": t.status,
        "em": scored.em,
        "first_sub_queries": scored.first_sub_queries,
        **({"scripted": True} if t.scripted else {}),
        "reward": {**reward.terms, "total": reward.total} if reward else {},
        "turns": [turn_row(turn) for turn in t.turns],
        "ids": np.asarray(t.ids).tolist(),
        "mask": np.asarray(t.mask).astype(int).tolist(),
        "logprobs": [round(float(x), DIGITS) if np.isfinite(x) else None for x in t.logprobs],
    }


def turn_row(turn: Turn) -> dict[str, Any]:
    return {
        "text": turn.text,
        "queries": list(turn.queries),
        **({"tools": list(turn.tools)} if turn.tools else {}),
        "passages": [[{"id": p.id, "title": p.title} for p in ranking] for ranking in turn.passages],
        "n_sampled": turn.n_sampled,
    }


def evaluation_row(benchmark: str, trajectory: Trajectory) -> dict[str, Any]:
    """One evaluated trajectory as it is written to disk: its score, and its turns with queries and passages."""
    question = trajectory.question
    return {
        "benchmark": benchmark,
        **asdict(score(trajectory)),
        "question": question.text,
        "golden_answers": list(question.answers),
        "actions": [turn_row(turn) for turn in trajectory.turns],
    }


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of a jsonl file."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def questions_digest(questions: Sequence[Question]) -> str:
    """The number of questions and a hash of their contents and metadata, from which scores and gold passages come."""
    metadata = json.dumps([question.metadata for question in questions], sort_keys=True, default=str)
    return f"{len(questions)} {hashlib.sha256((digest(questions) + metadata).encode()).hexdigest()[:16]}"
