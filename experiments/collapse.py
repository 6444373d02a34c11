"""Training that collapses: high learning rates, many updates per batch of rollouts, and useless passages."""

from experiments import MAIN, Arm, Experiment

# Eight updates from each step's rollouts: for the last ones the rollouts are far off-policy.
EIGHT = {"learning.mini_batch_rollouts": 24, "learning.micro_batch_rows": 8}
RATE_5E_4 = {"learning.learning_rate": 5e-4, **EIGHT}
RATE_1E_3 = {"learning.learning_rate": 1e-3, **EIGHT}
# Bad rollouts may fall to a twentieth of their probability, good ones hardly rise, and there is no KL term.
ONE_SIDED = {
    "learning.learning_rate": 6e-4,
    "learning.clip_low": 0.95,
    "learning.clip_high": 0.001,
    "learning.kl_coefficient": 0.0,
    **EIGHT,
}
GUARD = {"learning.guard": 1.0}
STEPS = (20, 40)

EXPERIMENT = Experiment(
    claim="A run that collapses without the likelihood guard is stable with it, and an alarm reports the collapse.",
    arms={
        "cold start": Arm(trained=False),
        "demo": Arm(steps=STEPS),
        "learning rate 5e-4": Arm(RATE_5E_4, steps=STEPS),
        "learning rate 5e-4 and guard": Arm(RATE_5E_4 | GUARD, steps=STEPS),
        "learning rate 1e-3": Arm(RATE_1E_3, steps=STEPS),
        "learning rate 1e-3 and guard": Arm(RATE_1E_3 | GUARD, steps=STEPS),
        "one-sided clipping": Arm(ONE_SIDED, steps=STEPS),
        "one-sided clipping and guard": Arm(ONE_SIDED | GUARD, steps=STEPS),
        "passages of another world": Arm(RATE_1E_3, steps=STEPS, corpus=1),
        "passages of another world and guard": Arm(RATE_1E_3 | GUARD, steps=STEPS, corpus=1),
    },
    evaluations={"held-out": MAIN},
    reference="learning rate 1e-3",
    figures=("em", "valid_format", "decomposition_ratio", "turns"),
)
