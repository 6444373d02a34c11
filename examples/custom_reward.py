"""Trains with your own reward; here the configured one, minus a penalty for long answers.

    python examples/custom_reward.py --config=configs/smoke.py --workdir=runs/short_answers

Takes any file of configs/ and any `--config.SECTION.FIELD=VALUE`, like launch/train.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from absl import flags
from ml_collections import config_flags

from psearch_jax.assembly import build
from psearch_jax.config import from_mapping
from psearch_jax.rl.rewards import Reward
from psearch_jax.runtime import cli
from psearch_jax.train import trainer
from psearch_jax.types import RewardParts, Trajectory

PENALTY_PER_WORD, FREE_WORDS = 0.01, 5
CONFIG = config_flags.DEFINE_config_file("config", None, "The run: a file like configs/smoke.py.", lock_config=False)
WORKDIR = flags.DEFINE_string("workdir", None, "The run directory: created if absent, otherwise resumed.")
flags.mark_flags_as_required(["config", "workdir"])


class ShortAnswers:
    """`base` minus PENALTY_PER_WORD for every word of the answer after the first FREE_WORDS."""

    def __init__(self, base: Reward):
        self._base = base

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[RewardParts]:
        return [self._shorten(t, parts) for t, parts in zip(trajectories, self._base(trajectories), strict=True)]

    def _shorten(self, trajectory: Trajectory, parts: RewardParts) -> RewardParts:
        words = len((trajectory.answer or "").split())
        return replace(parts, format=parts.format - PENALTY_PER_WORD * max(0, words - FREE_WORDS))


def main(_: list[str]) -> None:
    cli.configure_jax()
    run = build.training_run(from_mapping(CONFIG.value.to_dict()))
    run.reward = ShortAnswers(run.reward)
    # Recorded with the run's other settings: a resume with another value is refused.
    run.settings["reward.own"] = f"minus {PENALTY_PER_WORD} per word of the answer after {FREE_WORDS}"
    trainer.train(run, WORKDIR.value)


if __name__ == "__main__":
    cli.run(main)
