"""For each alarm a run that is designed to trigger it, and the demo, which must trigger none."""

from experiments import Arm, Experiment
from experiments.collapse import EIGHT

# The learning rate rises in every step: the first steps are stable, and the reward falls slowly enough that some
# rollouts are still right.
RISING = {"learning.learning_rate": 3e-3, "learning.warmup_ratio": 1.0, **EIGHT}

EXPERIMENT = Experiment(
    claim="Each alarm fires in the run that is designed for it, and none fires in the demo.",
    arms={
        "demo": Arm(),
        "reward": Arm(RISING),
        "over_splitting": Arm({"reward.decomposition": 0.0}),  # needless splitting costs nothing
        "no_search": Arm({"reward.search_penalty": 1.5}),  # a search costs more than a right answer earns
        "wrong_though_seen": Arm({"reward.format": 2.0}),  # a wrong answer earns more than a right one
        "likelihood": Arm(RISING),
        "entropy": Arm({"learning.entropy_coefficient": 0.5}),
        "gap": Arm(RISING | {"learning.old_logprobs": "sampler"}),  # the last updates use an older policy's samples
        # Rollouts of several steps ago, while the policy changes fast.
        "sample_size": Arm(RISING | {"train.staleness": 4}),
        "rejected": Arm(RISING | {"train.staleness": 4, "learning.reject_ratio": 1.05}),
        "retriever": Arm(corpus=1),  # passages of another world, which do not contain the questions' names
    },
    evaluations={},
    reference="demo",
)
