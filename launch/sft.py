"""Supervised fine-tuning of a policy, before reinforcement learning or instead of it.

    python launch/sft.py --config=configs/qwen0p5b_cpu.py --config.model.path=MODEL --transcripts=FILE --workdir=DIR

FILE contains rollouts written by a run or by launch/sample.py, or transcripts (docs/sft.md). The config defines model,
adapters, mesh, lengths and prompt; its section `sft` is the recipe. DIR is a run directory for launch/eval.py, ask.py
and export_hf.py. DIR/policy is the result in Hugging Face format; launch/train.py starts from it with
--config.model.path=DIR/policy. The same command resumes.
"""

from dataclasses import replace

from absl import flags
from ml_collections import config_flags

from psearch_jax.runtime import cli

CONFIG = config_flags.DEFINE_config_file("config", None, "A run such as configs/qwen0p5b_cpu.py.")
WORKDIR = flags.DEFINE_string("workdir", None, "The run directory: created if absent, otherwise resumed.")
TRANSCRIPTS = flags.DEFINE_string("transcripts", None, "jsonl files of rollouts or transcripts, separated by commas.")
CHANGES = flags.DEFINE_bool("allow_changes", False, "Resume even if settings that affect the numbers changed.")
LOG = flags.DEFINE_string("log", "", "Log the metrics also to wandb:PROJECT or trackio:PROJECT.")
cli.process_flags()
cli.require("config", "workdir", "transcripts")


def main(_: list[str]) -> None:
    from psearch_jax.assembly import build_sft
    from psearch_jax.config import from_mapping
    from psearch_jax.runtime import processes
    from psearch_jax.runtime.metrics import load_log
    from psearch_jax.runtime.paths import check_new, on_disk
    from psearch_jax.sft import trainer
    from psearch_jax.sft.export import write_policy
    from psearch_jax.train.checkpointing.preemption import Interrupted, StopRequest
    from psearch_jax.train.checkpointing.run_config import make_export_files

    workdir = on_disk(WORKDIR.value, "--workdir")
    check_new(workdir / "policy", "a --workdir without a policy")
    cli.configure_jax()
    if LOG.value:
        load_log(LOG.value)
    config, stop = from_mapping(CONFIG.value.to_dict()), StopRequest()
    run = replace(build_sft.supervised_run(config, TRANSCRIPTS.value), stop=stop)
    try:
        summary = trainer.train(run, workdir, CHANGES.value, LOG.value)
    except Interrupted as interrupted:
        cli.end_stopped(str(interrupted), stop.by_user)
    losses = " -> ".join(f"{loss:.3f}" for loss in summary["validation_loss"].values())
    held_out = f", loss on held-out transcripts {losses}" if losses else ""
    if processes.first():
        print(f"{summary['steps']} steps, {summary['epochs']} epochs, in {summary['wall_s']:.0f} s{held_out}")
    del run  # and with it the weights on the devices
    write_policy(workdir, make_export_files(config))


if __name__ == "__main__":
    cli.run(main)
