"""A term of the reward: a penalty for long answers.

    python launch/train.py --config=configs/smoke.py --workdir=runs/short_answers \\
        --config.reward.terms=examples/custom_reward.py:short_answers=1.0

A function with a parameter named `trajectories` gets a list of them, those of a question's group adjacent, and returns
a number for each. The function should not depend on anything but its argument: a resumed run repeats it.
"""

from psearch_jax.types import Trajectory

FREE_WORDS = 5


def short_answers(trajectory: Trajectory) -> float:
    """-.01 for every word of the answer after the first FREE_WORDS."""
    words = len((trajectory.answer or "").split())
    return -0.01 * max(0, words - FREE_WORDS)
