"""Does splitting help, or only more passages? Varies the passages per query, with controls of the same total."""

from experiments import MAIN, Arm, Experiment


def of(topk: int, **fields: object) -> Arm:
    """Trained and evaluated with `topk` passages per query; an observation fits three queries with three each."""
    return Arm({"retrieval.topk": topk, **fields}, arguments=(f"--config.retrieval.topk={topk}",))


def classic(topk: int) -> Arm:
    """A single search with the question as the query."""
    return Arm(
        trained=False,
        arguments=(
            "--config.rollout.initial_search=true",
            "--config.rollout.search_turns=0",
            f"--config.retrieval.topk={topk}",
        ),
    )


EXPERIMENT = Experiment(
    claim="Splitting helps because each fact has its own query, not because several queries retrieve more passages.",
    arms={
        **{f"parallelsearch k {k}": of(k) for k in (1, 2, 3)},
        "search_r1 k 2": Arm(
            {"method": "search_r1", "retrieval.topk": 2},
            arguments=("--config.method=search_r1", "--config.retrieval.topk=2"),
        ),
        "search_r1 k 4": Arm(
            {"method": "search_r1", "retrieval.topk": 4},
            arguments=("--config.method=search_r1", "--config.retrieval.topk=4"),
        ),
        **{f"classic retrieval k {k}": classic(k) for k in (2, 4, 6)},
    },
    evaluations={"held-out": MAIN},
    reference="parallelsearch k 2",
)
