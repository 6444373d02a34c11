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

from absl import flags
from ml_collections import config_flags

from psearch_jax.runtime import cli
from psearch_jax.train.checkpointing.preemption import Interrupted, StopRequest

CONFIG = config_flags.DEFINE_config_file("config", None, "A run such as configs/qwen0p5b_cpu.py, or toy_sft.py.")
WORKDIR = flags.DEFINE_string("workdir", None, "The run directory: created if absent, otherwise resumed.")
TRANSCRIPTS = flags.DEFINE_string("transcripts", "", "jsonl files of rollouts or transcripts, separated by commas.")
EXPORT = flags.DEFINE_bool("export", True, "Write DIR/policy at the end.")
CHANGES = flags.DEFINE_bool("allow_changes", False, "Resume even if settings that affect the numbers changed.")
cli.process_flags()
cli.require("config", "workdir")


def main(_: list[str]) -> None:
    from psearch_jax.runtime.paths import check_new, on_disk
    from psearch_jax.types import UserError

    values = CONFIG.value.to_dict()
    is_toy = "exercise_rows" in values
    if is_toy == bool(TRANSCRIPTS.value):
        problem = "found with configs/toy_sft.py, which makes its own" if is_toy else "none given"
        raise UserError(f"--transcripts: {problem}; accepted: a jsonl file with the config of a run")
    if is_toy and (CHANGES.value or not EXPORT.value):
        raise UserError("--allow_changes, --noexport: found with configs/toy_sft.py, accepted: neither of them")
    policy = on_disk(WORKDIR.value, "--workdir") / "policy"
    check_new(policy, "a --workdir without a policy")
    cli.configure_jax()
    stop = StopRequest()
    try:
        (_train_toy if is_toy else _train)(values, stop)
    except Interrupted as interrupted:
        cli.end_stopped(str(interrupted), stop.by_user)


def _train(values: dict, stop: StopRequest) -> None:
    import gc
    from pathlib import Path

    import jax

    from psearch_jax.assembly import build_sft
    from psearch_jax.config import from_mapping
    from psearch_jax.models.hf import save_hf
    from psearch_jax.runtime import processes
    from psearch_jax.sft import trainer
    from psearch_jax.text.tokenizer import Tokenizer
    from psearch_jax.train.checkpointing.checkpoint import load_params
    from psearch_jax.train.checkpointing.run_config import make_export_files, make_export_shape

    config = from_mapping(values)
    run = replace(build_sft.supervised_run(config, TRANSCRIPTS.value), stop=stop)
    summary = trainer.train(run, WORKDIR.value, CHANGES.value)
    if not processes.first():
        return
    losses = " -> ".join(f"{loss:.3f}" for loss in summary["validation_loss"].values())
    held_out = f", loss on held-out transcripts {losses}" if losses else ""
    print(f"{summary['steps']} steps on {summary['transcripts']} transcripts in {summary['wall_s']:.0f} s{held_out}")
    policy = Path(WORKDIR.value) / "policy"
    if EXPORT.value and jax.process_count() > 1:
        command = f"launch/export_hf.py --checkpoint={WORKDIR.value} --out={policy}"
        print(f"several processes; to write the policy: {command}")
    elif EXPORT.value:
        del run  # its weights are loaded again, in the host's memory: one device may be too small for all of them
        gc.collect()
        model, params, loop = load_params(WORKDIR.value)
        tokenizer = Tokenizer.load(loop["tokenizer"], model.eos_ids)
        shape = make_export_shape(model, tokenizer)
        save_hf(params, shape, tokenizer.directory, policy, lora=_lora(loop), files=make_export_files(config))
        print(f"{policy}: written")


def _lora(loop: dict) -> object:
    from psearch_jax.config import Lora

    record = loop.get("lora")
    return Lora(record["rank"], record["alpha"]) if record else None


def _train_toy(values: dict, stop: StopRequest) -> None:
    import dataclasses
    import json

    from psearch_jax.closed_world.toy_tokenizer import write_tokenizer
    from psearch_jax.config import from_mapping
    from psearch_jax.models.hf import save_hf
    from psearch_jax.runtime.metrics import MetricsWriter, cut_jsonl
    from psearch_jax.runtime.paths import make_writable, on_disk, write_atomically
    from psearch_jax.sft import cold_start
    from psearch_jax.text.tokenizer import Tokenizer
    from psearch_jax.train.checkpointing.checkpoint import newest_step
    from psearch_jax.types import UserError
    from retrieval.service import RetrievalService

    config = from_mapping(values, cold_start.ToySFTConfig)
    workdir = on_disk(WORKDIR.value, "--workdir")
    settings = workdir / "config.json"
    make_writable(workdir)
    text = json.dumps(dataclasses.asdict(config), indent=2) + "\n"
    trained = newest_step(workdir)
    if trained and settings.exists() and settings.read_text(encoding="utf-8") != text:
        raise UserError(
            f"{settings}: found settings that differ from --config, accepted: the same, or another --workdir"
        )
    write_atomically(settings, text)
    cut_jsonl(workdir / "metrics.jsonl", trained + 1)
    metrics = MetricsWriter(workdir)

    def log(step: int, values: dict[str, float]) -> None:
        metrics.write(step, values)
        print(f"step {step}  " + "  ".join(f"{name} {value:.4g}" for name, value in values.items()), flush=True)

    write_tokenizer(workdir / "tokenizer")
    tokenizer = Tokenizer.load(workdir / "tokenizer")
    rows = cold_start.make_rows(config, tokenizer, RetrievalService.from_corpus)
    for skill, members in rows.items():
        print(f"{skill}: {len(members)} rows, {sum(len(ids) for ids, _ in members) / 1e6:.2f}M tokens", flush=True)
    with stop.listen():
        shape, params = cold_start.train(
            config, tokenizer, rows, log, workdir / "checkpoints", str(workdir / "tokenizer"), stop
        )
    save_hf(params, shape, workdir / "tokenizer", workdir / "policy")
    metrics.close()
    print(f"{workdir / 'policy'}: written")


if __name__ == "__main__":
    cli.run(main)
