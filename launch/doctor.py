"""Looks at all that a run needs before it starts: one line for each thing, with how to mend it.

    python launch/doctor.py --config=configs/qwen7b.py --config.data.source=train.jsonl \
        --config.retrieval.index=index --workdir=runs/qwen7b

Takes what launch/train.py takes; on several hosts it looks at each where it is started. Exit code 2 when something has
to be mended.
"""

from absl import flags
from ml_collections import config_flags

from psearch_jax import launching
from psearch_jax.types import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "The run: a file like configs/qwen7b.py.", lock_config=False)
WORKDIR = flags.DEFINE_string("workdir", "runs/run", "The directory of the run.")
flags.mark_flag_as_required("config")


def main(_: list[str]) -> None:
    launching.configure_jax()
    from psearch_jax.config import from_mapping
    from psearch_jax.doctor import examine

    config, wrong = from_mapping(CONFIG.value.to_dict()), 0
    for finding in examine(config, WORKDIR.value):
        wrong += finding.wrong
        print(finding, flush=True)
    if wrong:
        raise UserError(f"{wrong} to mend")


if __name__ == "__main__":
    launching.run(main)
