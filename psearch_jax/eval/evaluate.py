"""Evaluation: runs the training engine at a temperature of its own, writes rows, and resumes a killed evaluation.

Letters: Q questions, R samples per question.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from psearch_jax.config import Config, with_method
from psearch_jax.eval.benchmarks import file_name
from psearch_jax.eval.scores import DIGITS, Score, from_row, score, to_row
from psearch_jax.rollout.collect import Collector
from psearch_jax.rollout.rollouts import Progress
from psearch_jax.rollout.sampler_programs import SamplingWeights
from psearch_jax.runtime import processes
from psearch_jax.runtime.paths import locate, remove_tree, write_atomically
from psearch_jax.text.prompts import load_template
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Question, RewardParts, Trajectory, Turn, UserError, digest

FILLS = 8  # trajectories per part / slots; slots idle at the end of a part, so a part fills each several times
_PARTS, _SETTINGS = "parts", "settings.json"


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


class Evaluation:
    """Evaluates benchmarks into a directory, part by part.

    The questions of all benchmarks form one queue, so no slot idles at the end of a small benchmark. The queue is cut
    into fixed parts, each written when it is complete. A killed evaluation resumes after the last complete part;
    because the parts are fixed, its rows are identical to those of an uninterrupted evaluation.
    """

    def __init__(self, out: str | Path, benchmarks: Mapping[str, Sequence[Question]], settings: Mapping[str, Any]):
        """Starts an evaluation in `out`, or resumes the one there.

        Args:
          benchmarks: questions by name.
          settings: everything that determines the rows, JSON-serialisable.

        Raises:
          UserError: `out` contains an evaluation with other settings.
        """
        self.out = locate(out)
        self.benchmarks = tuple(benchmarks)
        digests = {name: questions_digest(questions, with_metadata=True) for name, questions in benchmarks.items()}
        self.settings = json.loads(json.dumps({**settings, "questions": digests}))
        parts, results = self.out / _PARTS, self.out / "results.json"
        ended, saved = processes.broadcast(
            lambda: (results.is_file(), read_field(results, "settings") or read_field(parts / _SETTINGS, "settings"))
        )
        if ended and saved is None:
            raise UserError(f"{results}: not the results of an evaluation; accepted: another --out")
        if saved is not None and saved != self.settings:
            raise UserError(
                f"--out={self.out}: holds an evaluation with {describe_difference(saved, self.settings)}; "
                "accepted: the same settings, or another directory"
            )
        self.finished = processes.broadcast(lambda: ended and not parts.is_dir())

        def begin() -> list[str]:
            """The order of the benchmarks in the queue, which the parts on disk depend on."""
            order = read_field(parts / _SETTINGS, "order") or list(benchmarks)
            parts.mkdir(parents=True, exist_ok=True)
            write_atomically(parts / _SETTINGS, json.dumps({"settings": self.settings, "order": order}) + "\n")
            return order

        order = benchmarks if self.finished else processes.broadcast(begin)
        self._tasks = [(name, question) for name in order for question in benchmarks[name]]

    def run(
        self,
        roll_out: Callable[[Sequence[Question], Progress], Sequence[Trajectory]],
        questions_per_part: int,
        progress: Progress,
    ) -> dict[str, list[Score]]:
        """Evaluates the parts that are missing and returns the scores of every benchmark. The first process writes.

        Args:
          roll_out: returns R trajectories per question, the samples of a question adjacent; in each process those of
            all processes.
          progress: called with (questions done, total questions).
        """
        if self.finished:
            return {name: [from_row(row) for row in read_rows(self._file(name))] for name in self.benchmarks}
        files = []
        for part, start in enumerate(range(0, len(self._tasks), questions_per_part)):
            tasks = self._tasks[start : start + questions_per_part]
            files.append(self.out / _PARTS / f"{part:06d}.jsonl")
            if not processes.broadcast(files[-1].is_file):
                # The samples of a question end at about the same time, so trajectories are scaled to questions.
                def report(done: int, of: int, start: int = start, size: int = len(tasks)) -> None:  # noqa: B008
                    progress(start + done * size // max(of, 1), len(self._tasks))

                trajectories = roll_out([question for _, question in tasks], report)
                samples = len(trajectories) // len(tasks)
                rows = [evaluation_row(tasks[i // samples][0], t) for i, t in enumerate(trajectories)]
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                processes.broadcast(functools.partial(write_atomically, files[-1], text))
            progress(start + len(tasks), len(self._tasks))
        return self._merge(files) if processes.first() else {}

    def finish(self, results: Mapping[str, Any], table: str) -> None:
        """Writes results.json and results.md, and removes the parts."""
        record = {"settings": self.settings, **results}
        write_atomically(self.out / "results.md", table)
        write_atomically(self.out / "results.json", json.dumps(record, indent=2) + "\n")
        remove_tree(self.out / _PARTS)

    def _merge(self, files: Sequence[Path]) -> dict[str, list[Score]]:
        """Writes one file per benchmark from the parts, in the order of the benchmark's questions."""
        scores: dict[str, list[Score]] = {name: [] for name in self.benchmarks}
        for name in self.benchmarks:
            lines = []
            for file in files:
                for row in read_rows(file):
                    if row["benchmark"] == name:
                        scores[name].append(from_row(row))
                        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
            write_atomically(self._file(name), "".join(lines))
        return scores

    def _file(self, benchmark: str) -> Path:
        return self.out / f"{file_name(benchmark)}.jsonl"


def read_scores(out: str | Path) -> dict[str, list[Score]]:
    """The scores of a finished evaluation by benchmark.

    Raises:
      UserError: `out` contains none, or a row cannot be read.
    """
    out = locate(out)
    file = out / "results.json"
    if not file.is_file():
        raise UserError(f"{file}: not found, accepted: the --out of a finished launch/eval.py")
    try:
        names = list(json.loads(file.read_text(encoding="utf-8"))["benchmarks"])
        return {name: [from_row(row) for row in read_rows(out / f"{file_name(name)}.jsonl")] for name in names}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{out}: cannot be read as an evaluation ({type(error).__name__}: {error})") from None


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
    config: Config, tokenizer: Tokenizer, params: nnx.State, passages: Mapping[str, Any]
) -> dict[str, Any]:
    """The settings and contents on which a policy's rollouts depend, to be recorded with them.

    Args:
      config: with the scale of the adapters in `params`, if there are any.
      passages: as `Retriever.describe` returns them; empty without a retriever.
    """
    config = with_method(config)
    sections = asdict(config)
    settings = {"weights": weights_digest(params), "sampling_dtype": config.model.sampling_dtype}
    settings |= {"lora_alpha": config.model.lora_alpha} if "adapters" in params else {}
    settings["tokenizer"] = hashlib.sha256(json.dumps(tokenizer.identity).encode()).hexdigest()[:16]
    settings |= {name: sections[name] for name in ("method", "data", "rollout")}
    if not config.data.prompts_in_rows:  # a file of the same name may have other contents
        settings["template"] = hashlib.sha256(load_template(config.data.template).encode()).hexdigest()
    # Without url: a server may move. What identifies the passages and their ranking is in `passages`.
    retrieval = {name: sections["retrieval"][name] for name in ("index", "corpus", "topk", "max_sub_queries")}
    return settings | {"retrieval": retrieval | {k: v for k, v in passages.items() if k != "corpus"}}


def weights_digest(params: nnx.State) -> str:
    """A short hash of the parameters' float32 bits, independent of sharding and device."""
    return hashlib.sha256(processes.fetch(sum_all_bits(nnx.to_pure_dict(params))).tobytes()).hexdigest()[:16]


def trajectory_row(trajectory: Trajectory, reward: RewardParts | None, step: int) -> dict[str, Any]:
    """One trajectory as it is written to disk: JSON-serialisable, without clock times.

    `ids`, `mask` (1: sampled) and `logprobs` have the same length. `reward` has its parts and their `total`, or
    is empty if `reward` is None. `source`, `question` and `golden_answers` are for human readers.
    """
    t, question = trajectory, trajectory.question
    return {
        "question_id": question.id,
        "source": question.source,
        "kind": question.kind,
        "question": question.text,
        "golden_answers": list(question.answers),
        "sample": t.sample,
        "step": step,
        "status": t.status,
        "reward": asdict(reward) | {"total": reward.total} if reward else {},
        "turns": [turn_row(turn) for turn in t.turns],
        "ids": np.asarray(t.ids).tolist(),
        "mask": np.asarray(t.mask).astype(int).tolist(),
        "logprobs": [round(float(x), DIGITS) if np.isfinite(x) else None for x in t.logprobs],
    }


def turn_row(turn: Turn) -> dict[str, Any]:
    return {
        "text": turn.text,
        "queries": list(turn.queries),
        "passages": [[{"id": p.id, "title": p.title} for p in ranking] for ranking in turn.passages],
        "n_sampled": turn.n_sampled,
    }


def evaluation_row(benchmark: str, trajectory: Trajectory) -> dict[str, Any]:
    """One evaluated trajectory as it is written to disk: its score, and its turns with queries and passages."""
    question = trajectory.question
    return {
        "benchmark": benchmark,
        **to_row(score(trajectory)),
        "question": question.text,
        "golden_answers": list(question.answers),
        "actions": [turn_row(turn) for turn in trajectory.turns],
    }


def read_rows(file: Path) -> Iterator[dict[str, Any]]:
    """The rows that an evaluation has written. Raises UserError, which names file and line, for any other."""
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(
                    f"{file}: line {number}: not JSON ({error}), accepted: a row of an evaluation"
                ) from None
            if not isinstance(row, dict):
                raise UserError(f"{file}: line {number}: {line[:40]!r} found, accepted: a row of an evaluation")
            yield row


def questions_digest(questions: Sequence[Question], with_metadata: bool = False) -> str:
    """The number of questions and a hash of their contents.

    Args:
      with_metadata: also of all metadata, from which scores and gold passages come.
    """
    contents = digest(questions)
    if with_metadata:
        metadata = json.dumps([question.metadata for question in questions], sort_keys=True, default=str)
        contents = hashlib.sha256((contents + metadata).encode()).hexdigest()
    return f"{len(questions)} {contents[:16]}"


def read_field(file: Path, field: str) -> Any:
    """A field of a JSON file; None if there is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))[field]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def describe_difference(recorded: Any, wanted: Any, name: str = "") -> str:
    """The first difference between two settings, as text for an error message."""
    if isinstance(recorded, dict) and isinstance(wanted, dict):
        for key in {**recorded, **wanted}:
            if recorded.get(key) != wanted.get(key):
                return describe_difference(recorded.get(key), wanted.get(key), f"{name}.{key}" if name else key)
    return f"{name} {recorded!r}, found {wanted!r}"
