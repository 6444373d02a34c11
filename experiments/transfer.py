"""Transfer of what was learned to names, facts and wordings that no training question had."""

from experiments import Arm, Evaluation, Experiment

KINDS = ("parallel", "sequential", "single")

EXPERIMENT = Experiment(
    claim="When to split is learned from the structure of a question, not from its names, facts or wording.",
    arms={"cold start": Arm(trained=False), "parallelsearch": Arm()},
    evaluations={
        "training world": Evaluation(KINDS, 100),
        "other facts": Evaluation(KINDS, 100, ("--config.data.world_seed=1",)),
        "new names": Evaluation(KINDS, 100, ("--config.data.world_seed=1", "--config.data.world_names=new")),
        "held-out wordings": Evaluation(("pairs",), 200),
        "new names and held-out wordings": Evaluation(
            ("pairs",), 200, ("--config.data.world_seed=1", "--config.data.world_names=new")
        ),
    },
    reference="cold start",
)
