"""The label-free reward for a short critical path, compared with the published one at equal rollouts.

Expected before the first run. Paying right answers for fewer model turns than their group's teaches splitting of
parallel questions as well as the published bonuses do (at least .9 of them). It does not teach when not to split: a
needless split costs no turn, because its other sub-query finds the first fact, so sequential questions are split too,
as without the decomposition bonus (at least .5 of them). A price on every sub-query, which also reads no labels, makes
needless splits worse than none: then at most .2 of the sequential questions are split.
"""

from experiments import MAIN, MANY, Arm, Experiment

CRITICAL_PATH = {"reward.critical_path": 0.5}

EXPERIMENT = Experiment(
    claim="A reward for a short critical path, which reads no labels, teaches splitting as the labelled bonuses do.",
    arms={
        "published": Arm(),
        "critical path": Arm(CRITICAL_PATH),
        "critical path with a price": Arm(CRITICAL_PATH | {"reward.sub_query_penalty": 0.05}),
        "outcome only": Arm({"reward.decomposition": 0.0, "reward.search_count": 0.0}),
    },
    evaluations={"held-out": MAIN, "many look-ups": MANY},
    reference="published",
)
