"""Comparisons of two to eight entities, by policies trained on comparisons of two to four."""

from experiments import Arm, Evaluation, Experiment

SIZES = tuple(f"entities{n}" for n in range(2, 9))

EXPERIMENT = Experiment(
    claim="Splitting generalises to more entities than in training, where single searches exceed the search limit.",
    arms={
        "cold start": Arm(trained=False),
        "search_r1": Arm({"method": "search_r1"}, arguments=("--config.method=search_r1",)),
        "parallelsearch": Arm(),
    },
    evaluations={"held-out": Evaluation(SIZES, 100)},
    reference="search_r1",
    figures=("em", "decomposition_ratio", "turns", "valid_format"),
)
