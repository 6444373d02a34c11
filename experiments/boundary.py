"""How the decision to split sharpens over training, on minimal pairs in held-out wordings and on mixed questions."""

from experiments import Arm, Evaluation, Experiment

EXPERIMENT = Experiment(
    claim="Splitting is first blind and then follows the shape of the question, in wordings never trained on as well.",
    arms={"cold start": Arm(trained=False), "parallelsearch": Arm(steps=(10, 20, 30, 40, 50))},
    evaluations={"sampled": Evaluation(("pairs", "parallel", "sequential", "mixed"), 100, ("--temperature=1",))},
    reference="parallelsearch",
    figures=("decided", "decomposition_ratio", "em", "turns"),
    drawn=(("sampled/pairs", "decided"), ("sampled/mixed", "decomposition_ratio")),
)
