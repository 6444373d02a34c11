"""Trains a policy to search: `python launch/train.py --config=configs/smoke.py --workdir=runs/smoke`.

The same command resumes. Any config field can be set, for example `--config.train.steps=10`. On resume, fields that
affect the run's numbers must be unchanged, unless `--allow_changes` accepts the changes.
"""

from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from psearch_jax.config import Config, from_mapping
from psearch_jax.runtime import cli

CONFIG = config_flags.DEFINE_config_file("config", None, "The run: a file like configs/smoke.py.", lock_config=False)
WORKDIR = flags.DEFINE_string("workdir", None, "The run directory: created if absent, otherwise resumed.")
CHANGES = flags.DEFINE_bool("allow_changes", False, "Resume even if settings that affect the numbers changed.")
LOG = flags.DEFINE_string("log", "", "Log the metrics also to wandb:PROJECT or trackio:PROJECT.")
cli.process_flags()
cli.require("config", "workdir")


def main(_: list[str]) -> None:
    from psearch_jax.report import runs, tables
    from psearch_jax.runtime import metrics, processes

    cli.configure_jax()
    if LOG.value:
        metrics.load_log(LOG.value)
    config = from_mapping(CONFIG.value.to_dict())
    summary = processes.broadcast(lambda: runs.read_complete(WORKDIR.value, config))
    is_complete = summary is not None
    summary = summary or _train(config)
    if not processes.first():
        return
    if summary["after"]:
        print(tables.before_and_after(summary))
    elif not config.train.replay:
        closed_world = config.data.source == "closed_world"
        field = "eval.questions_per_kind above 0" if closed_world else "data.validation=FILE"
        print(f"not evaluated: there are no validation questions (set --config.{field})")
    if summary.get("best"):
        print(
            "best: step {step}, {metric} {value:.4f}; launch/eval.py and export_hf.py use it with --best".format(
                **summary["best"]
            )
        )
    seconds, files = summary["wall_s"]["total"], f"summary, metrics and trajectories are in {WORKDIR.value}"
    if is_complete and (Path(WORKDIR.value) / "report.html").is_file():
        print(f"complete after {summary['steps']} steps, nothing to do; {files}")
        return
    print(f"{seconds:.0f} s in this process; {files}")
    from psearch_jax.report import page  # slow to import

    page.offer_report(WORKDIR.value)


def _train(config: Config) -> dict[str, Any]:
    """Trains, and returns the summary."""
    from psearch_jax.assembly import build
    from psearch_jax.train import trainer

    run = build.training_run(config)
    try:
        return trainer.train(run, WORKDIR.value, CHANGES.value, LOG.value)
    except trainer.Interrupted as stop:
        cli.end_stopped(str(stop), run.stop.by_user)


if __name__ == "__main__":
    cli.run(main)
