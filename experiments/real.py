"""SmolLM2-135M on questions of 2WikiMultiHopQA and a corpus of Wikipedia (docs/data.md), from cold starts of its own.

Hypotheses about the greedy policies on the test questions, none of which is about an entity of the training questions.
The plan of the runs is in docs/results.md.

1. A (the published terms, with the weights of the config) splits at least .85 of the parallel and at most .2 of the
   sequential questions; its decomposition accuracy is at least .75.
2. B (outcome and format only) does not learn when to split: its split rate of parallel questions is less than .2 above
   that of sequential ones.
3. C (a short critical path, with a price on sub-queries; no labels) has a decomposition accuracy of at least .75.
4. On parallel questions, A takes at most .7 of the turns of D (one query per search), with an EM at most .05 lower.
5. EM of A is above that of the cold start, p < .05.
6. EM of A is at least .2 above its EM without passages (`closed book`: every search returns one irrelevant passage).
7. On original questions of 2WikiMultiHopQA, the decomposition accuracy of A is above that of the cold start, p < .01,
   and above that of a classifier of the words.

The classifier is fitted to the training questions. It is right for all test questions: a policy that splits these
correctly may have learned no more than words. For the original questions it is right in .84.

D keeps the prompt and the cold start of the others, which know several queries per search; only the first one is run.
Sets `transfer-*` are never trained on.
"""

from experiments import DATA, Arm, Evaluation, Experiment

EXPERIMENT = Experiment(
    claim="The terms of the published reward teach a small model when to split real questions.",
    arms={
        "cold start": Arm(trained=False),
        "A": Arm(),
        "B": Arm({"reward.decomposition": 0.0, "reward.search_count": 0.0}),
        "C": Arm({"reward.critical_path": 0.5, "reward.sub_query_penalty": 0.05}),
        "D": Arm({"method": "search_r1"}, arguments=("--config.method=search_r1",)),
    },
    evaluations={
        "search": Evaluation(("test", "transfer-*.jsonl"), 0, (f"--index={DATA}/index",)),
        "closed book": Evaluation(
            ("test",), 300, ("--config.retrieval.service=experiments/closed_book.py:ClosedBook",)
        ),
    },
    reference="A",
    figures=(
        *("em", "f1", "answered", "valid_format", "decomposition_accuracy", "decomposition_ratio"),
        *("evidence", "turns", "searches", "tokens"),
    ),
    config="smollm2_135m",
    training={"data.source": f"{DATA}/train", "retrieval.index": f"{DATA}/index"},
    needs_data=True,
)
