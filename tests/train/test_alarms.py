"""Alarms: each fires on its own fault, none on a run that learns."""

import json

import pytest

from psearch_jax.train.monitoring.alarms import ALARM, NAMES, Alarms, read_rows

FINE = {
    "reward": 1.0,
    "split/sequential": 0.2,
    "searched_0": 0.02,
    "wrong_though_seen": 0.2,
    "entropy": 0.1,
    "logp_gap": 0.001,
    "effective_sample_size": 0.98,
}
BROKEN = {
    "reward": {"reward": 0.8},
    "over_splitting": {"split/sequential": 0.9},
    "no_search": {"searched_0": 0.6},
    "wrong_though_seen": {"wrong_though_seen": 0.8},
    "entropy": {"entropy": 1.4},
    "gap": {"logp_gap": 0.4},
    "sample_size": {"effective_sample_size": 0.2},
}


def active(alarms: Alarms, step: int, **changes) -> set[str]:
    alarm_metrics = alarms.update(step, FINE | changes)
    assert set(alarm_metrics) == {ALARM + name for name in NAMES}
    return {name for name in NAMES if alarm_metrics[ALARM + name]}


@pytest.mark.parametrize("name", NAMES)
def test_each_alarm_fires_on_its_own_fault_only(name, caplog):
    """It is logged once, when it starts, and stops when the fault is gone."""
    alarms = Alarms(window=4)
    assert not any(active(alarms, step) for step in range(8))
    after = [active(alarms, step, **BROKEN[name]) for step in range(8, 16)]
    assert after[-1] == {name} and set.union(*after) == {name}
    assert len([r for r in caplog.records if f"alarm {name}" in r.message]) == 1
    assert not [active(alarms, step) for step in range(16, 24)][-1]


def test_no_alarm_fires_on_a_run_that_learns():
    """Neither falling entropy nor one bad step is a fault."""
    alarms = Alarms(window=5)
    for step in range(60):
        x = step / 60
        metrics = {"entropy": 0.6 - 0.5 * x, "reward": 0.5 + x}
        worse = {"searched_0": 0.9, "wrong_though_seen": 0.9} if step == 30 else {}
        assert not active(alarms, step, **metrics, **worse)
    assert not active(Alarms(may_search=False, window=1), 0, searched_0=1.0)


def test_a_resumed_run_has_its_history(tmp_path, caplog):
    """It remembers the highest reward, and which alarms were already active."""
    rows = [FINE | {"step": step} for step in range(6)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    alarms = Alarms(rows=read_rows(file), window=3)
    assert [active(alarms, step, **BROKEN["reward"]) for step in range(6, 9)][-1] == {"reward"}
    again = Alarms(rows=[*rows, *[FINE | BROKEN["reward"]] * 4], window=3)
    caplog.clear()
    assert active(again, 10, **BROKEN["reward"]) == {"reward"} and not caplog.records
    assert read_rows(tmp_path / "nothing.jsonl") == []


def test_after_a_change_of_settings_alarms_start_anew():
    """A reward of another scale is no fall, neither in the resumed run nor in the next one."""
    before = [FINE | {"reward": 0.9}] * 20
    changed = [FINE | {"reward": 0.5, "settings_changed": 1.0}, *[FINE | {"reward": 0.5}] * 9]
    alarms = Alarms(rows=before, window=3)
    assert not any(any(alarms.update(20, row).values()) for row in changed)
    alarms = Alarms(rows=[*before, *changed], window=3)
    assert not any(alarms.update(30, FINE | {"reward": 0.5}).values())
    assert any(alarms.update(31 + n, FINE | {"reward": 0.0})["alarm/reward"] for n in range(3))
