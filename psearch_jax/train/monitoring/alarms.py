"""Alarms that detect a failing run from the metrics of its last steps, mostly before the reward shows it.

The reward is a sum of parts and reacts late. A policy may ignore the passages that it retrieves and still be rewarded
for its format. One alarm watches the reward; each of the others watches a metric that moves earlier.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from psearch_jax.runtime.metrics import mean
from psearch_jax.train.critic import CRITIC
from psearch_jax.train.run import Run
from psearch_jax.train.trainable import MAX_NONFINITE_UPDATES
from psearch_jax.types import UserError

log = logging.getLogger("psearch_jax")
ALARM = "alarm/"  # prefix of the alarms in metrics.jsonl; 1 means active
SETTINGS_CHANGED = "settings_changed"  # 1 in the first step after a resume with --allow_changes
WINDOW = 10  # steps whose mean is compared with a threshold
REWARD_FALL = 0.1  # of the mean reward below its highest value; up to .05 in good runs of the demo
ENTROPY_RISE = 0.5  # above its lowest value, in nats per token
# Alarms that compare one metric with a threshold: alarm -> metric, whether a value is bad, message. In good runs of
# the demo, up to .65 of the sequential questions are split for a while.
_THRESHOLDS: dict[str, tuple[str, Callable[[float], bool], str]] = {
    "over_splitting": ("split/sequential", lambda x: x > 0.75, "{:.2f} of the sequential questions are split"),
    "no_search": ("searched_0", lambda x: x > 0.3, "{:.2f} of the rollouts do not search"),
    "wrong_though_seen": (
        "wrong_though_seen",
        lambda x: x > 0.5,
        "{:.2f} are wrong though the answer was in a passage",
    ),
    "gap": ("logp_gap", lambda x: x > 0.1, "sampler and trainer differ by {:.3f} nats per token"),
    "sample_size": (
        "effective_sample_size",
        lambda x: x < 0.5,
        "the sampler's weights differ so much that its tokens count as {:.2f} of their number",
    ),
}
NAMES = ("reward", "entropy", *_THRESHOLDS)
_METRICS = ("reward", "entropy", *(metric for metric, _, _ in _THRESHOLDS.values()))


class Alarms:
    """Tracks which alarms are active. It compares means over the last `window` steps with thresholds.

    After a change of settings it starts anew, because a reward, for example, may then have another scale.

    Args:
      may_search: whether rollouts can search at all.
      rows: the metrics of the completed steps of a resumed run.
      window: the number of steps; no alarm before this many are done.
    """

    def __init__(self, may_search: bool = True, rows: Iterable[Mapping[str, Any]] = (), window: int = WINDOW):
        self._window, self._may_search = window, may_search
        self._active: set[str] = set()
        self._restart()
        for row in rows:
            self._active = set(self._evaluate(row))

    def _restart(self) -> None:
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=self._window) for name in _METRICS}
        self._steps, self._highest_reward, self._lowest_entropy = 0, -math.inf, math.inf

    def update(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """The alarms of a step as metrics, 1 or 0 each. Logs every alarm that becomes active."""
        active = self._evaluate(metrics)
        for name in sorted(active.keys() - self._active):
            log.warning("step %d: alarm %s: %s", step, name, active[name])
        self._active = set(active)
        return {ALARM + name: float(name in active) for name in NAMES}

    def _evaluate(self, metrics: Mapping[str, Any]) -> dict[str, str]:
        """The message of every alarm that is active after a step."""
        if metrics.get(SETTINGS_CHANGED):
            self._restart()
        for name, values in self._recent.items():
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                values.append(float(value))
        self._steps += 1
        if self._steps < self._window:
            return {}
        now = {name: mean(values) for name, values in self._recent.items()}
        active = {
            alarm: message.format(now[metric])
            for alarm, (metric, is_bad, message) in _THRESHOLDS.items()
            if is_bad(now[metric]) and (self._may_search or alarm != "no_search")
        }
        reward, entropy = now["reward"], now["entropy"]
        self._highest_reward = max(self._highest_reward, reward)  # NaN, as without any value, never counts
        if self._highest_reward - reward > REWARD_FALL:
            active["reward"] = f"the mean reward fell to {reward:.2f}, from {self._highest_reward:.2f}"
        self._lowest_entropy = min(self._lowest_entropy, entropy)
        if entropy - self._lowest_entropy > ENTROPY_RISE:
            active["entropy"] = f"{entropy:.2f} nats per token, up from {self._lowest_entropy:.2f}"
        return active


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; an empty list if the file does not exist."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def check_finite(run: Run, workdir: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Raises UserError if too many updates in a row, or all rollouts of a step, were not finite."""
    count = int(max(metrics.get(f"{who}nonfinite_in_a_row", 0) for who in ("", CRITIC)))
    if count >= MAX_NONFINITE_UPDATES:
        raise UserError(
            f"step {step}: loss or gradient was not finite in {count} updates in a row, "
            f"{_describe_cause(run, metrics)}, or look at {workdir}/trajectories/{step:06d}.jsonl"
        )
    if metrics["status/not_finite"] == 1:  # gradients do not show this: every rollout is masked
        raise UserError(
            f"step {step}: no rollout had finite logits; config.model.sampling_dtype="
            f"{run.config.model.sampling_dtype}, accepted: a dtype that the model's weights and activations fit into"
        )


def _describe_cause(run: Run, metrics: Mapping[str, float]) -> str:
    """What was not finite in the updates that produced `metrics`, and the learning rate to lower."""
    if run.critic is None or metrics.get("nonfinite_in_a_row", 0) >= metrics[f"{CRITIC}nonfinite_in_a_row"]:
        return f"{run.learner.nonfinite_cause(metrics)}; lower learning.learning_rate"
    of_critic = {"nonfinite_param": metrics[f"{CRITIC}nonfinite_param"]}
    return f"{run.critic.nonfinite_cause(of_critic)} of the critic; lower critic.learning_rate"
