"""What a training run writes in addition to its checkpoints: config.json, trajectories, a line for every step."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from psearch_jax.config import to_mapping
from psearch_jax.eval.evaluate import trajectory_row
from psearch_jax.runtime import processes
from psearch_jax.runtime.metrics import PHASES, cut_jsonl
from psearch_jax.runtime.paths import write_atomically
from psearch_jax.types import KINDS, RewardParts, Trajectory

log = logging.getLogger("psearch_jax")
FEW_ANSWERS, WARNED_STEPS = 0.3, 3  # share of rollouts with an answer below which the first steps warn


def write_config(workdir: Path, config: Any, step: int) -> None:
    """Writes config.json, from a dataclass. A different older one is kept as config.until_STEP.json."""
    file, now = workdir / "config.json", to_mapping(config)
    try:
        before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else now
    except ValueError:
        before = None
    if before != now:
        kept = workdir / f"config.until_{step:06d}.json"
        while kept.exists():
            kept = kept.with_name(f"{kept.stem}.again.json")
        file.rename(kept)
        log.info("config.json has changed; the previous one is kept as %s", kept)
    write_json(file, now)


def truncate_workdir(workdir: Path, config: Any, step: int) -> None:
    """Writes config.json, and removes metrics and trajectories of the steps from `step` on, which are repeated."""
    write_config(workdir, config, step)
    dropped = cut_jsonl(workdir / "metrics.jsonl", step)
    if dropped and not step:
        log.warning(f"{workdir}: has metrics of {dropped} steps but no checkpoint; starting again at step 0")
    for file in (workdir / "trajectories").glob("*.jsonl"):
        if file.stem.isdigit() and int(file.stem) >= step:
            file.unlink()


def write_trajectories(
    workdir: Path, step: int, trajectories: Sequence[Trajectory], rewards: Sequence[RewardParts], count: int
) -> None:
    """Writes the first `count` trajectories of a step to its own file."""
    if not processes.first():
        return
    directory = workdir / "trajectories"
    directory.mkdir(exist_ok=True)
    rows = [trajectory_row(t, r, step) for t, r in zip(trajectories[:count], rewards[:count], strict=True)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(directory / f"{step:06d}.jsonl", text)


def report(bar: tqdm, step: int, metrics: Mapping[str, float], may_split: bool) -> None:
    """Shows the step in one line, above the progress bar or in the log, and logs warnings.

    Args:
      may_split: whether rollouts may search for several sub-queries at once.
    """
    if not processes.first():
        return
    kinds = " ".join(
        f"{kind} em {metrics[f'em/{kind}']:.2f} split {metrics[f'split/{kind}']:.2f}"
        for kind in KINDS
        if f"em/{kind}" in metrics
    )
    seconds = sum(metrics.get(f"{phase}_s", 0.0) for phase in PHASES)
    answered = metrics["status/answered"]
    line = f"step {step} reward {metrics['reward']:.3f} answered {answered:.2f} {kinds} {seconds:.1f}s"
    if bar.disable:
        left = seconds * (bar.total - step - 1) / 60
        log.info(f"{line}, about {left:.0f} min left" if left >= 1 else line)
    else:
        bar.write(line, file=sys.stderr)  # above the bar, so that earlier steps stay visible
    if metrics["status/not_finite"]:
        log.warning(
            "step %d: %.1f%% of the rollouts had logits that are not finite; they are not trained on",
            step,
            100 * metrics["status/not_finite"],
        )
    if step < WARNED_STEPS and answered < FEW_ANSWERS:
        log.warning(
            "only %.1f%% of the rollouts end with an answer, which leaves little to reinforce: teach the model the "
            "tags first (docs/sft.md), or check the prompt template and the token budgets",
            100 * answered,
        )
    split = metrics.get("split/parallel")
    if may_split and step == 0 and split is not None and split < 0.05:
        log.warning(
            "only %.1f%% of the rollouts on parallel questions split them: groups without a single split give no "
            "signal for splitting, so the behaviour may disappear",
            100 * split,
        )


def write_json(path: Path, value: Any) -> None:
    """Writes the file atomically."""
    write_atomically(path, json.dumps(value, indent=2) + "\n")
