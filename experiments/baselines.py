"""The four methods, trained with equal budgets from the same cold starts; classic retrieval and the cold start."""

from experiments import MAIN, MANY, Arm, Evaluation, Experiment

METHODS = ("r1", "search_r1", "parallel_prompt", "parallelsearch")
ELSEWHERE = ("parallel", "sequential", "single")

EXPERIMENT = Experiment(
    claim=(
        "Parallel search answers parallel questions better than one search after the other, in fewer turns, and does "
        "not harm sequential ones."
    ),
    arms={
        "cold start": Arm(trained=False),
        "classic retrieval": Arm(trained=False, arguments=("--initial_search=true", "--search_turns=0")),
        **{method: Arm({"method": method}, arguments=(f"--method={method}",)) for method in METHODS},
    },
    evaluations={
        "held-out": MAIN,
        "large": MANY,
        "by heart": Evaluation(("known",)),
        "sampled": Evaluation(MAIN.sets, arguments=("--temperature=1",)),
        "other facts": Evaluation(ELSEWHERE, 100, ("--world_seed=1",)),
        "new names": Evaluation(ELSEWHERE, 100, ("--world_seed=1", "--world_names=new")),
    },
    reference="search_r1",
    drawn=(
        ("held-out/parallel", "em"),
        ("large/many", "em"),
        ("held-out/sequential", "em"),
        ("held-out/parallel", "turns"),
    ),
)
