"""Alarms: each fires on its own fault, none on a run that learns. The probe with misleading passages."""

import json

import numpy as np
import pytest
from helpers import retriever
from runs import small_config

from psearch_jax.assembly import build
from psearch_jax.train.monitoring.alarms import _METRICS, ALARM, NAMES, Alarms, read_rows
from psearch_jax.train.monitoring.probe import Misled, probe
from psearch_jax.train.trainer import train_step

FINE = {
    "reward": 1.0,
    "split/sequential": 0.2,
    "searched_0": 0.02,
    "wrong_though_seen": 0.2,
    "logprob_of_correct": -0.05,
    "entropy": 0.1,
    "logp_gap": 0.001,
    "effective_sample_size": 0.98,
    "probe/em": 0.8,
    "probe/em_misled": 0.1,
}
BROKEN = {
    "reward": {"reward": 0.8},
    "over_splitting": {"split/sequential": 0.9},
    "no_search": {"searched_0": 0.6},
    "wrong_though_seen": {"wrong_though_seen": 0.8},
    "likelihood": {"logprob_of_correct": -0.6, "reward": 0.95},
    "entropy": {"entropy": 1.4},
    "gap": {"logp_gap": 0.4},
    "retriever": {"probe/em_misled": 0.79},
    "sample_size": {"effective_sample_size": 0.2},
}


def ringing(alarms: Alarms, step: int, **changes) -> set[str]:
    alarm_metrics = alarms.update(step, FINE | changes)
    assert set(alarm_metrics) == {ALARM + name for name in NAMES}
    return {name for name in NAMES if alarm_metrics[ALARM + name]}


def test_there_is_a_case_for_every_alarm():
    """Every alarm has a case in these tests."""
    assert set(BROKEN) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_each_alarm_rings_on_its_own_fault_and_stops_behind_it(name, caplog):
    """It is logged once, when it starts, and stops when the fault is gone."""
    alarms = Alarms(4)
    assert not any(ringing(alarms, step) for step in range(8))
    after = [ringing(alarms, step, **BROKEN[name]) for step in range(8, 16)]
    assert after[-1] == {name} and set.union(*after) == {name}
    assert len([r for r in caplog.records if f"alarm {name}" in r.message]) == 1, "logged once, when it starts"
    assert not [ringing(alarms, step) for step in range(16, 24)][-1]


def test_nothing_rings_on_a_run_that_learns():
    """Falling entropy, rising likelihood or one bad step would count as an alarm."""
    alarms = Alarms(5)
    for step in range(60):
        x = step / 60
        metrics = {"entropy": 0.6 - 0.5 * x, "logprob_of_correct": -0.4 + 0.3 * x, "reward": 0.5 + x}
        worse = {"searched_0": 0.9, "wrong_though_seen": 0.9} if step == 30 else {}
        assert not ringing(alarms, step, **metrics, **worse)


def test_a_likelihood_that_falls_while_the_reward_rises_is_no_alarm():
    """A policy that spreads over more correct rollouts gains reward: only a fall without a gain is a collapse."""
    alarms = Alarms(2)
    for step in range(20):
        assert not ringing(alarms, step, logprob_of_correct=-0.05 * step, reward=1 + 0.01 * step)


def test_a_run_that_goes_on_remembers_its_best_likelihood(tmp_path, caplog):
    """Without its history, a run resumed during its decline would take the declined likelihood as its best."""
    rows = [FINE | {"step": step} for step in range(6)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    alarms = Alarms(3, rows=read_rows(file))
    assert [ringing(alarms, step, **BROKEN["likelihood"]) for step in range(6, 9)][-1] == {"likelihood"}
    again = Alarms(3, rows=[*rows, *[FINE | BROKEN["likelihood"]] * 4])
    caplog.clear()
    assert ringing(again, 10, **BROKEN["likelihood"]) == {"likelihood"} and not caplog.records, "it was active before"
    fresh = Alarms(3, rows=read_rows(tmp_path / "nothing.jsonl"))
    assert not any(ringing(fresh, step, **BROKEN["likelihood"]) for step in range(6, 9))


def test_after_a_change_of_settings_alarms_start_anew(caplog):
    """A reward with smaller weights looks like a fall from the old one, at every step until the end of the run."""
    before = [FINE | {"reward": 0.9}] * 20
    changed = [FINE | {"reward": 0.5, "settings_changed": 1.0}, *[FINE | {"reward": 0.5}] * 9]
    alarms = Alarms(3, rows=before)
    for row in changed:
        assert not any(alarms.update(20, row).values()), "in the run that was resumed"
    alarms = Alarms(3, rows=[*before, *changed])
    assert not any(alarms.update(30, FINE | {"reward": 0.5}).values()), "and in the next one"
    assert any(alarms.update(31 + n, FINE | {"reward": 0.0})["alarm/reward"] for n in range(3)) and caplog.records


def test_without_a_retriever_nobody_is_told_to_search():
    """Method r1, which cannot search, would get an alarm at every step because it does not search."""
    alarms = Alarms(1, may_search=False)
    assert not ringing(alarms, 0, searched_0=1.0)


def test_a_misled_search_is_the_same_for_the_same_query_and_not_its_own():
    """A probe whose passages depend on the rest of the batch could not be reproduced. One that searches for the
    asker's own question would get the right passages, and a working retriever would look broken."""
    texts = ["Alan Turing", "Grace Hopper", "When was Ada Lovelace born?", "Kurt Gödel"]
    right, misled = retriever(), Misled(retriever(), texts)
    queries = [f"Ada Lovelace {i}" for i in range(30)] + [""]
    rankings = misled.search(queries, 1)
    assert rankings == [misled.search([q], 1)[0] for q in queries] and rankings[-1] == []
    assert all(p[0].title == "Ada Lovelace" for p in right.search(queries[:-1], 1))
    titles = [p[0].title for p in rankings[:-1]]
    assert "Ada Lovelace" not in titles and len(set(titles)) > 1
    assert Misled(retriever(), texts[2:3]).search(["Ada Lovelace"], 1) == [[]], (
        "the only text shares a word with the query: no passages"
    )


def test_the_probe_asks_the_steps_questions_with_the_steps_own_numbers(tiny_policy):
    """With the same passages, all tokens equal those of the step's rollouts."""
    run = build.training_run(small_config(tiny_policy, **{"alarms.probe_every_steps": 1}))
    run.begin()
    questions = next(run.loader)
    done = train_step(run, questions, 0)
    metrics, trajectories = done.metrics, done.rollouts.trajectories
    assert {"probe/em", "probe/em_misled"} <= metrics.keys() and metrics["probe_s"] > 0
    assert set(_METRICS) <= metrics.keys(), "an alarm that reads a metric of another name never fires"
    first = {t.question.id: t for t in reversed(trajectories)}
    run = build.training_run(small_config(tiny_policy))
    run.begin()
    seen = []
    collect = type(run.collector).collect

    def spied(self, *arguments, **keywords):
        if isinstance(self.retriever, Misled):
            self = self.with_retriever(run.collector.retriever)
        seen.extend(results := collect(self, *arguments, **keywords))
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run.collector), "collect", spied)
        results = probe(run, 0, trajectories)
    assert results["probe/em"] == results["probe/em_misled"]
    assert len(seen) == len(questions)
    for t in seen:
        np.testing.assert_array_equal(t.ids, first[t.question.id].ids)
