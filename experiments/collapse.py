"""Training that collapses: high learning rates, many updates per batch of rollouts, and useless passages."""

from experiments import MAIN, Arm, Experiment

# Eight updates from each step's rollouts: for the last ones the rollouts are far off-policy.
EIGHT = {"learning.mini_batch_rollouts": 24, "learning.micro_batch_rows": 8}
HARD = {"learning.learning_rate": 5e-4, **EIGHT}
HARDER = {"learning.learning_rate": 1e-3, **EIGHT}
# Bad rollouts may fall to a twentieth of their probability, good ones hardly rise, and there is no KL term.
ONE_SIDED = {
    "learning.learning_rate": 6e-4,
    "learning.clip_low": 0.95,
    "learning.clip_high": 0.001,
    "learning.kl_coefficient": 0.0,
    **EIGHT,
}
HELD = {"learning.guard": 1.0}
STEPS = (20, 40)

EXPERIMENT = Experiment(
    claim="The likelihood guard holds a run that collapses without it, and an alarm tells of the fall.",
    arms={
        "cold start": Arm(trained=False),
        "as shipped": Arm(steps=STEPS),
        "hard": Arm(HARD, steps=STEPS),
        "hard and guard": Arm(HARD | HELD, steps=STEPS),
        "harder": Arm(HARDER, steps=STEPS),
        "harder and guard": Arm(HARDER | HELD, steps=STEPS),
        "one-sided": Arm(ONE_SIDED, steps=STEPS),
        "one-sided and guard": Arm(ONE_SIDED | HELD, steps=STEPS),
        "other passages": Arm(HARDER, steps=STEPS, corpus=1),
        "other passages and guard": Arm(HARDER | HELD, steps=STEPS, corpus=1),
    },
    evaluations={"held-out": MAIN},
    reference="harder",
    figures=("em", "valid_format", "decomposition_ratio", "turns"),
    drawn=(
        ("held-out/parallel", "em"),
        ("held-out/sequential", "em"),
        ("held-out/single", "em"),
        ("held-out/parallel", "valid_format"),
    ),
)
