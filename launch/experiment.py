"""Runs an experiment of experiments/ and prints its results.

    python launch/experiment.py baselines --policies=toy,runs/toy-1/policy --seeds=0,1
    python launch/experiment.py baselines --only_tables --out=docs/experiments
    python launch/experiment.py real --data=DIR --policies=runs/cold_start/policy --steps=64

Each run is recorded in OUT/NAME.json when its evaluation is done, and recorded runs are not repeated, so the same
command resumes. `--only_tables` prints the recorded results. After --minutes, or at SIGTERM, the running training or
evaluation saves and ends.
"""

import importlib
import math
import signal
import sys
import time
from pathlib import Path

from absl import flags

from psearch_jax.runtime import cli
from psearch_jax.types import UserError

ROOT = Path(__file__).resolve().parent.parent
POLICIES = flags.DEFINE_list("policies", ["toy"], "Cold starts: toy, or directories of policies.")
SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds of the runs.")
STEPS = flags.DEFINE_integer("steps", 60, "Steps of every run.", lower_bound=1)
ARMS = flags.DEFINE_list("arms", [], "Arms to run; default: all.")
OUT = flags.DEFINE_string("out", "runs/results", "The directory of NAME.json.")
WORK = flags.DEFINE_string("work", "runs/experiments", "The directory of the runs of all experiments.")
DATA = flags.DEFINE_string("data", None, "real: a directory with train, test and index, as docs/data.md makes them.")
MINUTES = flags.DEFINE_float("minutes", 0.0, "Stop after this time; the same command resumes. 0: no limit.", 0.0)
DEVICE = flags.DEFINE_float("device_minutes", 0.0, "First spend up to this time on `launch/bench.py device`.", 0.0)
SET = flags.DEFINE_multi_string("set", [], "FIELD=VALUE: a config field for all arms, such as model.dtype=bfloat16.")
ONLY_TABLES = flags.DEFINE_bool("only_tables", False, "Print the recorded results without running anything.")
NAMES = ("baselines", "critical_path", "real")
cli.finite("minutes")
cli.finite("device_minutes")


def main(argv: list[str]) -> None:
    if len(argv) != 2 or argv[1] not in NAMES:
        raise UserError(f"{' '.join(argv[1:]) or 'no experiment'} found, accepted: one of {', '.join(NAMES)}")
    if not SEEDS.value or not all(seed.isascii() and seed.isdigit() for seed in SEEDS.value):
        raise UserError(f"--seeds={','.join(SEEDS.value)}: found, accepted: integers separated by commas")
    sys.path.insert(0, str(ROOT))  # experiments/ is not part of the installed package
    experiment = importlib.import_module(f"experiments.{argv[1]}").EXPERIMENT
    from experiments import running, tables

    if bad := [text for text in SET.value if "=" not in text]:
        raise UserError(f"--set={bad[0]}: found, accepted: FIELD=VALUE")
    file = Path(OUT.value).resolve() / f"{argv[1]}.json"
    if ONLY_TABLES.value:
        record = running.read_record(file)
    else:
        plan = running.Plan(
            experiment,
            file,
            Path(WORK.value).resolve(),
            STEPS.value,
            Path(DATA.value).resolve() if DATA.value else None,
            dict(text.split("=", 1) for text in SET.value),
            time.monotonic() + 60 * MINUTES.value if MINUTES.value else math.inf,
        )

        def stop(*_: object) -> None:
            raise running.Stopped

        signal.signal(signal.SIGTERM, stop)
        try:
            if DEVICE.value:
                running.measure_device(plan, DEVICE.value)
            record = running.run_all(plan, POLICIES.value, [int(seed) for seed in SEEDS.value], ARMS.value)
        except running.Stopped:
            cli.end_stopped(f"complete runs are in {file}; the same command resumes", by_user=False)
    print(tables.report(experiment, record), end="")


if __name__ == "__main__":
    cli.run(main, positional=True)
