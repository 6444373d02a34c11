"""A run made for each alarm, which has to ring in it, and the demo, in which none may."""

from experiments import Arm, Experiment
from experiments.collapse import EIGHT

# A rate that grows from step to step: some behave well, and the fall is slow enough to have right rollouts.
RISING = {"learning.learning_rate": 3e-3, "learning.warmup_ratio": 1.0, **EIGHT}

EXPERIMENT = Experiment(
    claim="Each alarm rings in the run that is made for it, and none in the demo.",
    arms={
        "as shipped": Arm(),
        "reward": Arm(RISING),
        "over_splitting": Arm({"reward.decomposition": 0.0}),  # to split in vain costs nothing
        "no_search": Arm({"reward.search_price": 1.5}),  # a search costs more than an answer is worth
        "wrong_though_seen": Arm({"reward.format": 2.0}),  # a wrong answer earns more than a right one
        "likelihood": Arm(RISING),
        "entropy": Arm({"learning.entropy_coefficient": 0.5}),
        "gap": Arm(RISING | {"learning.old_logprobs": "sampler"}),  # the last updates learn from another policy's
        "retriever": Arm(corpus=1),  # of another world, where nothing is known of these names
    },
    evaluations={},
    reference="as shipped",
)
