"""`launch/bench.py merging`: how many needed facts an observation shows, by search and by token budget.

Questions need evidence triples in their metadata (`evidences`), as those of 2WikiMultiHopQA. For each question three
searches are compared: the question itself, one sub-query per triple ("sub-queries": entity and relation, as an ideal
policy would write them), and all of these together ("both"). A fact counts as shown if one line of the observation
names its entity and states its value. `deduplicate` shows a passage that several sub-queries return only once
(config.rollout.deduplicate). The last budget holds everything, so its column is the limit that retrieval sets.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed.timing import written
from psearch_jax.data.evidence.facts import Triple, without_parenthesis
from psearch_jax.data.sources import read_questions
from psearch_jax.data.teacher import query_of, rounds_of, spellings_of
from psearch_jax.eval.tables import table
from psearch_jax.text.answers import normalise
from psearch_jax.text.tags import MAX_SUB_QUERIES, render_observation
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import KINDS, Question, UserError
from retrieval.service import RetrievalService

BUDGETS = (128, 256, 512, 100_000)  # tokens of an observation
SEARCHES = ("question", "sub-queries", "both")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench merging", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", required=True, help="question file with metadata.evidences")
    parser.add_argument("--index", required=True, help="directory of launch/build_index.py")
    parser.add_argument("--tokenizer", required=True, help="Hugging Face directory with a tokenizer")
    parser.add_argument("--topk", type=int, default=3, help="passages per sub-query")
    parser.add_argument("--json", help="file for the figures")
    flags = parser.parse_args(argv)
    questions = [question for question in read_questions(flags.questions) if rounds_of(question)]
    if not questions:
        raise UserError(f"--questions={flags.questions}: found no question with metadata.evidences, accepted: some")
    tokenizer = Tokenizer.load(Path(flags.tokenizer))
    service = RetrievalService.open(flags.index)
    groups = {"all": questions, **{kind: [q for q in questions if q.kind == kind] for kind in KINDS}}
    lines = [
        {"kind": kind, **line}
        for kind, group in groups.items()
        if group
        for search in SEARCHES
        for line in measure(search, group, service, tokenizer, flags.topk)
    ]
    names = [*map(str, BUDGETS[:-1]), "no budget"]
    rows = [["kind", "facts", "search", "deduplicate", *(f"shown, {name}" for name in names), "tokens, no budget"]]
    for line in lines:
        shares = [f"{share:.3f}" for share in line["facts_shown"]]
        deduplicate = "yes" if line["deduplicate"] else "no"
        rows.append([line["kind"], str(line["facts"]), line["search"], deduplicate, *shares, f"{line['tokens']:.0f}"])
    print(f"{len(questions)} questions, {flags.topk} passages per sub-query\n\n{table(rows)}")
    if flags.json:
        written(flags.json, {"questions": len(questions), "topk": flags.topk, "budgets": names, "merging": lines})


def measure(
    search: str, questions: Sequence[Question], service: RetrievalService, tokenizer: Tokenizer, topk: int
) -> list[dict[str, Any]]:
    """The share of needed facts that each budget shows, without and with `deduplicate`."""
    searches = [queries_of(search, question) for question in questions]
    rankings = iter(service.search([query for queries in searches for query in queries], topk))
    retrieved = [[next(rankings) for _ in queries] for queries in searches]
    needed = [[fact for r in rounds_of(question) for fact in r] for question in questions]
    facts = sum(map(len, needed))
    lines = []
    for deduplicate in (False, True) if search != "question" else (False,):
        shown, tokens = [], 0
        for budget in BUDGETS:
            observations = [
                render_observation(queries, passages, tokenizer.encode_foreign, budget, deduplicate=deduplicate)
                for queries, passages in zip(searches, retrieved, strict=True)
            ]
            texts = map(tokenizer.decode, observations)
            hits = sum(is_shown(fact, text) for own, text in zip(needed, texts, strict=True) for fact in own)
            shown.append(round(hits / facts, 4))
            tokens = sum(map(len, observations))
        line = {"search": search, "deduplicate": deduplicate, "facts": facts, "facts_shown": shown}
        lines.append(line | {"tokens": round(tokens / len(questions), 1)})
    return lines


def queries_of(search: str, question: Question) -> tuple[str, ...]:
    """The sub-queries of one of the three searches."""
    own = tuple(dict.fromkeys(query_of(fact) for r in rounds_of(question) for fact in r))
    return {"question": (question.query,), "sub-queries": own, "both": (question.query, *own)}[search][
        :MAX_SUB_QUERIES
    ]


def is_shown(fact: Triple, observation: str) -> bool:
    """Whether one line names the fact's entity and states its value."""
    entity = normalise(without_parenthesis(fact.entity))
    values = [normalise(value) for value in spellings_of(fact)]
    lines = map(normalise, observation.splitlines())
    return any(entity in line and any(value in line for value in values) for line in lines)
