"""The kind of a question, from each set's own labels and from the reasoning graphs in MuSiQue's ids.

`parallel`: all facts can be searched at once. `sequential`: each fact depends on the previous one. `mixed`: some of
both. `single`: one fact, or a set without labels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from psearch_jax.types import KINDS, Kind

# A set's label -> our kind. The paper's subsets are HotpotQA's comparison and bridge, 2WikiMultiHopQA's comparison and
# inference + compositional, and MultiHop-RAG's comparison and inference queries.
KIND_OF_LABEL: dict[str, Kind] = {
    "comparison": "parallel",
    "comparison_query": "parallel",
    "bridge": "sequential",
    "inference": "sequential",
    "compositional": "sequential",
    "inference_query": "sequential",
    "bridge_comparison": "mixed",
    "temporal_query": "mixed",  # compares the dates of two articles; in neither of the paper's subsets
    "null_query": "single",  # the corpus does not answer it
    "na": "single",  # in ParallelSearch's own files, for sets without labels
    **{kind: kind for kind in KINDS},
}
UNLABELLED: Kind = "single"


@dataclass(frozen=True)
class Graph:
    """The single-hop questions that make up a question: hop i needs the answers of the hops `needs[i]`."""

    needs: tuple[tuple[int, ...], ...]

    @cached_property
    def rounds(self) -> tuple[tuple[int, ...], ...]:
        """The hops in the fewest rounds; the hops of a round are independent of one another."""
        depth: list[int] = []
        for needed in self.needs:  # a hop only needs earlier ones
            depth.append(1 + max((depth[hop] for hop in needed), default=-1))
        return tuple(tuple(hop for hop, d in enumerate(depth) if d == level) for level in range(max(depth) + 1))

    @property
    def width(self) -> int:
        """The largest number of hops that can be searched at once."""
        return max(map(len, self.rounds))

    @property
    def kind(self) -> Kind:
        """`single`, `sequential` (one hop per round), `parallel` (one round) or `mixed`."""
        if len(self.needs) == 1:
            return "single"
        if self.width == 1:
            return "sequential"
        return "parallel" if len(self.rounds) == 1 else "mixed"


# Table 1 of MuSiQue (arXiv 2108.00573): the six graphs, by the first part of a question's id.
MUSIQUE_GRAPHS: dict[str, Graph] = {
    "2hop": Graph(((), (0,))),
    "3hop1": Graph(((), (0,), (1,))),
    "3hop2": Graph(((), (), (0, 1))),
    "4hop1": Graph(((), (0,), (1,), (2,))),
    "4hop2": Graph(((), (), (0, 1), (2,))),
    "4hop3": Graph(((), (0,), (), (1, 2))),
}
_MUSIQUE_ID = re.compile(rf"({'|'.join(MUSIQUE_GRAPHS)})__[0-9_]+")


def musique_graph(identifier: object) -> str | None:
    """The name of the graph in a MuSiQue id such as `3hop2__132929_684936_160088`; None for any other id."""
    match = _MUSIQUE_ID.fullmatch(identifier) if isinstance(identifier, str) else None
    return match[1] if match else None
