"""Supervised fine-tuning of a policy, before reinforcement learning or instead of it.

    python launch/sft.py --config=configs/qwen0p5b_cpu.py --config.model.path=MODEL --transcripts=FILE --workdir=DIR
    python launch/sft.py --config=configs/toy_sft.py --workdir=DIR

FILE contains rollouts written by a run or by launch/sample.py, or transcripts (docs/sft.md). The config defines model,
adapters, mesh, lengths and prompt; its section `sft` is the recipe. DIR is a run directory for launch/eval.py, ask.py
and export_hf.py. DIR/policy is the result in Hugging Face format; launch/train.py starts from it with
--config.model.path=DIR/policy.

configs/toy_sft.py trains the toy policy on exercises and scripted trajectories that the program generates; of its DIR,
the other programs take only DIR/policy. The same command resumes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

from psearch_jax.runtime import cli
from psearch_jax.train.checkpointing.preemption import Interrupted, StopRequest

CONFIG = config_flags.DEFINE_config_file("config", None, "A run such as configs/qwen0p5b_cpu.py, or toy_sft.py.")
WORKDIR = flags.DEFINE_string("workdir", None, "The run directory: created if absent, otherwise resumed.")
TRANSCRIPTS = flags.DEFINE_string("transcripts", "", "jsonl files of rollouts or transcripts, separated by commas.")
EXPORT = flags.DEFINE_bool("export", True, "Write DIR/policy at the end.")
CHANGES = flags.DEFINE_bool("allow_changes", False, "Resume even if settings that affect the numbers changed.")
LOG = flags.DEFINE_string("log", "", "Log the metrics also to wandb:PROJECT or trackio:PROJECT.")
cli.process_flags()
cli.require("config", "workdir")


def main(_: list[str]) -> None:
    from psearch_jax.runtime.metrics import load_log
    from psearch_jax.runtime.paths import check_new, on_disk
    from psearch_jax.types import UserError

    values = CONFIG.value.to_dict()
    is_toy = "exercise_rows" in values
    if is_toy == bool(TRANSCRIPTS.value):
        problem = "found with configs/toy_sft.py, which makes its own" if is_toy else "none given"
        raise UserError(f"--transcripts: {problem}; accepted: a jsonl file with the config of a run")
    workdir = on_disk(WORKDIR.value, "--workdir")
    check_new(workdir / "policy", "a --workdir without a policy")
    cli.configure_jax()
    if LOG.value:
        load_log(LOG.value)
    stop = StopRequest()
    try:
        files = (_train_toy if is_toy else _train)(values, workdir, stop)
    except Interrupted as interrupted:
        cli.end_stopped(str(interrupted), stop.by_user)
    if EXPORT.value:
        _export(workdir, files)


def _train(values: dict[str, Any], workdir: Path, stop: StopRequest) -> dict[str, bytes]:
    """Trains on transcripts; returns the files that an export adds."""
    from psearch_jax.assembly import build_sft
    from psearch_jax.config import from_mapping
    from psearch_jax.runtime import processes
    from psearch_jax.sft import trainer
    from psearch_jax.train.checkpointing.run_config import make_export_files

    config = from_mapping(values)
    run = replace(build_sft.supervised_run(config, TRANSCRIPTS.value), stop=stop)
    summary = trainer.train(run, workdir, CHANGES.value, LOG.value)
    losses = " -> ".join(f"{loss:.3f}" for loss in summary["validation_loss"].values())
    held_out = f", loss on held-out transcripts {losses}" if losses else ""
    if processes.first():
        print(f"{summary['steps']} steps, {summary['epochs']} epochs, in {summary['wall_s']:.0f} s{held_out}")
    return make_export_files(config)


def _train_toy(values: dict[str, Any], workdir: Path, stop: StopRequest) -> dict[str, bytes]:
    """Trains the toy policy; as `_train`."""
    from psearch_jax.closed_world.toy_tokenizer import write_tokenizer
    from psearch_jax.config import from_mapping
    from psearch_jax.runtime.paths import make_writable
    from psearch_jax.sft import cold_start, trainer
    from psearch_jax.text.tokenizer import Tokenizer
    from retrieval.service import RetrievalService

    config = from_mapping(values, cold_start.ToySFTConfig)
    make_writable(workdir)
    write_tokenizer(workdir / "tokenizer", config.dialect)
    tokenizer = Tokenizer.load(workdir / "tokenizer")
    rows = cold_start.make_rows(config, tokenizer, RetrievalService.from_corpus)
    for skill, members in rows.items():
        print(f"{skill}: {len(members)} rows, {sum(len(ids) for ids, _ in members) / 1e6:.2f}M tokens", flush=True)
    run = replace(cold_start.make_run(config, tokenizer, rows), stop=stop)
    trainer.train(run, workdir, CHANGES.value, LOG.value)
    return {}


def _export(workdir: Path, files: dict[str, bytes]) -> None:
    """Writes the policy, from the run's last checkpoint and in the host's memory: one device may be too small."""
    import gc

    import jax

    from psearch_jax.config import Lora
    from psearch_jax.models.hf import save_hf
    from psearch_jax.runtime import processes
    from psearch_jax.text.tokenizer import Tokenizer
    from psearch_jax.train.checkpointing.checkpoint import load_params
    from psearch_jax.train.checkpointing.run_config import make_export_shape

    policy = workdir / "policy"
    if not processes.first():
        return
    if jax.process_count() > 1:
        print(f"several processes; to write the policy: launch/export_hf.py --checkpoint={workdir} --out={policy}")
        return
    gc.collect()  # frees the run's weights
    model, params, loop = load_params(workdir)
    tokenizer, lora = Tokenizer.load(loop["tokenizer"], model.eos_ids), loop.get("lora")
    adapters = Lora(lora["rank"], lora["alpha"]) if lora else None
    save_hf(params, make_export_shape(model, tokenizer), tokenizer.directory, policy, lora=adapters, files=files)
    print(f"{policy}: written")


if __name__ == "__main__":
    cli.run(main)
