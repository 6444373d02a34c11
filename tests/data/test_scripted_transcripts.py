"""Scripted transcripts: what they show, what they leave open, and which questions are used."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
from programs import completed

from psearch_jax.data.scripted_transcripts import PLANS, Alternation, TranscriptWriter, compare
from psearch_jax.data.sources import read_questions
from psearch_jax.text.evidence import Triple
from psearch_jax.text.tags import MIN_OBSERVATION_TOKENS, parse_turn, render_observation
from psearch_jax.types import KINDS, Question
from retrieval.protocol import Passage
from retrieval.service import RetrievalService

PASSAGES = [
    Passage("0", "Psycho (1960 film)", "Psycho is a 1960 film directed by Alfred Hitchcock."),
    Passage("1", "Alfred Hitchcock", "Alfred Hitchcock (13 August 1899 - 29 April 1980) was born in Leytonstone."),
    Passage("2", "Vertigo (film)", "Vertigo is a 1958 film directed by Alfred Hitchcock."),
    Passage("3", "Orson Welles", "Orson Welles, born on May 6, 1915 in Kenosha, directed Citizen Kane."),
    Passage("4", "Citizen Kane", "Citizen Kane is a 1941 film directed by Orson Welles."),
]
BORN = {"Alfred Hitchcock": "13 August 1899", "Orson Welles": "6 May 1915"}
DATES = [[name, "date of birth", date] for name, date in BORN.items()]
DIRECTORS = [["Vertigo", "director", "Alfred Hitchcock"], ["Citizen Kane", "director", "Orson Welles"]]
ROWS = {  # type: question, answer, triples
    "comparison": ("Who was born first, Alfred Hitchcock or Orson Welles?", "Alfred Hitchcock", DATES),
    "compositional": (
        "Where was the director of Citizen Kane born?",
        "Kenosha",
        [DIRECTORS[1], ["Orson Welles", "place of birth", "Kenosha"]],
    ),
    "bridge_comparison": ("Which has the older director, Vertigo or Citizen Kane?", "Vertigo", DIRECTORS + DATES),
}


def row(kind: str) -> dict:
    question, answer, evidences = ROWS[kind]
    metadata = {"type": kind, "evidences": evidences}
    return {"id": kind, "question": question, "golden_answers": [answer], "metadata": metadata}


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> dict[str, Question]:
    file = tmp_path_factory.mktemp("questions") / "rows.jsonl"
    file.write_text("".join(json.dumps(row(kind)) + "\n" for kind in ROWS))
    return {question.id: question for question in read_questions(file)}


@pytest.fixture(scope="module")
def search():
    service = RetrievalService.from_corpus(PASSAGES)
    return lambda queries: service.search(list(queries), 3)


def everything(queries, rankings) -> str:
    return " ".join(f"{p.title} {p.text}" for ranking in rankings for p in ranking)


def write(question, splits, search, observe=everything, seed=0, **budgets):
    return TranscriptWriter(search, observe, **budgets).write(question, splits, np.random.default_rng(seed))


def both(question, search, observe=everything, **budgets):
    return write(question, (False, True), search, observe, **budgets)


@pytest.mark.parametrize("kind", ROWS)
def test_transcripts_answer_from_what_was_retrieved(questions, search, kind):
    """A transcript is in the grammar, shows passages for every query, and ends with the question's answer."""
    for turns in both(questions[kind], search).values():
        *searches, last = turns
        assert 1 <= len(searches) <= 3
        for turn in searches:
            action = parse_turn(turn.text)
            assert action.well_formed and action.queries == turn.queries
            assert len(turn.passages) == len(turn.queries) and all(turn.passages)
        action = parse_turn(last.text)
        assert action.well_formed and action.answer == ROWS[kind][1]


def test_a_fact_is_stated_by_a_passage_about_its_entity(questions):
    """A transcript that takes the value from a namesake's passage teaches to answer from the wrong one."""
    other = [replace(p, title=f"{p.title} II") if p.title == "Citizen Kane" else p for p in PASSAGES]
    for passages, count in ((PASSAGES, 2), (other, 0)):
        service = RetrievalService.from_corpus(passages)
        assert len(both(questions["compositional"], lambda queries, s=service: s.search(list(queries), 3))) == count


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_every_kind_is_split_in_the_same_share(share):
    """Of the first n questions of any kind, share x n are split: the cold start does not show which kinds to split."""
    for seed in range(5):
        alternation = Alternation(share, np.random.default_rng(seed))
        decided = {kind: [alternation.next(kind) for _ in range(50)] for kind in KINDS}
        for splits in decided.values():
            assert all(abs(sum(splits[:n]) - share * n) <= 1 for n in range(51)), splits
            assert set(splits) <= set(alternation.possible)
    firsts = {Alternation(0.5, np.random.default_rng(seed)).next("single") for seed in range(20)}
    assert firsts == {False, True}


def test_a_question_is_kept_whether_it_is_split_or_not(questions, search):
    """A question of which only one of the two transcripts can be written is left out."""

    def observe(queries, rankings):
        return everything(queries, rankings[:1])  # as a budget that only the first sub-query's passages fit

    def first_only(kind, splits):
        return write(questions[kind], splits, lambda queries: [search([q])[0][:1] for q in queries], observe)

    assert first_only("comparison", (False,)) and first_only("compositional", (False, True))
    assert not first_only("comparison", (True,)) and not first_only("comparison", (False, True))
    for kind in ROWS:
        turns = both(questions[kind], search)
        assert [len(turns[split][0].queries) > 1 for split in (False, True)] == [False, True]


def test_the_first_thought_reveals_nothing(questions, search):
    """The first thought has entities and relations in one of several forms, whatever the kind and the split."""
    given = {"comparison": "Alfred Hitchcock, Orson Welles", "compositional": "Citizen Kane"}
    asked = {"comparison": "date of birth", "compositional": "director, place of birth"}
    for kind in given:
        forms = set()
        for seed in range(30):
            turns = both(questions[kind], search, seed=seed)
            first = {turns[split][0].text.split("</think>")[0].removeprefix("<think>") for split in (False, True)}
            assert len(first) == 1
            forms |= first
        assert forms == {plan.format(names=given[kind], relations=asked[kind]) for plan in PLANS}


def test_facts_are_compared_and_vain_searches_are_not_learned(questions, search):
    """The last thought of a comparison compares its facts; a correction follows a search that shows no fact."""
    for turns in both(questions["comparison"], search).values():
        assert "Orson Welles 1915, later, wanted earlier: no, still Alfred Hitchcock 1899. " in turns[-1].text
        assert len(turns) <= 3
    for turns in both(questions["bridge_comparison"], search).values():
        assert "Orson Welles 1915, later, wanted earlier: no, still Alfred Hitchcock 1899." in turns[-1].text
    a, b, c = (Triple(name, "born", value) for name, value in (("A", "1 May 1950"), ("B", "1950"), ("C", "1960")))
    assert compare([b, c, a], "C", "") == (
        "B 1950; C 1960, later, wanted later: yes; A 1 May 1950, earlier, wanted later: no, still C 1960"
    )
    assert compare([c, b], "B", "") == "C 1960; B 1950, earlier, wanted earlier: yes"
    directors = {"A": "Ann Lee", "B": "Bo Berg", "C": "Cy Cole"}
    films = [Triple(name, "director", value) for name, value in directors.items()]
    named = "Which was directed by Bo Berg, A, B or C?"
    assert compare(films, "B", named) == "wanted Bo Berg; A Ann Lee, no; B Bo Berg, yes"
    assert compare(films, "B", "Which film is longer, A or B?") == compare(films, "yes", "By Ann Lee?") == ""
    assert compare([c, b], "b", "") == compare([c, b], "B", ""), "question sets write names in another case than facts"
    lives = [b, Triple("B", "died", "1990"), c, Triple("C", "died", "2010")]
    assert compare(lives, "C", "Who lived longer, B or C?") == "", "no date decides"

    def find_full_names(queries):  # as on a large corpus, where half a name finds another entity
        return [search([q])[0] if q.startswith(("Alfred", "Orson")) else [PASSAGES[2]] for q in queries]

    corrected = both(questions["comparison"], find_full_names, correction_share=1.0)
    for split, (vain, again, *_) in corrected.items():
        assert not vain.trained and again.trained and vain.queries != again.queries
        assert vain.queries[0] == "Hitchcock date of birth" and len(vain.queries) == len(again.queries) == 1 + split
    assert [len(t) for t in both(questions["comparison"], search, correction_share=1.0).values()] == [3, 2], "found"


def test_questions_whose_facts_are_not_shown_are_left_out(questions, search, tiny_tokenizer):
    """No thought states what a rollout does not show; searches and turns fit into a rollout."""
    subset = RetrievalService.from_corpus(PASSAGES[:3])

    def observe(tokens):
        encode = tiny_tokenizer.encode_foreign
        return lambda q, r: tiny_tokenizer.decode(render_observation(q, r, encode, tokens).ids)

    for splits in [(False,), (True,)]:
        assert not write(questions["comparison"], splits, lambda q: subset.search(list(q), 2))
        assert not write(Question("s", "1", "Who?", ("A",), "single"), splits, search)
        assert not write(questions["bridge_comparison"], splits, search, search_turns=1)
        assert not write(questions["comparison"], splits, search, fits=lambda turn: bool(turn.queries))
        for question in questions.values():
            assert not write(question, splits, search, observe(MIN_OBSERVATION_TOKENS))
    for question in questions.values():
        assert both(question, search, observe(2000)) == both(question, search)


def test_the_program_writes_what_fine_tuning_reads(tmp_path):
    """The program writes a file even if texts cannot be encoded, and refuses questions without triples."""
    questions, corpus, out = (tmp_path / name for name in ("questions.jsonl", "corpus.jsonl", "new/out.jsonl"))
    questions.write_text("".join(json.dumps(row(kind)) + "\n" for kind in ROWS))
    # Half a surrogate pair, which cannot be written in UTF-8.
    texts = [{"id": p.id, "contents": f'"{p.title}"\n{p.text} \ud83d'} for p in PASSAGES]
    corpus.write_text("".join(json.dumps(text) + "\n" for text in texts))
    fields = {"model.tokenizer": "toy", "retrieval.corpus": corpus}
    fields |= {"rollout.obs_tokens": 900, "rollout.turn_tokens": 400}  # toy needs more tokens
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    program = [sys.executable, "launch/write_transcripts.py", "--config=configs/qwen0p5b_cpu.py", *flags]
    done = completed([*program, f"--questions={questions}", f"--out={out}"])
    assert done.returncode == 0 and "3 transcripts" in done.stdout, done.stderr[-2000:]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {r["id"] for r in rows} == set(ROWS) and all(r["turns"][0]["passages"][0][0]["text"] for r in rows)
    plain = tmp_path / "plain.jsonl"
    plain.write_text(json.dumps({"id": "1", "question": "Who?", "golden_answers": ["A"]}) + "\n")
    refused = completed([*program, f"--questions={plain}", f"--out={tmp_path / 'none.jsonl'}"])
    assert refused.returncode == 2 and "none of 1 questions has evidence triples" in refused.stderr
