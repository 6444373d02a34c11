"""SmolLM2-135M on questions of 2WikiMultiHopQA and a corpus of Wikipedia (docs/data.md), from cold starts of its own.

Hypotheses, written before the first run, about the greedy policy on the test questions, whose entities occur in no
training question:

- A (the published terms, with the weights of the config) splits at least .85 of the parallel and at most .2 of the
  sequential questions; its decomposition accuracy is at least .75.
- B (outcome and format only) does not learn when to split: its split rates of the two kinds differ by less than .2.
- C (a short critical path, with a price on sub-queries; no labels) has a decomposition accuracy of at least .75.
- A takes at most .7 of the turns of D (one query per search) on parallel questions, with an EM that is not lower.
- The passages that A is shown state at least .1 more of the evidence than those of the cold start.
- EM of A is at least .2 above its EM without passages (`closed book`: every search returns one irrelevant passage).
- On original questions of 2WikiMultiHopQA, the decomposition accuracy of A is above that of the cold start, p < .01 by
  a paired permutation test over questions.

A control in the tables is a classifier of the words of a question. On a sample of such questions it was right for all:
a policy that splits correctly may have learned no more than these words.

D keeps the prompt and the cold start of the others, which know several queries per search; only the first one is run.
Sets `transfer-*` are never trained on.
"""

from experiments import DATA, Arm, Evaluation, Experiment

EXPERIMENT = Experiment(
    claim="The terms of the published reward teach a small model when to split real questions, and what to answer.",
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
