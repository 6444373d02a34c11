"""What a run says about each of its steps."""

import io
import logging

from tqdm import tqdm

from psearch_jax.train.monitoring.records import report


def metrics(answered: float) -> dict[str, float]:
    return {
        "reward": 0.5,
        "status/answered": answered,
        "status/not_finite": 0.0,
        "em/parallel": 0.5,
        "split/parallel": 1,
    }


def test_every_step_stays_on_the_terminal_and_few_answers_are_noticed(capsys, caplog):
    """A line per step above the bar, and a warning in each of the first three steps with few answers."""
    with caplog.at_level(logging.WARNING, "psearch_jax"):
        for step, answered in enumerate((0.9, 0.2, 0.9, 0.2)):
            report(tqdm(total=4, file=io.StringIO()), step, metrics(answered), may_split=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("step")]
    assert [line[:19] for line in lines] == [f"step {step} reward 0.500" for step in range(4)]
    assert [record.message[:19] for record in caplog.records] == ["only 20.0% of the r"]
