"""Questions made from evidence triples: right answers, shared wordings, refusals, and prepare_data.py."""

import json
import re
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import completed

from psearch_jax.data.evidence.drawer import Drawer
from psearch_jax.data.evidence.facts import COUNTRIES, Date, Evidence, Triple, parse_date, read_fact
from psearch_jax.data.evidence.forms import FORMS, draw, draw_pair
from psearch_jax.data.evidence.triples import dependency_rounds, make_questions, read_triples, signature
from psearch_jax.data.evidence.wordings import EVENTS, RELATIONS, framed, nouns
from psearch_jax.data.prepared import PreparedQuestions, overlap
from psearch_jax.data.sources import read_questions
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
PEOPLE = {  # person: birth, birthplace, country
    "Alfred Hitchcock": ("13 August 1899", "London", "British"),
    "Fritz Lang": ("December 5, 1890", "Vienna", "Austrian"),
    "Steven Spielberg": ("18 December 1946", "Cincinnati", "American"),
    "Orson Welles": ("6 May 1915", "Kenosha", "American"),
    "Charlie Chaplin": ("April 16, 1889", "London", "British"),
    "Akira Kurosawa": ("23 March 1910", "Tokyo", "Japanese"),
    "Federico Fellini": ("20 January 1920", "Rimini", "Italian"),
    "Billy Wilder": ("22 June 1906", "Sucha", "American"),
    "Leo McCarey": ("October 3, 1898", "Los Angeles", "American"),
    "Virginia Woolf": ("25 January 1882", "London", "British"),
}
FAMILY = [
    ("Elizabeth I", "father", "Henry VIII"),
    ("Henry VIII", "father", "Henry VII"),
    ("Henry VII", "father", "Edmund Tudor"),
    ("Mary I", "mother", "Catherine of Aragon"),
    ("Catherine of Aragon", "mother", "Isabella I"),
    ("Philip II", "father", "Charles V"),
    ("Charles V", "father", "Philip the Handsome"),
]
TRIPLES = [
    *(Triple(film, "director", director) for film, (director, _) in FILMS.items()),
    *(Triple(film, "publication date", year) for film, (_, year) in FILMS.items()),
    *(Triple(person, "date of birth", row[0]) for person, row in PEOPLE.items()),
    *(Triple(person, "place of birth", row[1]) for person, row in PEOPLE.items()),
    *(Triple(person, "country of citizenship", row[2]) for person, row in PEOPLE.items()),
    *(Triple(*row) for row in FAMILY),
]


@pytest.fixture(scope="module")
def made():
    return make_questions(TRIPLES, seed=0, count=700, corpus=None, source="made")


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def facts_of(question):
    return [fact for facts in question.metadata["rounds"] for fact in facts]


# ---- reading ----


def test_the_three_forms_of_rows_are_one_set_of_triples(tmp_path):
    """A form of row that is silently ignored, or a triple that counts again for each question that needs it."""
    row = {"id": "q", "question": "?", "metadata": {"evidences": [["Psycho", "director", "Alfred Hitchcock"]]}}
    bare = ["Psycho", "director", "Alfred  Hitchcock "]
    named = {"entity": '"Jaws', "relation": "director", "value": "Steven Spielberg"}
    assert read_triples(write(tmp_path / "t.jsonl", [row, bare, named, row])) == [
        Triple("Psycho", "director", "Alfred Hitchcock"),
        Triple("Jaws", "director", "Steven Spielberg"),
    ]


@pytest.mark.parametrize(
    "bad",
    ['["A", "b"]', '["A", "b", 3]', '{"entity": "A"}', "{", '{"metadata": {}}', '["A", " ", "c"]', "7"],
)
def test_a_malformed_line_is_refused_with_its_number(tmp_path, bad):
    """A broken row that is dropped silently, or an error that does not say where it is."""
    path = tmp_path / "t.jsonl"
    path.write_text(f'["Psycho", "director", "Alfred Hitchcock"]\n\n{bad}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"t\.jsonl:3: .*found.*accepted|t\.jsonl:3: not JSON.*accepted"):
        read_triples(path)
    skipped = []
    assert len(read_triples(path, skipped)) == 1 and len(skipped) == 1
    with pytest.raises(UserError, match="no triples found"):
        read_triples(write(tmp_path / "empty.jsonl", []))


def test_rounds_follow_the_values():
    """A bridge whose second hop lands in the first round, because of case or white space: it would look parallel."""
    first = Triple("Psycho", "director", "alfred  hitchcock")
    second, third = Triple("Alfred Hitchcock", "place of birth", "London"), Triple("London", "country", "UK")
    other = Triple("Jaws", "director", "Steven Spielberg")
    assert dependency_rounds([third, second, other, first]) == ((other, first), (second,), (third,))
    circle = [Triple("A", "spouse", "B"), Triple("B", "spouse", "A")]
    assert dependency_rounds(circle) == (tuple(circle),) and dependency_rounds([]) == ()


names = st.sampled_from("abcdef")


@given(st.lists(st.builds(Triple, names, st.just("r"), names), max_size=12))
def test_rounds_keep_every_triple_once(triples):
    """Lost triples, or an endless loop, where triples depend on one another in a circle."""
    rounds = dependency_rounds(triples)
    assert sorted(map(repr, (t for r in rounds for t in r))) == sorted(map(repr, set(triples)))
    assert all(rounds)


# ---- dates ----


@pytest.mark.parametrize(
    ("text", "date"),
    [
        ("4 February 1894", Date(1894, 2, 4)),
        ("February 23, 1899", Date(1899, 2, 23)),
        ("Feb. 4, 1894", Date(1894, 2, 4)),
        ("4th of May 1894", Date(1894, 5, 4)),
        ("1894-02-04", Date(1894, 2, 4)),
        ("May 1894", Date(1894, 5)),
        ("953", Date(953)),
        ("4/2/1894", None),
        ("c. 1125", None),
        ("31 April 1900", None),
        ("44 BC", None),
        ("Mayor 1900", None),
        ("1900-13-01", None),
    ],
)
def test_dates(text, date):
    """Day and month swapped, or a guess at an ambiguous date: wrong answers to comparisons."""
    assert parse_date(text) == date


def test_dates_that_are_not_ordered():
    """A comparison within a year of which one day is unknown, or of the same day."""
    assert Date(1900).before(Date(1900, 5, 1)) is None and Date(1900, 5, 1).before(Date(1900, 5, 1)) is None
    assert Date(1899).before(Date(1900, 5, 1)) is True and Date(1900, 5, 2).before(Date(1900, 5, 1)) is False


@given(st.dates())
def test_both_spellings_are_read_back(day):
    """An alias of an answer that names another day."""
    date = Date(day.year, day.month, day.day)
    if day.year >= 100:
        assert [parse_date(spelling) for spelling in date.spellings] == [date, date]


def test_ties_are_dropped():
    """`Which of Sabrina and Rear Window was released first?` has no answer if both are known only by the same year."""
    tied = [Triple("Sabrina", "publication date", "1954"), Triple("Rear Window", "publication date", "1954")]
    questions = make_questions(tied, seed=0, count=40, corpus=None, source="x")
    assert questions and {q.kind for q in questions} == {"single"}


# ---- answers ----


def test_answers_are_right_by_recomputation(made):
    """A wrong answer would reward being wrong. Each form is recomputed from the facts that it names."""
    known = {(t.relation, t.entity): t.value for t in TRIPLES}
    country = {name: row[0] for row in COUNTRIES.values() for name in row}
    forms = set()
    for q in made:
        form, rounds, text = q.metadata["form"], q.metadata["rounds"], q.text
        forms.add(form)
        assert all(known[relation, entity] == value for relation, entity, value in facts_of(q))
        for before, after in zip(rounds, rounds[1:], strict=False):
            assert all(entity in {value for _, _, value in before} for _, entity, _ in after)
        values = [value for _, _, value in rounds[-1]]
        if form in ("bridge", "chain", "fact", "bridge_choose", "chain_choose", "fact_choose", "shared"):
            date = parse_date(values[-1])
            assert (date.spellings if date else (country.get(values[-1], values[-1]),)) == q.answers[
                : 2 if date else 1
            ]
            if form.endswith("choose"):
                spellings = {answer.removeprefix("the ") for answer in q.answers}
                assert len({o.removeprefix("the ") for o in q.metadata["options"]} & spellings) == 1
        elif form in ("compare", "bridge_compare"):
            dates = [parse_date(value) for value in values]
            first = ".True." in q.metadata["wording"]
            wanted = dates.index(min(dates) if first else max(dates))
            assert q.answers == (q.metadata["options"][wanted],) and len(set(dates)) == len(dates)
            assert any(word in text for word in ("first", "earl")) == first
        elif form in ("has", "bridge_has"):
            rest = text
            for option in q.metadata["options"]:
                rest = re.sub(rf"{re.escape(option)}(?!\w)", "", rest, count=1)
            shown = [re.escape(country.get(value, value)) for value in values]
            (right,) = [
                option
                for option, value in zip(q.metadata["options"], shown, strict=True)
                if re.search(rf"(?<!\w){value}(?!\w)", rest)
            ]
            assert q.answers == (right,)
        elif form in ("same", "bridge_same"):
            assert q.answers == (("yes",) if values[0] == values[1] else ("no",))
        elif form == "compare_check":
            a, b = map(parse_date, values)
            assert q.answers == (("yes",) if (" before " in text) == (a < b) else ("no",))
        elif form == "before_or_after":
            assert q.answers == (("before",) if parse_date(values[0]) < parse_date(values[1]) else ("after",))
        elif form in ("bridge_before", "bridge_before_or_after"):
            earlier = parse_date(values[0]).year < int(re.search(r"(?:before|after) (\d+)", text)[1])
            if form == "bridge_before":
                assert q.answers == (("yes",) if (" before " in text) == earlier else ("no",))
            else:
                assert q.answers == (("before",) if earlier else ("after",))
    assert forms >= {"compare", "compare_date", "same", "has", "bridge", "bridge_choose", "chain", "bridge_compare"}


def test_yes_and_no_are_balanced(made):
    """A form whose answer is nearly always no: a policy would learn to answer it without a search."""
    by_form = defaultdict(list)
    for q in made:
        if q.answers[0] in ("yes", "no"):
            by_form[q.metadata["form"]].append(q.answers[0] == "yes")
    assert len(by_form) >= 6
    for form, answers in by_form.items():
        assert len(answers) < 15 or 0.25 < sum(answers) / len(answers) < 0.75, form


def test_a_statement_of_two_facts_is_true_when_both_are(made):
    """`and` and `or` exchanged, or a wrong value that is true; the truth is derived from the question's words."""
    for q in (q for q in made if q.metadata["form"] in ("both_true", "either_true")):
        truths = []
        for relation, _, value in facts_of(q):
            if RELATIONS[relation].value == "date":
                truths.append(any(spelling in q.text for spelling in parse_date(value).spellings))
            else:
                row = next((row for row in COUNTRIES.values() if value in row), (value,))
                truths.append(row[0] in q.text)
        right = all(truths) if q.metadata["form"] == "both_true" else any(truths)
        assert q.answers == (("yes",) if right else ("no",)), q.text


# ---- wordings ----


def test_every_form_has_eight_wordings():
    """A form that can be recognized by its only wording."""
    drawer, wordings = Drawer(Evidence(TRIPLES), np.random.default_rng(0)), defaultdict(set)
    for form in FORMS:
        for _ in range(6):
            draft = draw(drawer, form)
            if draft:
                path = tuple(sorted(draft.relations))
                wordings[form, path, len(draft.options)] |= {name for core in draft.cores for name, _ in framed(core)}
    assert {form for form, *_ in wordings} == set(FORMS)
    assert {name: len(texts) for name, texts in wordings.items() if len(texts) < 8} == {}


def test_openings_are_shared_between_parallel_and_sequential(made):
    """An opening such as `Which of` or `Tell me` that reveals whether to split."""
    openings = {kind: {signature(q.text)[:2] for q in made if q.kind == kind} for kind in ("parallel", "sequential")}
    shared = openings["parallel"] & openings["sequential"]
    assert {("Tell", "me"), ("I", "would"), ("Which", "of"), ("Could", "you")} <= shared
    counts = {kind: sum(q.kind == kind and signature(q.text)[:2] in shared for q in made) for kind in openings}
    for kind, count in counts.items():
        assert count > 0.8 * sum(q.kind == kind for q in made)


def test_a_pair_has_one_of_each_kind_and_the_same_relations(made):
    """A minimal pair whose members can be told apart by their relations or their openings."""
    pairs = defaultdict(list)
    for q in made:
        if "pair" in q.metadata:
            pairs[q.metadata["pair"]].append(q)
    assert len(pairs) > 20
    for members in pairs.values():
        assert sorted(q.kind for q in members) == ["parallel", "sequential"]
        assert len({frozenset(relation for relation, _, _ in facts_of(q)) for q in members}) == 1
        assert len({signature(q.text) for q in members}) == 1


def test_possessives_keep_what_is_meant():
    """`the father of A's mother` for the mother of the father of A: another person."""
    assert nouns("mother", "the father of Mary") == ["the mother of the father of Mary"]
    assert "Mary's mother" in nouns("mother", "Mary")


def test_every_relation_has_its_parts():
    """A date that cannot be compared, or a phrase without its entity."""
    assert set(EVENTS) == {name for name, relation in RELATIONS.items() if relation.value == "date"}
    for relation in RELATIONS.values():
        assert all("{e}" in noun or "{p}" in noun for noun in relation.nouns)
        assert all("{x}" in text or "{on}" in text for clause in relation.checks for text in clause)


# ---- questions as a set ----


def test_the_same_seed_gives_the_same_questions():
    """A run that cannot be repeated, a seed without effect, or questions that depend on the order of the triples."""
    one = make_questions(TRIPLES, seed=3, count=60, corpus=None, source="x")
    assert one == make_questions(reversed(TRIPLES), seed=3, count=60, corpus=None, source="x")
    assert {q.text for q in one} != {
        q.text for q in make_questions(TRIPLES, seed=4, count=60, corpus=None, source="x")
    }


def test_kinds_are_in_their_shares(made):
    """One kind that crowds out another, or duplicate questions."""
    shares = {kind: sum(q.kind == kind for q in made) / len(made) for kind in ("parallel", "sequential", "mixed")}
    assert shares["parallel"] == pytest.approx(0.4, abs=0.08) and shares["sequential"] == pytest.approx(0.35, abs=0.08)
    assert shares["mixed"] > 0.05 and len({q.id for q in made}) == len({q.text for q in made}) == len(made)
    rounds = {"parallel": {1}, "sequential": {2, 3}, "mixed": {2}, "single": {1}}
    for q in made:
        assert len(q.metadata["rounds"]) in rounds[q.kind]
        assert (q.kind in ("parallel", "mixed")) == any(len(facts) > 1 for facts in q.metadata["rounds"])


def test_few_triples_give_few_questions(caplog):
    """An endless loop, or a set that is silently smaller than requested."""
    few = [Triple("Psycho", "director", "Alfred Hitchcock"), Triple("Jaws", "director", "Steven Spielberg")]
    questions = make_questions(few, seed=0, count=500, corpus=None, source="x")
    assert 0 < len(questions) < 500
    with pytest.raises(UserError, match="no question can be made of 0 usable triples"):
        make_questions([Triple("A", "shoe size", "7")], seed=0, count=5, corpus=None, source="x")
    assert draw_pair(Drawer(Evidence(few), np.random.default_rng(0))) is None


def test_doubtful_triples_are_left_out_by_reason():
    """A question with two right answers, or about a country that is an empire. Such triples are counted by reason."""
    evidence = Evidence(
        [
            Triple("Fritz Lang", "country of citizenship", "Austrian"),
            Triple("Fritz Lang", "country of citizenship", "American"),
            Triple("A", "country of citizenship", "Safavid Empire"),
            Triple("B", "date of birth", "c. 1125"),
            Triple("C", "place of birth", "Roman"),
            Triple("D", "shoe size", "7"),
        ]
    )
    assert evidence.facts == [] and sum(evidence.left_out.values()) == 6 and len(evidence.left_out) == 5


def test_facts_are_checked_against_the_corpus():
    """Questions that the passages cannot answer: no passage, one without the value, or two titles for one name."""
    corpus = [
        Passage("1", "Alfred Hitchcock", "Born on August 13, 1899 in London, he was an English director."),
        Passage("2", "Jaws (film)", "A film directed by Steven Spielberg."),
        Passage("3", "Spielberg's life", "Steven Spielberg was born in Cincinnati."),
        Passage("4", "Sabrina (1954 film)", "By Billy Wilder."),
        Passage("5", "Sabrina (1995 film)", "By Sydney Pollack."),
    ]
    triples = [
        Triple("Alfred Hitchcock", "date of birth", "13 August 1899"),
        Triple("Alfred Hitchcock", "place of birth", "Lond"),
        Triple("Jaws", "director", "Steven Spielberg"),
        Triple("Steven Spielberg", "place of birth", "Cincinnati"),
        Triple("Sabrina", "director", "Billy Wilder"),
        Triple("Vertigo", "director", "Alfred Hitchcock"),
    ]
    evidence = Evidence(triples, corpus)
    assert [fact.triple for fact in evidence.facts] == [triples[0], triples[2], triples[3]]
    assert sorted(evidence.left_out.values()) == [1, 1, 1]


# ---- the program ----


def test_prepare_data_merges_made_questions_with_a_file(tmp_path):
    """Nested rounds lost in the prepared dataset, or a triple source that cannot be combined with others."""
    real = {"id": "1", "question": "Who?", "golden_answers": ["A"], "metadata": {"type": "bridge"}}
    triples = write(tmp_path / "t.jsonl", [[t.entity, t.relation, t.value] for t in TRIPLES])
    questions = write(tmp_path / "q.jsonl", [real])
    passages = [Passage(name, name, f"{name} {row[0]} {row[1]}") for name, row in {**FILMS, **PEOPLE}.items()]
    write_corpus(tmp_path / "corpus.jsonl", passages)
    arguments = [
        "launch/prepare_data.py",
        f"--source=real:{questions}",
        f"--source=made:triples:{triples}",
        f"--corpus={tmp_path / 'corpus.jsonl'}",
        "--questions=50",
        "--seed=2",
        f"--out={tmp_path / 'out'}",
    ]
    done = completed(arguments)
    assert done.returncode == 0, done.stderr
    assert "| real | 1 | 0 | 1 | 0 | 0 |" in done.stdout and "| made | 50 |" in done.stdout
    assert "triples left out: no passage about the entity" in done.stderr
    stored = list(PreparedQuestions(tmp_path / "out"))
    assert len(stored) == 51 and stored[0].source == "real"
    again = make_questions(read_triples(triples), seed=2, count=50, corpus=passages, source="made")
    assert stored[1:] == again and all(isinstance(q.metadata["rounds"][0][0], list) for q in again)
    done = completed([arguments[0], arguments[1], arguments[3], f"--out={tmp_path / 'new'}"])
    assert done.returncode == 2 and "--corpus=" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    triples.write_text('["A"]\n')
    done = completed([*arguments[:-1], f"--out={tmp_path / 'new'}"])
    assert done.returncode == 2 and "t.jsonl:1" in done.stderr and not (tmp_path / "new").exists()


def test_real_triples_give_enough_and_leak_nothing(shared_data):
    """Real triples give two thousand questions, none of them a test question."""
    from retrieval.corpus import MemoryMappedCorpus

    folder = shared_data / "pocketwiki"
    if not folder.is_dir():
        pytest.skip("the optional data folder ../shared/data has no pocketwiki")
    corpus = MemoryMappedCorpus(folder / "corpus.jsonl")
    questions = make_questions(
        read_triples(folder / "2wiki_train.jsonl"), seed=0, count=2000, corpus=corpus, source="x"
    )
    assert len(questions) == 2000 and overlap(read_questions(folder / "2wiki_test.jsonl"), questions) == []


def test_a_date_that_is_less_precise_may_be_the_same():
    """`Was he born in 1901?` is answered `no` for a birth on 3 May 1901."""

    def fact(value):
        return read_fact(Triple("Ada", "date of birth", value))

    known = fact("3 May 1901")
    assert all(known.same_value(fact(value)) for value in ("1901", "May 1901", "3 May 1901"))
    assert not any(known.same_value(fact(value)) for value in ("1902", "June 1901", "4 May 1901"))
