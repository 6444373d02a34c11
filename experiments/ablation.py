"""The two bonus weights, each varied with the other at its published value (the paper's own ablation)."""

from experiments import MAIN, MANY, Arm, Experiment

DECOMPOSITION, SEARCH_COUNT = (0.0, 0.15, 0.35, 0.5), (0.0, 0.1, 0.35, 0.5)
PUBLISHED = (0.15, 0.35)
CELLS = [(d, PUBLISHED[1]) for d in DECOMPOSITION] + [(PUBLISHED[0], c) for c in SEARCH_COUNT] + [(0.0, 0.0)]

EXPERIMENT = Experiment(
    claim="EM and decomposition accuracy are highest at the published weights: decomposition 0.15, search count 0.35.",
    arms={
        f"decomposition {d} and search count {c}": Arm({"reward.decomposition": d, "reward.search_count": c})
        for d, c in CELLS
    },
    evaluations={"held-out": MAIN, "many look-ups": MANY},
    reference="decomposition 0.15 and search count 0.35",
)
