"""Rejection sampling: writes the highest-reward rollouts of each question in the format of supervised fine-tuning.

STaR (arXiv 2203.14465) and RAFT (arXiv 2304.06767) fine-tune on such rollouts. As in STaR, the prompt of a draft may
state the answer; such a draft is kept only if it finds the answer before it mentions it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from psearch_jax.data.scripted_transcripts import transcript_row
from psearch_jax.data.transcripts import TranscriptTurn
from psearch_jax.eval.evaluate import json_lines, trajectory_row
from psearch_jax.eval.parts import begin_parts, run_parts
from psearch_jax.rollout.rollouts import Progress
from psearch_jax.runtime import processes
from psearch_jax.runtime.paths import check_new, remove_tree, write_atomically
from psearch_jax.text.answers import contains_words, normalise
from psearch_jax.text.dialects import Tags
from psearch_jax.text.evidence import find_support
from psearch_jax.text.prompts import ANSWER, ChatWriter, render_prompt
from psearch_jax.text.tags import escape_tags
from psearch_jax.types import Question, RewardParts, Trajectory, Turn

Scored = tuple[Trajectory, RewardParts]
_TAGS = str.maketrans("<>", "  ")  # so that a word next to a tag stays a word


def best_rollouts(scored: Sequence[Scored], keep: int, min_reward: float) -> list[Scored]:
    """At most `keep` well-formed rollouts of one question with at least `min_reward`, by decreasing reward.

    Ties are ordered by increasing length. Of rollouts with identical turn texts only the first is kept.
    """
    order = sorted(scored, key=lambda pair: (-pair[1].total, len(pair[0].ids), pair[0].sample))
    kept: dict[tuple[str, ...], Scored] = {}
    for trajectory, reward in order:
        if reward.total >= min_reward and trajectory.well_formed:
            kept.setdefault(tuple(turn.text for turn in trajectory.turns), (trajectory, reward))
    return list(kept.values())[:keep]


def render_draft(writer: ChatWriter, template: str, question: Question) -> list[int]:
    """The prompt of a draft: `render_prompt`, with the first accepted answer at `{answer}`."""
    return render_prompt(writer, template.replace(ANSWER, escape_tags(question.answers[0])), question.text)


def follows_evidence(trajectory: Trajectory) -> bool:
    """Whether the policy searched, and mentions the answer only after a passage did.

    Of an answer that the question names, and of `yes` and `no`, only the search is required.
    """
    answers, question = trajectory.question.answers, normalise(trajectory.question.text)
    golds = [gold for answer in answers if (gold := normalise(answer)) not in ("yes", "no")]
    if not golds or any(contains_words(question, gold) for gold in golds):
        return bool(trajectory.executed)
    for i, turn in enumerate(trajectory.turns):
        if find_support(trajectory.turns[:i], answers):
            return True
        words = normalise(turn.text.translate(_TAGS))
        if any(contains_words(words, gold) for gold in golds):
            return False
    return False


def as_transcript(trajectory: Trajectory) -> dict[str, Any]:
    """The row with the texts of the turns, which can be put behind another prompt.

    A rollout keeps the token that completes a closing tag, which may extend past it; a transcript ends with the tag.
    """
    closes = {action: tag for tag, action in Tags.stops.items()}

    def text_of(turn: Turn) -> str:
        close = closes.get(turn.action, "")
        return turn.text.partition(close)[0] + close if close and close in turn.text else turn.text

    turns = [TranscriptTurn(text_of(t), t.queries, t.passages, tools=t.tools) for t in trajectory.turns]
    return transcript_row(trajectory.question, turns)


def sample(
    out: Path,
    questions: Sequence[Question],
    roll_out: Callable[..., Sequence[Trajectory]],
    reward: Callable[[Sequence[Trajectory]], Sequence[RewardParts]],
    keep: int,
    min_reward: float,
    settings: Mapping[str, Any],
    questions_per_part: int,
    drafts: bool = False,
) -> dict[str, float]:
    """Writes the kept rollouts of all questions to `out`, part by part: a killed call resumes after the last part.

    Args:
      out: the jsonl file; its parts are in `OUT.parts` until it is complete.
      roll_out: `evaluate` of a list of questions, with its `progress`.
      reward: the rewards of such rollouts.
      keep, min_reward: see `best_rollouts`.
      drafts: keep only those that `follows_evidence` accepts, and write them as transcripts.
      settings: everything that determines the rollouts, JSON-serialisable; a resuming call must pass the same.

    Returns:
      Counts and means over all sampled rollouts, and over the kept ones.

    Raises:
      UserError: `out` exists, or was started with other settings.
    """
    parts = out.with_name(f"{out.name}.parts")

    def begin() -> None:
        check_new(out, "a new file", "--out=")
        begin_parts(parts, settings, out)

    def sample_part(asked: Sequence[Question], report: Progress) -> str:
        trajectories = roll_out(asked, progress=report)
        scored = list(zip(trajectories, reward(trajectories), strict=True))
        samples = len(scored) // len(asked)
        groups = [scored[i * samples : (i + 1) * samples] for i in range(len(asked))]
        if drafts:
            groups = [[pair for pair in group if follows_evidence(pair[0])] for group in groups]
        kept = [pair for group in groups for pair in best_rollouts(group, keep, min_reward)]
        rows = [as_transcript(t) if drafts else trajectory_row(t, r, 0) for t, r in kept]
        totals = {"questions": len(asked), "questions_kept": len({t.question.identity for t, _ in kept})}
        totals |= add_up("sampled", scored) | add_up("kept", kept)
        return json.dumps({"totals": totals, "rows": rows}, ensure_ascii=False)

    processes.broadcast(begin)
    files = run_parts(parts, questions, questions_per_part, sample_part)
    if not processes.first():
        return {}
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    totals: dict[str, float] = {n: sum(part["totals"][n] for part in contents) for n in contents[0]["totals"]}
    write_atomically(out, json_lines(row for part in contents for row in part["rows"]))
    remove_tree(parts)
    for name in ("sampled", "kept"):
        for value in ("reward", "outcome", "split"):
            totals[f"{name}_{value}"] = round(totals[f"{name}_{value}"] / max(totals[name], 1), 4)
    return totals


def add_up(name: str, pairs: Sequence[Scored]) -> dict[str, float]:
    """The number of rollouts, and the sums of their rewards, outcomes and splits."""
    return {
        name: len(pairs),
        f"{name}_reward": sum(r.total for _, r in pairs),
        f"{name}_outcome": sum(r.terms["outcome"] for _, r in pairs),
        f"{name}_split": sum(t.decomposed for t, _ in pairs),
    }
