"""Checks everything that a run needs before it starts: one line per check, with how to fix a problem.

    python launch/doctor.py --config=configs/qwen7b.py --config.data.source=train.jsonl \
        --config.retrieval.index=index --workdir=runs/qwen7b

--config and --workdir are those of launch/train.py. It checks the host that it runs on: on several hosts, start it on
each. Exit code 2 means that something must be fixed.
"""

from absl import flags
from ml_collections import config_flags

from psearch_jax.runtime import cli
from psearch_jax.types import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "The run: a file like configs/qwen7b.py.", lock_config=False)
WORKDIR = flags.DEFINE_string("workdir", "runs/run", "The run directory.")
cli.require("config")


def main(_: list[str]) -> None:
    cli.configure_jax()
    from psearch_jax.config import from_mapping
    from psearch_jax.planning.doctor import examine

    config, wrong = from_mapping(CONFIG.value.to_dict()), 0
    for finding in examine(config, WORKDIR.value):
        wrong += finding.wrong
        print(finding, flush=True)
    if wrong:
        raise UserError(f"{wrong} to fix")


if __name__ == "__main__":
    cli.run(main)
