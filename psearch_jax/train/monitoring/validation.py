"""The evaluations of a training run: before its first step, between steps, and after its last."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from psearch_jax.eval.benchmarks import SEPARATE
from psearch_jax.eval.evaluate import evaluate
from psearch_jax.eval.scores import group_by_kind, score, summarise
from psearch_jax.runtime import processes, progress
from psearch_jax.train.monitoring.records import write_json
from psearch_jax.train.run import Run

log = logging.getLogger("psearch_jax")
EVAL_SEED = 1  # of sampled answers, whatever the run's seed
EVAL_STEP = 2**31 - 1  # in the random keys of every evaluation, so that all use the same ones


def evaluate_policy(run: Run, temperature: float) -> dict[str, dict[str, float]]:
    """Evaluates the current policy: summaries over all questions (`all`) and per kind.

    The sets of `SEPARATE` are summarised separately. Random keys do not depend on the training seed.
    """

    def on_progress(done: int, own: int) -> None:
        progress.reach(done * len(run.evaluation) // max(own, 1))
        run.stop.check()

    with progress.step("evaluation", len(run.evaluation), patient=True):
        trajectories = evaluate(
            run.collector,
            run.sampling_weights(),
            run.evaluation,
            seed=EVAL_SEED,
            step=EVAL_STEP,
            temperature=temperature,
            progress=on_progress,
        )
    scores = [score(t) for t in trajectories]
    others = [s for s in scores if s.source not in SEPARATE]
    groups = {"all": others, **group_by_kind(others)}
    for source in dict.fromkeys(s.source for s in scores if s.source in SEPARATE):
        groups[SEPARATE[source]] = [s for s in scores if s.source == source]
    return {name: summarise(group) for name, group in groups.items()}


def evaluate_once(run: Run, file: Path, policy_unchanged: bool) -> dict[str, Any]:
    """Evaluates now, or loads the results that the run has already saved in `file`. Keys: "" and "_greedy".

    Args:
      policy_unchanged: the current policy is the one to evaluate. Otherwise, results are loaded from disk, or left out
        if missing.
    """
    if not run.evaluation:
        return {}
    if not policy_unchanged:

        def read() -> dict[str, Any] | None:
            return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

        known = processes.broadcast(read)
        if known is None:
            log.warning(
                "%s is missing and the policy is already trained; the summary will have no %s figures",
                file,
                file.stem,
            )
        return known or {}
    with run.phase("evaluate"):
        out = {"": evaluate_policy(run, run.config.eval.temperature)}
        if run.config.eval.temperature > 0:
            out["_greedy"] = evaluate_policy(run, 0.0)
    if processes.first():
        write_json(file, out)
    return out
