"""The collector with a real tokenizer, sampler, boundary and retriever; only the sampled tokens come from a script."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import CompilationCounter
from flax import nnx
from helpers import (
    ScriptedSampler,
    make_collector,
    make_learner,
    make_sampler,
    one_device_mesh,
    question,
    random_params,
    retriever,
    rollout_section,
    scripted_sampler,
)
from written import CONFIG, collect, say

from psearch_jax.models import decoder
from psearch_jax.rl.batch import make_batch
from psearch_jax.rollout.scheduler import RolloutScheduler
from psearch_jax.rollout.stream import search_policy
from psearch_jax.text import tags
from psearch_jax.train.state import init_state
from retrieval.protocol import Passage, RetrievalError
from retrieval.service import RetrievalService

SEARCH = "<think> two people </think> <search> Ada Lovelace born ## Alan Turing born </search>"
ANSWER = "<think> done </think> <answer> Ada Lovelace </answer>"
ADA = "<search> Ada </search>"


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, seed=2)


@pytest.fixture(scope="module")
def sampler(tiny_tokenizer):
    return scripted_sampler(tiny_tokenizer, CONFIG)


@pytest.fixture(scope="module")
def service():
    return retriever()


@pytest.fixture(scope="module")
def write(tiny_tokenizer):
    """From texts and token ids to a script."""
    return functools.partial(say, tiny_tokenizer)


@pytest.fixture(scope="module")
def roll(tiny_tokenizer, sampler, params, service):
    """From scripts to checked trajectories."""

    def roll(scripts, rollout=None, service=service, params=params, sampler=sampler, **options):
        return collect(sampler, tiny_tokenizer, params, scripts, rollout, service, **options)

    return roll


def control(tokenizer, *names) -> list[int]:
    return [tokenizer.hf.convert_tokens_to_ids(f"<|{name}|>") for name in names]


class Counting:
    """The real service, with every call recorded."""

    def __init__(self, service):
        self.service, self.calls = service, []

    def search(self, queries, k):
        self.calls.append(list(queries))
        return self.service.search(queries, k)


def test_a_two_query_search_then_an_answer(tiny_tokenizer, write, roll, service):
    """Both sub-queries are searched in one batch, both passages are shown, and the answer is parsed."""
    counting, script = Counting(service), write(SEARCH, ANSWER, *control(tiny_tokenizer, "im_end"))
    (t,) = roll([script], service=counting)
    assert t.status == "answered" and t.answer == "Ada Lovelace" and t.well_formed and t.decomposed
    assert t.model_calls == 2 and t.ids[t.mask].tolist() == script
    assert t.turns[0].queries == ("Ada Lovelace born", "Alan Turing born")
    assert [p[0].title for p in t.turns[0].passages] == ["Ada Lovelace", "Alan Turing"]
    assert counting.calls == [["Ada Lovelace born", "Alan Turing born"]]
    text = tiny_tokenizer.decode(t.ids, control=True)
    assert text.startswith("<|im_start|>user\nWho is older?<|im_end|>") and text.endswith(ANSWER + "<|im_end|>")
    between = text[text.index(SEARCH) + len(SEARCH) : text.index(ANSWER)]
    assert between.startswith("\n<information>\n") and between.endswith("</information>\n")
    assert "Ada Lovelace was born in 1815." in between and "Alan Turing" in between


def test_half_a_surrogate_pair_in_a_passage(write, roll):
    """A title that is valid in JSON but not in UTF-8 is replaced, so that the rollout can be written."""
    odd = [Passage("1\ud83d", "Ada Lovelace \ud83d", "Ada Lovelace was \udc00 born in 1815.")]
    (t,) = roll([write("<search> Ada Lovelace </search>")], service=RetrievalService.from_corpus(odd))
    ((passage,),) = t.turns[0].passages
    assert (passage.id, passage.title, passage.text) == ("1?", "Ada Lovelace ?", "Ada Lovelace was ? born in 1815.")


def test_a_retriever_with_another_number_of_rankings(write, roll, service):
    """A retriever that drops a ranking is refused: passages would shift to other queries."""

    class Wrong(Counting):
        def search(self, queries, k):
            return super().search(queries, k)[:-1]

    with pytest.raises(RetrievalError, match="returned 1 rankings for 2 queries"):
        roll([write(SEARCH, ANSWER)], service=Wrong(service))


def test_one_query_per_search(tiny_tokenizer, write, sampler, params, service):
    """With max_sub_queries=1, the queries after a `##` are not run, and the search does not count as split."""
    counting, asked = Counting(service), question(0)
    sampler.give(0, 0, [(asked, 0)], [write(SEARCH, ANSWER)])
    collector = make_collector(tiny_tokenizer, sampler, rollout_section(samples=1), counting, max_sub_queries=1)
    (t,) = collector.collect(sampler.weights(params), [asked], 1, seed=0, step=0, temperature=1.0)
    assert t.status == "answered" and not t.decomposed
    assert t.turns[0].queries == ("Ada Lovelace born",) and counting.calls == [["Ada Lovelace born"]]


def test_every_end_has_its_name(tiny_tokenizer, write, roll):
    """Each end has its status, and only searches that were run are counted."""
    im_end, eot = control(tiny_tokenizer, "im_end", "endoftext")
    query, word = "<think> a </think> <search> Alan Turing </search>", write("a")[0]
    scripts = [
        write(ANSWER, im_end),
        write(ANSWER, eot),
        write(ANSWER, *[word] * 9),  # no stop token; four of the nine tokens are kept
        write("<think> nothing </think>", im_end),
        write(query * 3),
        [word] * 200,  # two corrected turns, then the last one
        write(*[word] * 40, query, ANSWER, im_end),
    ]
    rollout = rollout_section(context_tokens=240)
    ts = roll(scripts, rollout)
    assert [t.status for t in ts] == ["answered"] * 3 + ["out_of_turns"] * 3 + ["answered"]
    assert [t.well_formed for t in ts] == [True, True, False, False, False, False, False]
    assert [t.answer for t in ts[:3]] == ["Ada Lovelace"] * 3 and ts[3].answer is None
    assert ts[2].mask.sum() == len(write(ANSWER)) + 4
    assert [len(turn.queries) for turn in ts[4].turns] == [1, 1, 0] and ts[4].turns[2].action == "search"
    assert len(ts[4].executed) == 2 and ts[4].model_calls == 3
    assert [turn.n_sampled for turn in ts[5].turns] == [40, 40, 40]
    corrective, at = write(tags.CORRECTIVE_MESSAGE)[: rollout.obs_tokens], ts[5].prompt_length + 40
    assert ts[5].ids[at : at + len(corrective)].tolist() == corrective and not ts[5].mask[at]
    assert ts[6].turns[1].queries == ("Alan Turing",)


def test_a_reply_without_an_action_is_corrected_in_the_next_message(tiny_tokenizer, write, roll):
    """A model that forgets its tags gets the correction as the next user message."""
    im_end, eot = control(tiny_tokenizer, "im_end", "endoftext")
    chat = f"<|im_start|>user\n{tags.CORRECTIVE_MESSAGE.strip()}<|im_end|>\n<|im_start|>assistant\n"
    scripts = [
        write("It was Ada.", im_end, ANSWER, im_end),
        write("It was Ada.", eot, SEARCH, ANSWER, im_end),
        write("Ada </answer>", im_end, ANSWER, im_end),  # never opened
        write(*["No.", im_end] * 3),
    ]
    ts = roll(scripts, rollout_section(context_tokens=400, obs_tokens=200))
    assert [t.status for t in ts] == ["answered"] * 3 + ["out_of_turns"]
    assert [t.model_calls for t in ts] == [2, 3, 2, 3] and not any(t.well_formed for t in ts)
    assert [len(t.executed) for t in ts] == [0, 1, 0, 0]
    for t, script, stop in zip(ts, scripts, ("im_end", "endoftext", "im_end", "im_end"), strict=True):
        assert f"<|{stop}|>\n{chat}" in tiny_tokenizer.decode(t.ids, control=True)
        assert t.ids[t.mask].tolist() == script[: int(t.mask.sum())]
        assert len(t.turns[0].text) < 20  # the stop token is not part of the text


def test_a_corrective_message_fits_the_observation_budget(tiny_tokenizer, write, roll):
    """A message is cut to the budget."""
    (im_end,) = control(tiny_tokenizer, "im_end")
    (t,) = roll([write("No.", im_end, ANSWER, im_end)], rollout_section(obs_tokens=40))
    assert t.status == "answered" and "<|im_end|>\n<|im_start|>assistant\n" in tiny_tokenizer.decode(t.ids, True)
    assert 10 < (~t.mask[t.prompt_length :]).sum() <= 40


def test_a_context_that_fills_up_ends_as_truncated(write, roll):
    """Neither sampled tokens nor passages exceed the context; passages that do not fit count as not shown."""
    scripts = [write("a") * 80, write(ADA, ANSWER)]
    (fits,) = roll(scripts[1:])
    limit = int(np.flatnonzero(fits.mask)[0] + fits.turns[0].n_sampled + 16)
    ts = roll(scripts, rollout_section(context_tokens=limit, prompt_tokens=fits.prompt_length, turn_tokens=60))
    for t in ts:
        assert t.status == "truncated" and t.answer is None and len(t.ids) <= limit
    assert fits.turns[0].seen and ts[1].turns[0].passages == fits.turns[0].passages and not ts[1].turns[0].shown


@pytest.mark.slow
def test_a_row_that_is_not_finite_is_counted_and_not_learned_from(tiny_tokenizer, write, roll, params):
    """A row with a NaN ends, changes no other row, and adds nothing to the gradient."""
    bad = 77  # a token whose embedding is NaN
    broken = decoder.with_values(params, jax.tree.map(jnp.copy, nnx.to_pure_dict(params)))
    broken["embedding"].set_value(broken["embedding"].get_value().at[bad].set(np.nan))
    rollout = rollout_section()
    scripts = [
        write(ANSWER),
        write("<search> Ada Lovelace </search>", "<think> so", bad, *[5] * 9),
        [bad, *[5] * 9],
        write(ANSWER, bad, 5),  # after an answer
        *[write(SEARCH, ANSWER)] * 4,
    ]
    ts = roll(scripts, rollout, params=broken)
    assert [t.status for t in ts] == ["answered", *["not_finite"] * 3, *["answered"] * 4]
    assert [t.answer for t in ts[:4]] == ["Ada Lovelace", None, None, None]
    assert [turn.action for turn in ts[1].turns] == ["search", "none"] and ts[1].ids[-1] == bad
    assert all(np.isfinite(t.logprobs).all() for t in ts)
    for a, b in zip(ts[4:], roll(scripts, rollout)[4:], strict=True):  # in the slots of rollouts that stopped
        np.testing.assert_array_equal(a.logprobs, b.logprobs)

    learner, optimizer = make_learner(tiny_tokenizer, CONFIG, rollout.context_tokens, micro_batch_rows=8)
    batch = make_batch(ts, np.linspace(-1, 1, 8), rollout.context_tokens)
    assert batch.length.tolist()[1:4] == [1, 1, 1] and not batch.mask[1:4].any()
    old = learner.score(broken, batch)
    assert np.isfinite(old).all()
    batch = dataclasses.replace(batch, old_logprobs=old, ref_logprobs=old)
    _, metrics = learner.update(init_state(broken, optimizer, one_device_mesh()), batch)
    assert metrics["skipped"] == 0 and np.isfinite(metrics["gradient_norm"]) and metrics["logp_gap"] < 1e-4


@pytest.mark.parametrize("initial_search", [False, True])
def test_a_question_that_fills_the_context_is_a_truncated_trajectory(write, roll, initial_search):
    """One overlong question takes no slot from the others."""
    questions = [question(0), question("long", "who " * 4000), question(1)]
    rollout = rollout_section(initial_search=initial_search)
    ts = roll([write(ANSWER), [], write(ANSWER)], rollout, questions=questions)
    assert [t.status for t in ts] == ["answered", "truncated", "answered"]
    assert ts[1].turns == () and ts[1].prompt_length == len(ts[1].ids) == rollout.prompt_tokens
    (only,) = roll([[]], rollout, questions=questions[1:2])
    assert only.status == "truncated"


def hostile_scripts(tokenizer) -> list[list[int]]:
    im_start, im_end, eot = control(tokenizer, "im_start", "im_end", "endoftext")
    byte = {piece[0]: i for i, piece in enumerate(tokenizer.token_bytes) if piece and len(piece) == 1}
    rng = np.random.default_rng(11)
    texts = [
        "</search></answer>",
        "<search> a <answer> b </search> c </answer>",
        "<search> ## ## </search>",
        "<answer> a <answer> b </answer>",
        "<search> a ## A ##  a </search>",
    ]
    scripts = [say(tokenizer, text, ANSWER) for text in texts]
    broken = [byte[b] for b in (0xFF, 0xC3, 0x28, 0xE4, 0xB8, 0xF0, 0x9F, 0x00)]
    scripts += [
        say(tokenizer, *broken, "<search> a", *broken, " </search>", ANSWER, byte[0xC3]),
        say(tokenizer, "<answer> a", *broken, "</answer>", *broken),
        say(tokenizer, "</sea", im_start, "rch>", "<search> a </sea", im_start, "rch> b </search>", ANSWER),
        say(tokenizer, "<answer> no </ans", im_start, "wer>", im_end),
        [im_end],
        [eot],
        [im_start] * 50,
        [byte[0xF0]] * 50,
    ]
    tag_names = ("<search>", "</search>", "<answer>", "</answer>", "<think>", "</think>", "##")
    pieces = [say(tokenizer, name) for name in tag_names]
    for _ in range(24):  # tags between random tokens
        script: list[int] = []
        while len(script) < 120:
            script += pieces[rng.integers(len(pieces))]
            script += rng.integers(0, tokenizer.size, rng.integers(0, 6)).tolist()
        scripts.append(script)
    return scripts


def test_no_model_output_raises_or_misaligns(tiny_tokenizer, roll):
    """Whatever the model writes, turns are parsed by the first closing tag, and tokens, mask and log-probs align."""
    ts = roll(hostile_scripts(tiny_tokenizer), rollout_section(context_tokens=240))
    assert ts[0].turns[0].action == "none"  # never opened
    assert ts[1].turns[0].queries == ("a <answer> b",)  # the first closing tag decides
    assert ts[2].turns[0].action == "none" and ts[2].answer == "Ada Lovelace"
    assert ts[3].answer == "b"
    assert ts[4].turns[0].queries == ("a",) and not ts[4].decomposed
    assert ts[8].status == "out_of_turns" and ts[8].answer is None  # a control token breaks the tag
    assert {t.status for t in ts} >= {"answered", "out_of_turns"}
    batch = make_batch(ts, np.ones(len(ts), np.float32), 240)
    for i, t in enumerate(ts):
        assert batch.length[i] == len(t.ids)
        np.testing.assert_array_equal(batch.mask[i, : len(t.ids)] > 0, t.mask)


def test_logprobs_of_multi_turn_trajectories_are_the_trainers(tiny_tokenizer, write, roll, params):
    """With passages, corrections and refilled slots, the trainer scores what the sampler sampled."""
    free = [-1] * 9
    scripts = [
        write(*free[: i % 7], SEARCH, *free, "<search> Kurt </search>", *free[: i % 5], ANSWER) for i in range(10)
    ]
    ts = roll(scripts, rollout_section(context_tokens=256), samples=2)
    assert sum(len(t.executed) for t in ts) >= 15
    learner, _ = make_learner(tiny_tokenizer, CONFIG, 256)
    batch = make_batch(ts, np.ones(len(ts), np.float32), 256)
    scores = learner.score(params, batch)
    for i, t in enumerate(ts):
        assert np.abs(scores[i, : len(t.ids)] - t.logprobs)[t.mask].max() <= 1e-4
        np.testing.assert_array_equal(batch.sampler_logprobs[i, : len(t.ids)], t.logprobs)


def drawing_scripts(write, n: int) -> list[list[int]]:
    """Mostly sampled tokens, with searches in between, so that rows park, yield and refill at different times."""
    search, answer = ("<search>", -1, -1, " Ada </search>"), ("<answer>", -1, "</answer>")
    return [write(*[-1] * (i % 6), *search, *[-1] * (i % 4 + 2), *answer) for i in range(n)]


def assert_same(a, b, exact: bool) -> None:
    assert a.status == b.status and [t.queries for t in a.turns] == [t.queries for t in b.turns]
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.mask, b.mask)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=0 if exact else 1e-5)
    assert [t.passages for t in a.turns] == [t.passages for t in b.turns]


@pytest.fixture(scope="module")
def reference_run(write, roll):
    """Twelve rollouts over four slots, which the runs below must reproduce."""
    return roll(drawing_scripts(write, 12), samples=2, one_bucket=True)


@pytest.fixture(scope="module")
def early(tiny_tokenizer):
    """A sampler that yields as soon as a quarter of the rows wait."""
    made = make_sampler(tiny_tokenizer, CONFIG, cls=ScriptedSampler, yield_share=0.25)
    (made.after,) = control(tiny_tokenizer, "im_end")
    return made


def test_slots_and_yields_change_no_trajectory(write, roll, reference_run, early):
    """The number of slots and of yields affects only speed."""
    scripts = drawing_scripts(write, 12)
    for other in (
        roll(scripts, rollout_section(slots=3), samples=2),
        roll(scripts, rollout_section(slots=12), samples=2, sampler=early),
    ):
        for a, b in zip(reference_run, other, strict=True):
            assert_same(a, b, exact=False)


def test_a_rollout_replayed_alone_is_bit_equal(write, roll, reference_run):
    """A rollout can be reproduced without the others of its batch; samples of a question differ."""
    scripts = drawing_scripts(write, 12)
    for i, one_bucket in ((0, True), (11, True), (5, False)):  # another width for the passages may round differently
        group = scripts[i - i % 2 : i - i % 2 + 2]
        ts = roll(group, samples=2, questions=[question(i // 2)], one_bucket=one_bucket)
        assert_same(ts[i % 2], reference_run[i], exact=one_bucket)
    assert len({tuple(t.ids[t.mask][:3]) for t in reference_run}) > 6


def test_rows_that_ended_at_a_search_do_not_hold_up_the_others(write, roll, early, monkeypatch):
    """A slot whose last turn was a search does not count as waiting: `generate` would return without end."""
    calls, generate = [], early.generate

    def bounded(*arguments, **options):
        calls.append(1)
        assert len(calls) < 60, "`generate` is called without end"
        return generate(*arguments, **options)

    monkeypatch.setattr(early, "generate", bounded)
    scripts = [*[write(ADA)] * 4, [write("a")[0]] * 20 + write(ANSWER)]
    ts = roll(scripts, rollout_section(search_turns=0, turn_tokens=80), sampler=early)
    assert [t.status for t in ts] == ["out_of_turns"] * 4 + ["answered"]


def test_the_initial_search_is_read_but_not_counted(tiny_tokenizer, write, roll, service):
    """The passages of the question itself come before the first sampled token; the model made no search."""
    asked, counting = [question(i, "Ada Lovelace ?") for i in range(6)], Counting(service)
    scripts = [write(ANSWER), write(SEARCH, ANSWER)] * 3
    ts = roll(scripts, rollout_section(initial_search=True), counting, questions=asked)
    assert counting.calls[0] == ["Ada Lovelace ?"] * 4
    for i, t in enumerate(ts):
        first = t.turns[0]
        assert first.n_sampled == 0 and first.queries == ("Ada Lovelace ?",)
        assert first.passages[0][0].title == "Ada Lovelace"
        assert len(t.executed) == i % 2 and t.model_calls == 1 + i % 2 and t.status == "answered"
        shown = tiny_tokenizer.decode(t.ids[t.prompt_length : np.flatnonzero(t.mask)[0]])
        assert "Ada Lovelace was born in 1815." in shown and shown.endswith("</information>\n")


def test_an_initial_search_that_does_not_fit_is_truncated(write, roll):
    """Passages that overflow the context end the rollout before the model samples a token."""
    (t,) = roll([write(ANSWER)], rollout_section(initial_search=True, context_tokens=25, prompt_tokens=24))
    assert t.status == "truncated" and not t.mask.any() and t.prompt_length < len(t.ids) <= 25


def test_nothing_compiles_after_the_warm_up(tiny_tokenizer, write, roll, params, service):
    """The warm-up compiles every width."""
    fresh = scripted_sampler(tiny_tokenizer, CONFIG)
    rollout = rollout_section(prompt_tokens=32, obs_tokens=32)  # two widths each
    make_collector(tiny_tokenizer, fresh, rollout, service).warm_up(fresh.weights(params))
    counter = CompilationCounter()
    texts = ("?", "Who is older, Ada or Alan?", "Was Kurt born in Brünn ?", "a b c d e f g h", "Ada Lovelace")
    for questions in (None, [question(f"q{i}", text) for i, text in enumerate(texts)]):
        roll(drawing_scripts(write, 10), rollout, sampler=fresh, samples=2, questions=questions)
    assert counter.count == 0


def test_dropped_rollouts_leave_nothing_behind(tiny_tokenizer, write, sampler, params, service):
    """A rollout that nobody waits for any more keeps neither its slot nor its prompt."""
    rollout, questions = rollout_section(samples=1, slots=2), [question(i) for i in range(6)]
    sampler.give(0, 0, [(q, 0) for q in questions], [write(SEARCH, ANSWER)] * 6)
    collector = make_collector(tiny_tokenizer, sampler, rollout, service)
    scheduler = RolloutScheduler(collector, search_policy(collector), samples=1, seed=0)
    scheduler.resume(sampler.weights(params))
    scheduler.add(questions, [collector.render(q) for q in questions], step=0)
    for order in (0, 3, 5):  # one of them has a slot when it is dropped
        assert order or scheduler.refill()
        scheduler.drop(order)
    while scheduler.refill():
        assert not {live.order for live in scheduler.live.values()} & {0, 3, 5}
        scheduler.decode(1.0, 2)
        scheduler.advance_stopped_rows()
    assert sorted(scheduler.results) == [1, 2, 4] and all(t.status == "answered" for t in scheduler.results.values())
    assert not scheduler.waiting and not scheduler._dropped and not scheduler.live
