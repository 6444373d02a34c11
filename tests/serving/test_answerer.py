"""Streamed answers: which events are sent, in which order and to whom; other questions in the batch change nothing."""

from dataclasses import replace

import pytest
from helpers import make_collector, random_params, retriever, rollout_section, scripted_sampler, tiny_config
from programs import wait_until

from psearch_jax.serving.answerer import Answerer
from psearch_jax.text.evidence import find_support
from psearch_jax.types import Question, Turn, UserError
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


def scripted(
    sampler, tokenizer, params, scripts: dict[str, list[str]], service=None, every=3, initial_search=False
) -> Answerer:
    """An answerer whose model replies to these questions with these turns, at temperature 1."""
    asked = [(Question("asked", f"0 {text}", text, (), "single"), 0) for text in scripts]
    sampler.give(
        0, 0, asked, [[i for part in parts for i in tokenizer.encode_foreign(part)] for parts in scripts.values()]
    )
    rollout = rollout_section(samples=1, context_tokens=256, initial_search=initial_search)
    return Answerer(make_collector(tokenizer, sampler, rollout, service), sampler.weights(params), every=every)


def test_what_is_told_of_a_question_is_what_happened_in_its_order(sampler, tiny_tokenizer, params):
    """Each piece of text is sent once and in order, with complete characters, and queries before their passages."""
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
    """A turn without an action is followed by a note and the next turn; an end without an answer is an end."""
    own = scripted(sampler, tiny_tokenizer, params, {"Who?": [MUSING * 9, ANSWER], "What?": [MUSING]})
    streams = {text: list(own.answer(text, 1.0)) for text in ("Who?", "What?")}
    own.close()
    for events in streams.values():
        trajectory = events[-1].trajectory
        said = "".join(e.text for e in events if e.kind == "text")
        assert said == "".join(turn.text for turn in trajectory.turns)
    assert streams["Who?"][-1].trajectory.model_calls > 1
    notes = [e for e in streams["Who?"] if e.kind == "note"]
    assert len(notes) == streams["Who?"][-1].trajectory.model_calls - 1 and "No search" in notes[0].text
    assert streams["What?"][-1].trajectory.status == "out_of_turns" and streams["What?"][-1].trajectory.answer is None


class Panic(BaseException):
    """Like an exception from native code: no subclass of Exception."""


class Breaking:
    """A retriever that fails on some queries, or on all."""

    def __init__(self, error=RetrievalError):
        self.service, self.error, self.broken = retriever(), error, lambda query: True

    def search(self, queries, k):
        if any(map(self.broken, queries)):
            raise self.error("gone to /secret/path")
        return self.service.search(queries, k)


@pytest.mark.parametrize("error", [RetrievalError, Panic])
def test_a_failed_search_is_told_and_the_next_one_answered(sampler, tiny_tokenizer, params, error):
    """After an outage of the retriever, whose clients get an error without internals, questions are answered again."""
    service = Breaking(error)
    own = scripted(sampler, tiny_tokenizer, params, {"Who?": [SEARCH, ANSWER]}, service)
    last = list(own.answer("Who?", 1.0))[-1]
    assert last.kind == "error" and "secret" not in last.text and not own.healthy
    service.broken = lambda query: False
    wait_until(lambda: own.healthy, 30)  # it retries on its own
    assert list(own.answer("Who?", 1.0))[-1].trajectory.answer == "Ada Lovelace"
    own.close()


def test_a_failed_initial_search_is_no_answer(sampler, tiny_tokenizer, params):
    """Without its initial passages, a question gets an error and no answer."""
    service = Breaking()
    short = {"Who?": ["<answer>A</answer>"]}
    own = scripted(sampler, tiny_tokenizer, params, short, service, every=64, initial_search=True)
    events = list(own.answer("Who?", 1.0))
    assert [event.kind for event in events] == ["error"], events
    service.broken = lambda query: False
    wait_until(lambda: own.healthy, 30)
    assert list(own.answer("Who?", 1.0))[-1].trajectory.answer == "A"
    own.close()


def test_one_refused_query_ends_one_answer(sampler, tiny_tokenizer, params):
    """A query that the retriever refuses fails its own question only."""
    service = Breaking()
    service.broken = lambda query: "bad" in query
    bad = SEARCH.replace("Alan Turing born", "bad")
    own = scripted(sampler, tiny_tokenizer, params, {"Who?": [SEARCH, ANSWER], "Bad?": [bad, ANSWER]}, service)
    streams = {text: [] for text in ("Bad?", "Who?")}
    for text, events in streams.items():
        own.ask(text, events.append, 1.0)
    wait_until(lambda: all(e and e[-1].kind in ("end", "error") for e in streams.values()), 60)
    assert streams["Bad?"][-1].kind == "error" and streams["Who?"][-1].trajectory.answer == "Ada Lovelace"
    assert own.healthy
    own.close()


def test_a_listener_that_fails_is_one_who_has_left(sampler, tiny_tokenizer, params):
    """A callback that raises ends the events of its own question only."""
    own = scripted(sampler, tiny_tokenizer, params, {"Who?": [SEARCH, ANSWER], "What?": [SEARCH, ANSWER]})

    def deaf(event):
        raise RuntimeError("the loop is closed")

    own.ask("What?", deaf, 1.0)
    assert list(own.answer("Who?", 1.0))[-1].kind == "end" and own._thread.is_alive()
    own.close()


def test_a_question_that_is_too_long_is_refused_and_the_end_told_to_those_who_wait(sampler, tiny_tokenizer, params):
    """A question that does not fit is refused, and after `close` every question gets an error."""
    own = scripted(sampler, tiny_tokenizer, params, {"Who?": [SEARCH, ANSWER]})
    with pytest.raises(UserError, match="found .* tokens .* at most 48"):
        own.answer("Who is older? " * 40)
    for text, temperature in (("\ud800", 0.0), (" ", 0.0), ("Who?", float("nan")), ("Who?", 3.0), ("Who?", -1.0)):
        with pytest.raises(UserError, match="question|temperature"):
            own.ask(text, print, temperature)
    own.close()
    events = []
    own.ask("Who?", events.append)
    assert [e.kind for e in events] == ["error"] and not own.healthy


def test_an_answer_rests_on_passages_that_hold_all_of_it():
    """Only passages with all words of the answer support it."""
    ada = Passage("2", "The Ada", "x")
    found, shown = (Passage("1", "", "Adam spoke."), ada, ada), ("Adam spoke.", "(The Ada) x", "(The Ada) x")
    turn = Turn(SEARCH, "search", True, ("Ada",), (found,), n_sampled=9, shown=(shown,))
    assert find_support([turn], ["Ada"]) == [ada] and find_support([turn], [" "]) == []
    assert find_support([replace(turn, shown=(shown[:1],))], ["Ada"]) == []  # not shown
