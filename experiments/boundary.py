"""The decision to split over training, on minimal pairs in held-out wordings and on mixed questions."""

from experiments import Arm, Evaluation, Experiment

EXPERIMENT = Experiment(
    claim="Policies first split all question types equally often, then only parallel ones, in held-out wordings too.",
    arms={"cold start": Arm(trained=False), "parallelsearch": Arm(steps=(10, 20, 30, 40, 50))},
    evaluations={"sampled": Evaluation(("pairs", "parallel", "sequential", "mixed"), 100, ("--temperature=1",))},
    reference="parallelsearch",
    figures=("decomposition_accuracy", "decomposition_ratio", "em", "turns"),
)
