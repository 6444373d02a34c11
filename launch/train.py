"""Trains a policy to search: `python launch/train.py --config=configs/smoke.py --workdir=runs/smoke`.

The same command resumes. Any config field can be set, for example `--config.train.steps=10`. On resume, fields that
affect the run's numbers must be unchanged, unless `--allow_changes` accepts the changes.
"""

import sys

from absl import flags
from ml_collections import config_flags

from psearch_jax.runtime import cli

CONFIG = config_flags.DEFINE_config_file("config", None, "The run: a file like configs/smoke.py.", lock_config=False)
WORKDIR = flags.DEFINE_string("workdir", None, "The run directory: created if absent, otherwise resumed.")
CHANGES = flags.DEFINE_bool("allow_changes", False, "Resume even if settings that affect the numbers changed.")
STOPPED = flags.DEFINE_integer(
    "stopped_code",
    0,
    "Exit code after SIGTERM stopped the run; a Kubernetes Job takes 0 for complete.",
    0,
    255,
)
cli.process_flags()
flags.mark_flags_as_required(["config", "workdir"])


def main(_: list[str]) -> None:
    from psearch_jax.assembly import build
    from psearch_jax.config import from_mapping
    from psearch_jax.report import page, tables
    from psearch_jax.runtime import processes
    from psearch_jax.train import trainer

    config = from_mapping(CONFIG.value.to_dict())
    cli.configure_jax()
    run = build.training_run(config)
    try:
        summary = trainer.train(run, WORKDIR.value, CHANGES.value)
    except trainer.Interrupted as stop:
        print(f"interrupted: {stop}; the same command resumes")
        sys.exit(STOPPED.value)
    if not processes.first():
        return
    if summary["after"]:
        print(tables.before_and_after(summary))
    else:
        print("not evaluated: there are no validation questions (set --config.data.validation=FILE)")
    if summary.get("best"):
        print(
            "best: step {step}, {metric} {value:.4f}; launch/eval.py and export_hf.py use it with --best".format(
                **summary["best"]
            )
        )
    print(f"{summary['wall_s']['total']:.0f} s in total; summary, metrics and trajectories are in {WORKDIR.value}")
    page.offer_report(WORKDIR.value)


if __name__ == "__main__":
    cli.run(main)
