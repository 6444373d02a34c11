"""Runs an experiment of experiments/ and prints its results.

    python launch/experiment.py baselines --policies=toy,runs/toy_sft-1/policy --seeds=0,1 --out=runs/results

Each run is recorded in OUT/NAME.json when its evaluation is done, and recorded runs are not repeated. So the same
command resumes, on any machine. `--only_tables` prints the recorded results. The controls in the tables
are those of `launch/bench.py world --json=docs/experiments/controls/world.json`.
"""

import importlib
import sys
from pathlib import Path

from absl import flags

from psearch_jax.runtime import cli
from psearch_jax.types import UserError

ROOT = Path(__file__).resolve().parent.parent
CONTROLS = ROOT / "docs" / "experiments" / "controls" / "world.json"  # written by launch/bench.py world --json
POLICIES = flags.DEFINE_list("policies", ["toy"], "Cold starts: toy, or policy directories made by launch/sft.py.")
SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds of the runs.")
STEPS = flags.DEFINE_integer("steps", 60, "Steps of every run.", lower_bound=1)
ARMS = flags.DEFINE_list("arms", [], "Arms to run; default: all.")
OUT = flags.DEFINE_string("out", "docs/experiments", "The directory of NAME.json.")
WORK = flags.DEFINE_string(
    "work", "runs/experiments", "The directory of the runs of all experiments, until they are recorded in NAME.json."
)
ONLY_TABLES = flags.DEFINE_bool("only_tables", False, "Print the recorded results without running anything.")
NOT_EXPERIMENTS = ("__init__", "running", "tables")


def main(argv: list[str]) -> None:
    sys.path.insert(0, str(ROOT))  # experiments/ is not part of the installed package
    names = sorted(p.stem for p in (ROOT / "experiments").glob("*.py") if p.stem not in NOT_EXPERIMENTS)
    if len(argv) != 2 or argv[1] not in names:
        raise UserError(f"{' '.join(argv[1:]) or 'no experiment'} found, accepted: one of {', '.join(names)}")
    if not SEEDS.value or not all(seed.isascii() and seed.isdigit() for seed in SEEDS.value):
        raise UserError(f"--seeds={','.join(SEEDS.value)}: found, accepted: integers separated by commas")
    name = argv[1]
    experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    from experiments import running, tables

    file = Path(OUT.value).resolve() / f"{name}.json"
    if ONLY_TABLES.value:
        record = running.read(file)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        work, seeds = Path(WORK.value).resolve(), [int(seed) for seed in SEEDS.value]
        record = running.run_all(experiment, file, work, POLICIES.value, seeds, STEPS.value, ARMS.value)
    print(tables.report(experiment, record, tables.controls_of(CONTROLS)), end="")


if __name__ == "__main__":
    cli.run(main, positional=True)
