"""The four methods, trained with equal budgets from the same cold starts; classic retrieval and the cold start.

Predictions, written before the first run from cold starts whose thoughts mark no dependence, for five cold starts with
two seeds each. `parallelsearch` raises decomposition accuracy on the minimal pairs from .5 to at least .7 in every
cold start; it is not above a classifier on word bigrams (.78) on average. EM on parallel questions changes by at most
.03, turns fall below 2.2, and EM on mixed questions, which training never asks, falls by .05 to .1. `search_r1` with
eight searches gains at most .05 over four on questions with many look-ups, because no training question needs more
than four.
"""

from experiments import MAIN, Arm, Evaluation, Experiment

METHODS = ("r1", "search_r1", "parallel_prompt")
KINDS = ("parallel", "sequential", "single")
EIGHT_SEARCHES = {"rollout.search_turns": 8, "rollout.context_tokens": 768}

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
        "search_r1 with eight searches": Arm(
            {"method": "search_r1", **EIGHT_SEARCHES},
            arguments=("--config.method=search_r1", *(f"--config.{k}={v}" for k, v in EIGHT_SEARCHES.items())),
        ),
        "parallelsearch": Arm(),
    },
    evaluations={
        "held-out": Evaluation((*MAIN.sets, "mixed", "many", "known")),
        "sampled": Evaluation((*MAIN.sets, "mixed"), arguments=("--temperature=1",)),
        "new names": Evaluation(KINDS, 100, ("--config.data.world_seed=1", "--config.data.world_names=new")),
    },
    reference="cold start",
)
