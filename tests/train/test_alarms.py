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
