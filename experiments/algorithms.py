"""GRPO, its variants and PPO with equal numbers of rollouts, except that dynamic sampling collects more.

The PPO config also has other reward weights, and does not update the policy while the critic warms up.
"""

from experiments import MAIN, Arm, Experiment

TWO_UPDATES = {
    "learning.mini_batch_rollouts": 96
}  # two updates per step: with one, all ratios are 1 and nothing is clipped

EXPERIMENT = Experiment(
    claim="The policy-gradient method (GRPO, its variants or PPO) has little influence on what is learned.",
    arms={
        "GRPO": Arm(),
        "Dr. GRPO": Arm({"learning.advantage": "mean", "learning.aggregation": "constant_length"}),
        "RLOO": Arm({"learning.advantage": "leave_one_out"}),
        "GRPO two updates": Arm(TWO_UPDATES),
        "clip-higher": Arm(TWO_UPDATES | {"learning.clip_high": 0.28}),
        "GSPO": Arm(
            TWO_UPDATES
            | {
                "learning.ratio": "sequence",
                "learning.aggregation": "sequence_mean",
                "learning.clip_low": 3e-4,
                "learning.clip_high": 4e-4,
            }
        ),
        "dynamic sampling": Arm({"train.dynamic_sampling_rounds": 1}),
        "likelihood guard": Arm(TWO_UPDATES | {"learning.guard": 0.1}),
        "PPO": Arm(config="smoke_ppo"),
        "PPO batch whitening": Arm({"learning.whiten": "batch"}, config="smoke_ppo"),
        "PPO published weights": Arm({"reward.decomposition": 0.15}, config="smoke_ppo"),
    },
    evaluations={"held-out": MAIN},
    reference="GRPO",
)
