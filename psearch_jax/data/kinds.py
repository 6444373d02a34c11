"""The kind of a question, from each set's own labels and from the reasoning graphs in MuSiQue's ids.

`parallel`: all facts can be searched at once. `sequential`: each fact depends on the previous one. `mixed`: some of
both. `single`: one fact, or a set without labels.
"""

from __future__ import annotations

import re

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

# The six graphs of single-hop questions in MuSiQue (arXiv 2108.00573, table 1), by the first part of a question's id.
# In 3hop2, 4hop2 and 4hop3 two of the hops are independent of each other.
KIND_OF_MUSIQUE_GRAPH: dict[str, Kind] = {
    "2hop": "sequential",
    "3hop1": "sequential",
    "3hop2": "mixed",
    "4hop1": "sequential",
    "4hop2": "mixed",
    "4hop3": "mixed",
}
_MUSIQUE_ID = re.compile(rf"({'|'.join(KIND_OF_MUSIQUE_GRAPH)})__[0-9_]+")


def musique_kind(identifier: object) -> Kind | None:
    """The kind of a question with a MuSiQue id such as `3hop2__132929_684936_160088`; None for any other id."""
    match = _MUSIQUE_ID.fullmatch(identifier) if isinstance(identifier, str) else None
    return KIND_OF_MUSIQUE_GRAPH[match[1]] if match else None
