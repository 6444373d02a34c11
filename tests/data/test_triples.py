"""Questions made from evidence triples: right answers, shared wordings, refusals, and prepare_data.py."""

import hashlib
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import completed

from psearch_jax.data.prepared import PreparedQuestions, TripleOptions, prepare
from psearch_jax.data.triple_questions import FORMS, make_questions, signature
from psearch_jax.data.triples import differ, read_triples, select_stated
from psearch_jax.text.evidence import Triple, dependency_rounds, parse_date
from psearch_jax.types import UserError
from retrieval.corpus import write_corpus
from retrieval.protocol import Passage

FILMS = {  # film: director, year
    "Psycho": ("Alfred Hitchcock", "1960"),
    "Vertigo": ("Alfred Hitchcock", "1958"),
    "Rear Window": ("Alfred Hitchcock", "1954"),
    "Metropolis": ("Fritz Lang", "1927"),
    "Jaws": ("Steven Spielberg", "1975"),
    "Citizen Kane": ("Orson Welles", "1941"),
    "The Kid": ("Charlie Chaplin", "1921"),
    "Rashomon": ("Akira Kurosawa", "1950"),
    "Amarcord": ("Federico Fellini", "1973"),
    "Sabrina": ("Billy Wilder", "1954"),
}
PEOPLE = {  # person: birth, birthplace
    "Alfred Hitchcock": ("13 August 1899", "London"),
    "Fritz Lang": ("December 5, 1890", "Vienna"),
    "Steven Spielberg": ("18 December 1946", "Cincinnati"),
    "Orson Welles": ("6 May 1915", "Kenosha"),
    "Charlie Chaplin": ("April 16, 1889", "London"),
    "Akira Kurosawa": ("23 March 1910", "Tokyo"),
    "Federico Fellini": ("20 January 1920", "Rimini"),
    "Billy Wilder": ("22 June 1906", "Sucha"),
}
TRIPLES = [
    *(Triple(film, "director", director) for film, (director, _) in FILMS.items()),
    *(Triple(film, "publication date", year) for film, (_, year) in FILMS.items()),
    *(Triple(person, "date of birth", birth) for person, (birth, _) in PEOPLE.items()),
    *(Triple(person, "place of birth", place) for person, (_, place) in PEOPLE.items()),
]


def make(triples=TRIPLES, seed=0, count=120):
    return make_questions(triples, seed=seed, count=count, source="made")


@pytest.fixture(scope="module")
def made():
    return make()


def write(path, triples, **changes):
    row = {"id": "q", "question": "?", "golden_answers": ["A"], "metadata": {"evidences": triples}, **changes}
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return path


def test_triples_of_a_question_file(tmp_path):
    """Triples are read once each, without quotation marks; a file without any is refused, a bad row named."""
    psycho, jaws = ["Psycho", "director", "Alfred Hitchcock"], ['"Jaws', "director", "Steven  Spielberg "]
    read = read_triples(write(tmp_path / "t.jsonl", [psycho, jaws, psycho, ["A", " ", "B"]]))
    assert read == [Triple(*psycho), Triple("Jaws", "director", "Steven Spielberg")]
    for triples, changes, message in (([], {}, "t.jsonl: no evidence"), ([psycho], {"id": None}, "t.jsonl:1: field")):
        with pytest.raises(UserError, match=message):
            read_triples(write(tmp_path / "t.jsonl", triples, **changes))


def test_rounds_follow_the_values():
    """A fact about another fact's value is in a later round, whatever the case and the white space of the name."""
    first = Triple("Psycho", "director", "alfred  hitchcock")
    second, third = Triple("Alfred Hitchcock", "place of birth", "London"), Triple("London", "country", "UK")
    other = Triple("Jaws", "director", "Steven Spielberg")
    assert dependency_rounds([third, second, other, first]) == ((other, first), (second,), (third,))
    circle = [Triple("A", "spouse", "B"), Triple("B", "spouse", "A")]
    assert dependency_rounds(circle) == (tuple(circle),) and dependency_rounds([]) == ()


names = st.sampled_from("abcdef")


@given(st.lists(st.builds(Triple, names, st.just("r"), names), max_size=12))
def test_rounds_keep_every_triple_once(triples):
    """Triples that depend on one another in a circle are neither lost nor an endless loop."""
    rounds = dependency_rounds(triples)
    assert sorted(map(repr, (t for r in rounds for t in r))) == sorted(map(repr, set(triples)))
    assert all(rounds)


def test_dates():
    """Dates in words and in ISO format are read; ambiguous and impossible ones are none."""
    day = (1894, 2, 4)
    for text in ("4 February 1894", "February 4, 1894", "4 Feb 1894", "1894-02-04"):
        assert parse_date(text) == day
    assert parse_date("May 1894") == (1894, 5) and parse_date("1894") == (1894,)
    for text in ("4/2/1894", "c. 1125", "31 April 1900", "44 BC", "1900-13-01", "953"):
        assert parse_date(text) is None


def test_values_that_certainly_differ():
    """Dates differ only if their known parts do, places if none contains the other; both spellings are read back."""

    def certain(a, b):
        return differ(Triple("A", "r", a), Triple("B", "r", b))

    assert not certain("1900", "1 May 1900") and not certain("1 May 1900", "May 1, 1900")
    assert certain("1899", "1 May 1900") and certain("2 May 1900", "1 May 1900")
    assert certain("London", "Paris") and not certain("London", "london, England")
    born = Triple("A", "date of birth", "1894-02-04").value_spellings
    assert len(born) == 3 and {parse_date(spelling) for spelling in born} == {(1894, 2, 4)}


def test_facts_are_checked_against_the_corpus():
    """Left out: no passage with the entity's title, none that states the value, two titles for one name."""
    corpus = [
        Passage("1", "Alfred Hitchcock", "Born on August 13, 1899 in London, he was an English director."),
        Passage("2", "Jaws (film)", "A film directed by Steven Spielberg."),
        Passage("3", "Sabrina (1954 film)", "By Billy Wilder."),
        Passage("4", "Sabrina (1995 film)", "By Sydney Pollack."),
    ]
    triples = [
        Triple("Alfred Hitchcock", "date of birth", "13 August 1899"),
        Triple("Alfred Hitchcock", "place of birth", "Lond"),  # not a complete word
        Triple("Jaws", "director", "Steven Spielberg"),
        Triple("Sabrina", "director", "Billy Wilder"),
        Triple("Vertigo", "director", "Alfred Hitchcock"),
    ]
    assert select_stated(triples, corpus) == [triples[0], triples[2]]


def test_answers_are_right_by_recomputation(made):
    """The answer of every form is recomputed from the facts that the question names."""
    known, forms = {(t.relation, t.entity): t.value for t in TRIPLES}, set()
    for q in made:
        form, rounds, chance = (q.metadata[name] for name in ("form", "rounds", "chance"))
        forms.add(form)
        assert len(rounds) == (2 if q.kind == "sequential" else 1) and (q.kind == "parallel") == (len(rounds[0]) > 1)
        assert all(known[relation, entity] == value for r in rounds for relation, entity, value in r)
        for before, after in zip(rounds, rounds[1:], strict=False):
            assert all(entity in {value for _, _, value in before} for _, entity, _ in after)
        facts, (_, _, end) = rounds[0], rounds[-1][-1]
        if form == "compare":
            dates = [parse_date(value) for _, _, value in facts]
            first = bool(re.search("first|earliest", q.text))
            right = facts[dates.index(min(dates) if first else max(dates))][1]
            assert q.answers == (right,) and len(set(dates)) == len(dates) and right in q.text
            assert chance == 1 / len(facts)
        elif form == "has":
            (right,) = [entity for _, entity, value in facts if value in q.text]
            assert q.answers == (right,) and all(entity in q.text for _, entity, _ in facts)
            assert chance == 1 / len(facts)
        else:
            assert q.answers[0] == end and facts[0][1] in q.text
            assert form.endswith("choose") == (end in q.text)
            options = {t.value for t in TRIPLES if t.relation == rounds[-1][-1][0] and t.value in q.text}
            assert chance == (1 / len(options) if form.endswith("choose") else 0)
    assert forms == {form for of_kind in FORMS.values() for form in of_kind}
    sizes = {len(q.metadata["rounds"][0]) for q in made if q.kind == "parallel"}
    assert sizes == {2, 3, 4}


def test_openings_and_connectives_do_not_reveal_the_kind(made):
    """Questions differ; most sequential ones share their opening and connectives with parallel ones."""
    assert len({q.id for q in made}) == len({q.text for q in made}) == len(made)
    signatures = {kind: [signature(q.text) for q in made if q.kind == kind] for kind in ("parallel", "sequential")}
    for kind, other in (("parallel", "sequential"), ("sequential", "parallel")):
        shared = sum(words in signatures[other] for words in signatures[kind])
        assert len(signatures[kind]) > 0.25 * len(made) and shared > 0.7 * len(signatures[kind])


def test_minimal_pairs(tmp_path):
    """Half of them are parallel; the others have the same words, so only their order reveals the kind."""
    triples = write(tmp_path / "t.jsonl", [[t.entity, t.relation, t.value] for t in TRIPLES])
    prepare([("made", f"triples:{triples}")], tmp_path / "out", None, TripleOptions(count=40, pairs=True))
    made, words = list(PreparedQuestions(tmp_path / "out")), {}
    assert len(made) == 40 == len({q.text for q in made})
    for q in made:
        (facts,), entities = q.metadata["rounds"], [t.entity for t in TRIPLES if t.relation == "director"]
        asked = [(entity, value) for _, entity, value in facts if entity in q.text and value in q.text]
        assert q.metadata["chance"] in (1 / 2, 1 / 3, 1 / 4) and len(asked) == 1
        assert q.answers == (asked[0][q.kind == "single"],) and (q.kind == "parallel") == (len(facts) > 1)
        assert q.text.endswith("the director of?" if q.kind == "parallel" else f"the director of {facts[0][1]}?")
        for name in sorted([*entities, *PEOPLE], key=len, reverse=True):
            q = replace(q, text=q.text.replace(name, "").replace(",", ""))
        words.setdefault(q.kind, []).append(sorted(set(q.text.strip("?").split())))
    assert sorted(words["parallel"]) == sorted(words["single"])


def test_the_seed_decides_and_not_the_order_of_the_triples():
    """Equal seeds give equal questions, in every version, other seeds others."""
    texts = "\n".join(q.text for q in make(seed=3, count=60))
    assert hashlib.sha256(texts.encode()).hexdigest().startswith("3719276501a704e9")
    assert make(seed=3, count=60) == make(reversed(TRIPLES), seed=3, count=60)
    assert {q.text for q in make(seed=3, count=60)} != {q.text for q in make(seed=4, count=60)}


def test_few_or_doubtful_triples_give_few_questions():
    """Too few triples end without a loop; ties, several values and descriptions are not asked about."""
    few = [Triple("Psycho", "director", "Alfred Hitchcock"), Triple("Jaws", "director", "Steven Spielberg")]
    assert 0 < len(make(few, count=500)) < 500
    tied = [Triple("Sabrina", "publication date", "1954"), Triple("Rear Window", "publication date", "1954")]
    assert {q.kind for q in make(tied, count=40)} == {"single"}
    doubtful = [
        Triple("Fritz Lang", "place of birth", "Vienna"),
        Triple("Fritz Lang", "place of birth", "Linz"),
        Triple("B", "date of birth", "c. 1125"),
        Triple("C", "director", "a man who was born in Rome"),
        Triple("D", "shoe size", "7"),
    ]
    with pytest.raises(UserError, match="made: no question can be made"):
        make(doubtful, count=5)


def test_prepare_data_merges_made_questions_with_a_file(tmp_path):
    """Made questions keep their rounds in a prepared dataset, next to those of another source."""
    triples = write(tmp_path / "t.jsonl", [[t.entity, t.relation, t.value] for t in TRIPLES])
    passages = [Passage(name, name, f"{name} {row[0]} {row[1]}") for name, row in {**FILMS, **PEOPLE}.items()]
    write_corpus(tmp_path / "corpus.jsonl", passages)
    corpus, source = f"--corpus={tmp_path / 'corpus.jsonl'}", f"--source=real:{triples}"
    made = f"--source=made:triples:{triples}"
    arguments = ["launch/prepare_data.py", source, made, corpus, "--questions=30", "--seed=2"]
    done = completed([*arguments, f"--out={tmp_path / 'out'}"])
    assert done.returncode == 0, done.stderr
    assert "| real | 1 | 0 | 0 | 1 | 0 |" in done.stdout and "| made | 30 |" in done.stdout
    assert "state 36 of 36 triples" in done.stderr
    stored = list(PreparedQuestions(tmp_path / "out"))
    assert stored[0].source == "real" and stored[1:] == make(read_triples(triples), seed=2, count=30)
    done = completed([arguments[0], source, "--pairs", f"--out={tmp_path / 'new'}"])
    assert done.returncode == 2 and "--pairs=" in done.stderr and len(done.stderr.strip().splitlines()) == 1
