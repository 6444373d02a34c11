"""The four methods, trained with equal budgets from the same cold starts; classic retrieval and the cold start."""

from experiments import MAIN, MANY, Arm, Evaluation, Experiment

METHODS = ("r1", "search_r1", "parallel_prompt", "parallelsearch")
KINDS = ("parallel", "sequential", "single")

EXPERIMENT = Experiment(
    claim=(
        "Parallel search answers parallel questions better than one search at a time, in fewer turns, and does not "
        "harm sequential questions."
    ),
    arms={
        "cold start": Arm(trained=False),
        "classic retrieval": Arm(
            trained=False, arguments=("--config.rollout.initial_search=true", "--config.rollout.search_turns=0")
        ),
        **{method: Arm({"method": method}, arguments=(f"--config.method={method}",)) for method in METHODS},
    },
    evaluations={
        "held-out": MAIN,
        "many look-ups": MANY,
        "cold-start facts": Evaluation(("known",)),
        "sampled": Evaluation(MAIN.sets, arguments=("--temperature=1",)),
        "other facts": Evaluation(KINDS, 100, ("--config.data.world_seed=1",)),
        "new names": Evaluation(KINDS, 100, ("--config.data.world_seed=1", "--config.data.world_names=new")),
    },
    reference="search_r1",
)
