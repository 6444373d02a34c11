"""Answers as they come: what is told, in what order, to whom, and that company changes nothing."""

import io
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers import (
    make_collector,
    random_params,
    retriever,
    rollout_section,
    scripted_sampler,
    tiny_config,
)
from programs import wait_until

from configs.smoke import get_config
from psearch_jax import build
from psearch_jax.config import from_mapping
from psearch_jax.data.asking import questions
from psearch_jax.serving.answerer import Answerer, Event, support
from psearch_jax.serving.console import Shown, Told, as_json, printable, took
from psearch_jax.types import Question, Trajectory, Turn, UserError
from retrieval.protocol import Passage, RetrievalError

CONFIG = tiny_config(tied=False)
SEARCH = "<think> zwei Männer \U0001f600 </think> <search> Ada Lovelace born ## Alan Turing born </search>"
ANSWER = "<think> done </think> <answer> Ada Lovelace </answer>"
MUSING = "<think> I wonder </think>"


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, seed=2)


@pytest.fixture(scope="module")
def sampler(tiny_tokenizer):
    return scripted_sampler(tiny_tokenizer, CONFIG)


def scripted(sampler, tokenizer, params, scripts: dict[str, list[str]], service=None, every=3) -> Answerer:
    """An answerer whose model says these turns to these questions, at temperature 1."""
    asked = [(Question("asked", f"0 {text}", text, (), "single"), 0) for text in scripts]
    sampler.give(
        0, 0, asked, [[i for part in parts for i in tokenizer.encode_foreign(part)] for parts in scripts.values()]
    )
    rollout = rollout_section(samples=1, context_tokens=256)
    return Answerer(make_collector(tokenizer, sampler, rollout, service), params, every=every)


def test_what_is_told_of_a_question_is_what_happened_in_its_order(sampler, tiny_tokenizer, params):
    """Fails if a word is told twice or not at all, a letter of several ids half, or passages before their queries."""
    own = scripted(sampler, tiny_tokenizer, params, {"Who?": [SEARCH, ANSWER]})
    events = list(own.answer("Who?", 1.0))
    own.close()
    said = "".join(e.text for e in events)
    assert said == SEARCH + ANSWER and "\ufffd" not in said
    kinds = [e.kind for e in events]
    assert kinds[-1] == "end" and kinds.count("text") > 4
    search, passages = kinds.index("search"), kinds.index("passages")
    assert "".join(e.text for e in events[:search]) == SEARCH and passages == search + 1
    assert events[search].queries == ("Ada Lovelace born", "Alan Turing born") == events[passages].queries
    assert [ranking[0].title for ranking in events[passages].passages] == ["Ada Lovelace", "Alan Turing"]
    trajectory = events[-1].trajectory
    assert trajectory.answer == "Ada Lovelace" and trajectory.status == "answered"
    assert "".join(turn.text for turn in trajectory.turns) == said
    assert all(e.seconds > 0 for e in events if e.kind != "text")


def test_a_turn_without_an_action_and_an_end_without_an_answer_are_told(sampler, tiny_tokenizer, params):
    """A turn that the host corrects must neither stop the telling nor be told as part of the next one."""
    own = scripted(sampler, tiny_tokenizer, params, {"Who?": [MUSING * 9, ANSWER], "What?": [MUSING]})
    found = {text: list(own.answer(text, 1.0)) for text in ("Who?", "What?")}
    own.close()
    for events in found.values():
        trajectory = events[-1].trajectory
        said = "".join(e.text for e in events if e.kind == "text")
        assert said == "".join(turn.text for turn in trajectory.turns)
    assert found["Who?"][-1].trajectory.model_calls > 1
    notes = [e for e in found["Who?"] if e.kind == "note"]
    assert len(notes) == found["Who?"][-1].trajectory.model_calls - 1 and "No search" in notes[0].text
    told = Told()
    for event in found["Who?"]:
        told.add(event)
    assert all(turn["seconds"] > 0 for turn in as_json("Who?", told)["turns"]), "each turn has its own"
    assert found["What?"][-1].trajectory.status == "out_of_turns" and found["What?"][-1].trajectory.answer is None


class Panic(BaseException):
    """As a library in another language raises it."""


class Breaking:
    """A retriever that fails, or stalls, on some queries, or on all."""

    def __init__(self, error=RetrievalError):
        self.service, self.error, self.broken, self.seconds = retriever(), error, lambda query: True, 0.0

    def search(self, queries, k):
        if any("slow" in query for query in queries):
            time.sleep(self.seconds)
        if any(map(self.broken, queries)):
            raise self.error("gone to /secret/path")
        return self.service.search(queries, k)


@pytest.mark.parametrize("error", [RetrievalError, Panic])
def test_a_failed_search_is_told_and_the_next_one_answered(sampler, tiny_tokenizer, params, error):
    """A retriever that is gone for a minute must not end the program, hang its clients, or tell them paths."""
    service = Breaking(error)
    own = scripted(sampler, tiny_tokenizer, params, {"Who?": [SEARCH, ANSWER]}, service)
    last = list(own.answer("Who?", 1.0))[-1]
    assert last.kind == "error" and "secret" not in last.text and not own.healthy
    service.broken = lambda query: False
    wait_until(lambda: own.healthy, 30)  # nobody asks: it tries by itself
    assert list(own.answer("Who?", 1.0))[-1].trajectory.answer == "Ada Lovelace"
    own.close()


def test_one_refused_query_ends_one_answer(sampler, tiny_tokenizer, params):
    """Whoever finds a query that a retriever refuses could end everybody's answers."""
    service = Breaking()
    service.broken = lambda query: "bad" in query
    bad = SEARCH.replace("Alan Turing born", "bad")
    own = scripted(sampler, tiny_tokenizer, params, {"Who?": [SEARCH, ANSWER], "Bad?": [bad, ANSWER]}, service)
    found = {text: [] for text in ("Bad?", "Who?")}
    for text, events in found.items():
        own.ask(text, events.append, 1.0)
    wait_until(lambda: all(e and e[-1].kind in ("end", "error") for e in found.values()), 60)
    assert found["Bad?"][-1].kind == "error" and found["Who?"][-1].trajectory.answer == "Ada Lovelace"
    assert own.healthy
    own.close()


def test_a_slow_search_holds_up_nobody_else(sampler, tiny_tokenizer, params):
    """One query to a far server, and every stream stands still for as long as it takes."""
    service = Breaking()
    service.broken, service.seconds = (lambda query: False), 2.0
    slow = SEARCH.replace("Alan Turing born", "slow")
    long = [MUSING * 3, MUSING * 3, ANSWER]
    own = scripted(sampler, tiny_tokenizer, params, {"Slow?": [slow, ANSWER], "Who?": long}, service)
    list(own.answer("Who?", 1.0))  # everything is compiled
    searching, events = threading.Event(), []
    own.ask("Slow?", lambda e: (events.append(e), searching.set() if e.kind == "search" else None), 1.0)
    assert searching.wait(60)
    began = time.monotonic()
    other = list(own.answer("Who?", 1.0))
    assert other[-1].kind == "end" and time.monotonic() - began < 1.5 and events[-1].kind == "search"
    wait_until(lambda: events[-1].kind == "end", 30)
    assert events[-1].trajectory.answer == "Ada Lovelace"
    own.close()


def test_a_listener_that_fails_is_one_who_has_left(sampler, tiny_tokenizer, params):
    """A client's closed loop must not end the answers of all others."""
    own = scripted(sampler, tiny_tokenizer, params, {"Who?": [SEARCH, ANSWER], "What?": [SEARCH, ANSWER]})

    def deaf(event):
        raise RuntimeError("the loop is closed")

    own.ask("What?", deaf, 1.0)
    assert list(own.answer("Who?", 1.0))[-1].kind == "end" and own._thread.is_alive()
    own.close()


def test_a_question_that_is_too_long_is_refused_and_the_end_told_to_those_who_wait(sampler, tiny_tokenizer, params):
    """Cut in its middle it would be another question; and nobody may wait for a program that has ended."""
    own = scripted(sampler, tiny_tokenizer, params, {"Who?": [SEARCH, ANSWER]})
    with pytest.raises(UserError, match="found .* tokens .* at most 48"):
        own.answer("Who is older? " * 40)
    for text, temperature in (("\ud800", 0.0), (" ", 0.0), ("Who?", float("nan")), ("Who?", 3.0), ("Who?", -1.0)):
        with pytest.raises(UserError, match="question|temperature"):
            own.ask(text, print, temperature)
    own.close()
    told = []
    own.ask("Who?", told.append)
    assert [e.kind for e in told] == ["error"] and not own.healthy


@pytest.fixture(scope="module")
def toy():
    """The policy that ships, in four slots, and questions of several kinds."""
    config = from_mapping(get_config().to_dict())
    rollout = replace(config.rollout, slots=4, samples=2, widths=1)
    parts = build.from_path(replace(config, rollout=rollout), "toy")
    kinds = ("parallel", "sequential", "single")
    asked = [q.text for kind in kinds for q in questions(parts.world, "eval", kind, 4, 0)]
    return parts, parts.sampling_copy(), asked


def test_company_changes_no_answer_and_everybody_hears_their_own(toy):
    """Twelve at once over four slots, greedy and sampled: each must get, id for id, what it gets alone."""
    parts, params, asked = toy
    own = Answerer(parts.collector, params)
    heat = [0.0 if i % 2 else 1.0 for i in range(len(asked))]
    alone = [list(own.answer(text, temperature=t))[-1].trajectory for text, t in zip(asked, heat, strict=True)]
    told: list[list[Event]] = [[] for _ in asked]
    for text, t, mine in zip(asked, heat, told, strict=True):
        own.ask(text, mine.append, temperature=t)
    wait_until(lambda: all(mine and mine[-1].kind == "end" for mine in told), 300)
    for before, mine in zip(alone, told, strict=True):
        after = mine[-1].trajectory
        np.testing.assert_array_equal(before.ids, after.ids)
        assert before.question.text == after.question.text
        assert "".join(e.text for e in mine) == "".join(turn.text for turn in after.turns)
    again = [list(own.answer(asked[0], temperature=1.0, seed=s))[-1].trajectory for s in range(6)]
    assert len({t.ids.tobytes() for t in again}) > 1, "another seed draws anew"
    own.close()


def test_who_leaves_is_told_nothing_more_and_makes_room(toy):
    """A slot that is held by a client who has gone is lost to all others; four of them would stop a server."""
    parts, params, asked = toy
    own = Answerer(parts.collector, params, every=1)
    told, gone = [], []
    for text in asked[:4]:  # in their first words, or behind them
        seen = threading.Event()
        take_back = own.ask(text, lambda event, seen=seen: (told.append(event), seen.set()))
        assert seen.wait(60)
        take_back()
        gone.append(take_back)
    waiting = [own.ask(text, told.append) for text in asked[4:8]]
    for take_back in waiting:  # in line
        take_back()
    time.sleep(0.2)
    before = len(told)
    assert list(own.answer(asked[8]))[-1].kind == "end"
    assert len(told) == before and not any(e.kind == "end" for e in told)
    assert not own._asked
    own.close()


# ---- what is shown ----

PASSAGES = (Passage("p1", "Ada Lovelace", "Born in 1815."), Passage("p2", "", "\x1b[2J\x07 Alan\tTuring, 1912"))


def told_of(status="answered", answer="Ada Lovelace") -> tuple[list[Event], Told]:
    turns = (
        Turn(SEARCH, "search", True, ("Ada Lovelace born", "x"), (PASSAGES, ()), n_sampled=9),
        Turn(ANSWER, "answer", True, answer=answer, n_sampled=3),
    )
    nothing = np.zeros(0)
    trajectory = Trajectory(Question("a", "b", "c", (), "single"), 0, status, turns, nothing, nothing, nothing, 0)
    events = [
        Event("text", turns[0].text),
        Event("search", queries=turns[0].queries, seconds=0.5),
        Event("passages", queries=turns[0].queries, passages=turns[0].passages, seconds=0.25),
        Event("text", turns[1].text),
        Event("end", trajectory=trajectory, seconds=1.0),
    ]
    told = Told()
    for event in events:
        told.add(event)
    return events, told


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_fan_out_is_shown_and_nothing_obeys_what_was_found(encoding):
    """Control characters could clear a terminal or forge an answer; a terminal without UTF-8 must not end it."""
    events, told = told_of()
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="replace")  # as launch/ask.py sets its own
    shown = Shown(file)
    for event in events:
        shown.show(event)
    shown.sum_up(told)
    file.flush()
    text = raw.getvalue().decode(encoding)
    assert "\x1b" not in text and "\x07" not in text and "?[2J? Alan Turing, 1912" in text
    lines = text.splitlines()
    at = lines.index("  2 searches at once")
    assert lines[at + 1].endswith("Ada Lovelace born") and lines[at + 2].endswith("  Ada Lovelace: Born in 1815.")
    assert lines[at + 4].endswith("x") and lines[at + 5].endswith("nothing found")
    assert "answer: Ada Lovelace" in lines and lines[-1] == (
        "2 turns, 1 search of 2 queries, 1.75 s (model 0.50 + 1.00; searching 0.25)"
    )
    assert lines[lines.index("found in:") + 1] == "  Ada Lovelace: Born in 1815."


def test_no_answer_is_said_to_be_none():
    """An empty line in place of an answer leaves open what happened."""
    _, told = told_of("out_of_turns", None)
    file = io.StringIO()
    Shown(file).sum_up(told)
    assert "no answer: the last turn ended without one" in file.getvalue() and "found in" not in file.getvalue()


def test_json_has_each_turn_with_its_own_seconds_and_passages():
    """Fails if passages stand with another query, or seconds with another turn."""
    _, told = told_of()
    found = as_json("c", told)
    assert found["answer"] == "Ada Lovelace" and found["found_in"] == ["p1"] and found["seconds"] == 1.75
    first, last = found["turns"]
    assert first["queries"] == ["Ada Lovelace born", "x"] and [len(r) for r in first["passages"]] == [2, 0]
    assert (first["seconds"], first["search_seconds"], last["seconds"]) == (0.5, 0.25, 1.0)
    assert took(told).startswith("2 turns")


def test_an_answer_rests_on_passages_that_hold_all_of_it():
    """`Ada` in `Adam` is no support, and neither is an empty answer's."""
    _, told = told_of(answer="Ada")
    held = [Passage("1", "", "Adam spoke."), Passage("2", "The Ada", "x"), Passage("2", "The Ada", "x")]
    turn = replace(told.trajectory.turns[0], passages=(tuple(held),))
    trajectory = replace(told.trajectory, turns=(turn, told.trajectory.turns[1]))
    assert [p.id for p in support(trajectory)] == ["2"]
    empty = replace(trajectory, turns=(turn, replace(told.trajectory.turns[1], answer=" ")))
    assert support(empty) == []
    assert printable("a\u202eb\r\nc\x00") == "a?b\nc?"
