"""The cold starts of the toy policies that ship with the package, from a checkout:

    python -m experiments.toy --workdir=runs/toy

writes `runs/toy/policy`, a Hugging Face directory; psearch_jax/assets/toy_policy is a copy of it, and
psearch_jax/assets/toy_tools_policy one of `--config.dialect=tool_calls --config.steps=4000`. The same command resumes
an interrupted run. `--config.seed=1` makes another cold start, with other rows and, with tags, other initial weights.
cold_start.py has all fields.
"""

from dataclasses import asdict

from absl import flags
from ml_collections import ConfigDict, config_flags

from experiments.toy.cold_start import ToySFTConfig, make_rows, make_run
from experiments.toy.tokenizer import write_tokenizer
from psearch_jax.config import from_mapping
from psearch_jax.runtime import cli
from psearch_jax.runtime.paths import check_new, make_writable, on_disk
from psearch_jax.sft.export import write_policy
from psearch_jax.sft.trainer import train
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.checkpointing.preemption import Interrupted
from retrieval.service import RetrievalService

CONFIG = config_flags.DEFINE_config_dict("config", ConfigDict(asdict(ToySFTConfig())))
WORKDIR = flags.DEFINE_string("workdir", None, "The run directory: created if absent, otherwise resumed.")
cli.require("workdir")


def main(_: list[str]) -> None:
    config, workdir = from_mapping(CONFIG.value.to_dict(), ToySFTConfig), on_disk(WORKDIR.value, "--workdir")
    check_new(workdir / "policy", "a --workdir without a policy")
    cli.configure_jax()
    make_writable(workdir)
    write_tokenizer(workdir / "tokenizer", config.dialect)
    tokenizer = Tokenizer.load(workdir / "tokenizer")
    rows = make_rows(config, tokenizer, RetrievalService.from_corpus)
    for skill, members in rows.items():
        print(f"{skill}: {len(members)} rows, {sum(len(ids) for ids, _ in members) / 1e6:.2f}M tokens", flush=True)
    run = make_run(config, tokenizer, rows)
    try:
        train(run, workdir)
    except Interrupted as stop:
        cli.end_stopped(str(stop), run.stop.by_user)
    del run  # and its weights
    write_policy(workdir)


if __name__ == "__main__":
    cli.run(main)
