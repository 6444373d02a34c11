"""Metrics that are also logged to an experiment tracker."""

from contextlib import closing

import pytest

from psearch_jax.runtime.metrics import MetricsWriter, load_log
from psearch_jax.types import UserError


@pytest.mark.parametrize("log", ["wandb", "wandb:", "mlflow:mine"])
def test_an_unknown_tracker_is_refused(log):
    """One line names the flag and what is accepted."""
    with pytest.raises(UserError, match=f"--log={log}: accepted: wandb:PROJECT or trackio:PROJECT"):
        load_log(log)


def test_a_tracker_that_is_not_installed_is_named(monkeypatch):
    """The line says what to install."""
    monkeypatch.setitem(__import__("sys").modules, "trackio", None)
    with pytest.raises(UserError, match="pip install trackio"):
        load_log("trackio:mine")


def test_every_step_is_logged_to_wandb(tmp_path, monkeypatch):
    """The numbers of a row reach the tracker at their step, values that are not finite do not."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    with closing(MetricsWriter(tmp_path / "run", log="wandb:mine", config={"seed": 3})) as writer:
        writer.write(7, {"reward": 0.5, "entropy": float("nan")})
        run = wandb.run
        assert (run.name, run.project, run.step, dict(run.config)) == ("run", "mine", 7, {"seed": 3})
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"reward" in file.read_bytes() and b"entropy" not in file.read_bytes()
