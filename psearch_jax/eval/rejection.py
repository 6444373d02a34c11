"""Rejection sampling: writes the highest-reward rollouts of each question in the format of supervised fine-tuning.

STaR (arXiv 2203.14465) and RAFT (arXiv 2304.06767) fine-tune on such rollouts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psearch_jax.eval.evaluate import trajectory_row
from psearch_jax.runtime import processes
from psearch_jax.runtime.paths import check_new, remove_tree, write_atomically
from psearch_jax.types import Question, RewardParts, Trajectory, UserError

Scored = tuple[Trajectory, RewardParts]


@dataclass(frozen=True)
class Selection:
    """Which rollouts of a question are kept."""

    keep: int = 1  # at most this number per question, the highest rewards first
    min_reward: float = 0.0  # rollouts with a lower reward are dropped
    well_formed: bool = True  # keep only rollouts that follow the grammar


def best_rollouts(scored: Sequence[Scored], selection: Selection) -> list[Scored]:
    """The rollouts of one question that are kept, by decreasing reward; ties by increasing length.

    Of rollouts with identical turn texts only the first is kept.
    """
    order = sorted(scored, key=lambda pair: (-pair[1].total, len(pair[0].ids), pair[0].sample))
    kept: dict[tuple[str, ...], Scored] = {}
    for trajectory, reward in order:
        if reward.total >= selection.min_reward and (trajectory.well_formed or not selection.well_formed):
            kept.setdefault(tuple(turn.text for turn in trajectory.turns), (trajectory, reward))
    return list(kept.values())[: selection.keep]


def sample(
    out: Path,
    questions: Sequence[Question],
    roll_out: Callable[[Sequence[Question]], Sequence[Trajectory]],
    reward: Callable[[Sequence[Trajectory]], Sequence[RewardParts]],
    selection: Selection,
    settings: Mapping[str, Any],
    questions_per_part: int,
    progress: Callable[[int, int], None],
) -> dict[str, float]:
    """Writes the kept rollouts of all questions to `out`, part by part: a killed call resumes after the last part.

    Args:
      out: the jsonl file; its parts are in `OUT.parts` until it is complete.
      roll_out: returns all rollouts of the questions, those of a question adjacent; in each process those of all
        processes.
      reward: the rewards of such rollouts.
      settings: everything that determines the rollouts, JSON-serialisable; a resuming call must pass the same.
      progress: called with (questions done, total questions).

    Returns:
      Counts and means over all sampled rollouts, and over the kept ones.

    Raises:
      UserError: `out` exists, or was started with other settings.
    """
    parts = out.with_name(f"{out.name}.parts")

    def begin() -> None:
        check_new(out, "a new file", "--out=")
        parts.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings, indent=2) + "\n"
        file = parts / "settings.json"
        if file.exists() and file.read_text(encoding="utf-8") != text:
            raise UserError(f"{file}: found other settings than are asked for, accepted: the same, or another --out")
        write_atomically(file, text)

    processes.broadcast(begin)
    files = []
    for number, start in enumerate(range(0, len(questions), questions_per_part)):
        asked = questions[start : start + questions_per_part]
        files.append(parts / f"{number:06d}.json")
        if not processes.broadcast(files[-1].is_file):
            text = json.dumps(_part(roll_out(asked), len(asked), reward, selection), ensure_ascii=False)
            processes.broadcast(lambda file=files[-1], text=text: write_atomically(file, text))
        progress(start + len(asked), len(questions))
    if not processes.first():
        return {}
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    figures = _means({name: sum(part["totals"][name] for part in contents) for name in contents[0]["totals"]})
    write_atomically(
        out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for part in contents for row in part["rows"])
    )
    remove_tree(parts)
    return figures


def _part(
    trajectories: Sequence[Trajectory],
    questions: int,
    reward: Callable[[Sequence[Trajectory]], Sequence[RewardParts]],
    selection: Selection,
) -> dict[str, Any]:
    samples = len(trajectories) // questions
    scored = list(zip(trajectories, reward(trajectories), strict=True))
    groups = [scored[i * samples : (i + 1) * samples] for i in range(questions)]
    kept = [pair for group in groups for pair in best_rollouts(group, selection)]
    totals: dict[str, float] = {"questions": questions}
    for name, pairs in (("sampled", scored), ("kept", kept)):
        totals[name] = len(pairs)
        totals[f"{name}_reward"] = sum(r.total for _, r in pairs)
        totals[f"{name}_outcome"] = sum(r.outcome for _, r in pairs)
        totals[f"{name}_split"] = sum(t.decomposed for t, _ in pairs)
    totals["questions_kept"] = len({(t.question.source, t.question.id) for t, _ in kept})
    return {"rows": [trajectory_row(t, r, 0) for t, r in kept], "totals": totals}


def _means(totals: Mapping[str, float]) -> dict[str, float]:
    out = {name: totals[name] for name in ("questions", "questions_kept", "sampled", "kept")}
    for name in ("sampled", "kept"):
        for value in ("reward", "outcome", "split"):
            out[f"{name}_{value}"] = round(totals[f"{name}_{value}"] / max(totals[name], 1), 4)
    return out
