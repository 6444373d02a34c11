"""The main loop: collect, reward, update, log, save. It evaluates before the first step and after the last.

A run directory holds config.json, metrics.jsonl, tensorboard/, trajectories/, checkpoints/, best/, summary.json.
Several processes share one directory: all save and restore the checkpoints; the first writes the other files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from psearch_jax.config import best_metric
from psearch_jax.eval.evaluate import questions_digest
from psearch_jax.runtime import processes
from psearch_jax.runtime.metrics import MetricsWriter, cut_jsonl
from psearch_jax.runtime.paths import locate, make_writable
from psearch_jax.train.checkpointing import settings
from psearch_jax.train.checkpointing.best import Best
from psearch_jax.train.checkpointing.checkpoint import Checkpoints, model_record
from psearch_jax.train.checkpointing.preemption import Interrupted, room_for_copy
from psearch_jax.train.critic import critic_learning
from psearch_jax.train.monitoring import validation
from psearch_jax.train.monitoring.alarms import Alarms, read_rows
from psearch_jax.train.monitoring.records import report, write_config, write_json, write_trajectories
from psearch_jax.train.run import Run
from psearch_jax.train.state import updates_per_step, warmup_updates, with_warmup
from psearch_jax.train.step import CRITIC, bad_in_a_row, first_nonfinite_param, train_step
from psearch_jax.types import UserError
from retrieval.protocol import RetrievalError

log = logging.getLogger("psearch_jax")


def train(run: Run, workdir: str | Path, allow_changes: bool = False) -> dict[str, Any]:
    """Trains until `train.steps`, resuming from the workdir's newest checkpoint; returns the summary it wrote.

    Args:
      allow_changes: resume even if settings that affect the results have changed.

    Raises:
      Interrupted: after SIGTERM, once the checkpoint is on disk.
      RetrievalError: the retriever stayed unreachable; raised once the last complete step is on disk.
      UserError: the settings differ from those of the run, too many updates in a row were not finite, or the run
        directory cannot be read or written.
    """
    try:
        with ExitStack() as closers:
            closers.enter_context(run.stop.heard())
            return _train(run, locate(workdir), closers, allow_changes)
    except OSError as error:
        if processes.lost(error):
            raise
        raise UserError(
            f"{error.filename or workdir}: cannot be written ({error.strerror or error}); the checkpoints of "
            f"{workdir} are complete; the same command resumes from the newest"
        ) from error


def _train(run: Run, workdir: Path, closers: ExitStack, allow_changes: bool) -> dict[str, Any]:
    config = run.config
    make_writable(workdir)  # fail now rather than at the first save
    started = time.monotonic()

    # ---- resume ----
    checkpoints = Checkpoints(workdir / "checkpoints", config.train.keep_checkpoints, config.train.keep_every_steps)
    closers.enter_context(closing(checkpoints))
    step, changed = 0, False
    if checkpoints.latest() is not None:
        step, changed = _resume(run, checkpoints, workdir, allow_changes)
    if processes.first():
        write_config(workdir, run.given, step)
        cut_jsonl(workdir / "metrics.jsonl", step)
        for file in (workdir / "trajectories").glob("*.jsonl"):
            if int(file.stem) >= step:
                file.unlink()
    rows = read_rows(workdir / "metrics.jsonl") if processes.first() else []  # only it truncates and writes the file
    alarms = Alarms(config.alarms, run.collector.retriever is not None, rows)
    writer = closers.enter_context(closing(MetricsWriter(workdir)))
    if updates_per_step(config) > 1 or run.critic is not None:
        run.keeps_copy = room_for_copy(run.state)
        if not run.keeps_copy:
            log.warning(
                "no host memory for a copy of the state: SIGTERM during updates loses the steps since the last "
                "checkpoint"
            )

    # ---- evaluate before ----
    run.stop.watch()()
    with run.phase("compile"):
        sampling = run.learner.sampling_copy(run.state.params)
        run.collector.warm_up(sampling)
        del sampling
        run.learner.warm_up(run.state.params, run.reference)
        if run.critic is not None:
            run.critic.warm_up(run.state.critic.params)
    run.stop.watch()()
    before = validation.measured_once(run, workdir / "before.json", fresh=step == 0)

    # ---- steps ----
    record = {"model": model_record(run.model), "tokenizer": run.tokenizer_path, "settings": run.settings}
    record |= {"lora": run.lora} if run.lora else {}
    best = None
    if config.eval.every_steps:
        # At step 0, any best checkpoint comes from a run that was killed before its first regular checkpoint.
        digest, until = questions_digest(run.evaluation), step if changed or step == 0 else None
        best = closers.enter_context(closing(Best(workdir, config.eval.best_metric, digest, until)))

    def save(step: int, loader: dict[str, Any]) -> None:
        with run.phase("checkpoint"):
            processes.together(writer.flush)
            checkpoints.save(step, run.state, {**record, "loader": loader})

    def offer(step: int, figures: Mapping[str, Mapping[str, float]]) -> None:
        kind, name = best_metric(config.eval.best_metric)
        with run.phase("checkpoint"):
            if best and best.offer(step, figures[kind][name], run.state.params, record):
                log.info("step %d has the best %s so far: %.4f", step, config.eval.best_metric, figures[kind][name])

    saved, minutes = time.monotonic(), config.train.checkpoint_every_minutes
    stopped: Exception | None = None
    bar = tqdm(total=config.train.steps, initial=step, unit="step", disable=not processes.on_terminal())
    while step < config.train.steps:
        loaded = run.loader.state()
        questions = next(run.loader)
        try:
            state, metrics, trajectories, rewards = train_step(run, questions, step)
        except (Interrupted, RetrievalError) as stop:
            # This step is discarded: save the state after the last step, with the loader before this step's batch.
            if step and checkpoints.latest() != step and run.has_state:
                save(step, loaded)
            checkpoints.wait()
            if isinstance(stop, Interrupted):
                kept = step if run.has_state else checkpoints.latest()
                raise Interrupted(f"saved after step {kept}" if kept else "nothing is saved yet") from None
            log.error("lost the retriever; saved after step %d, the same command resumes from there", step)
            raise
        run.state = state
        metrics |= alarms.look(step, metrics)
        if config.eval.every_steps and (step + 1) % config.eval.every_steps == 0 and step + 1 < config.train.steps:
            try:
                figures = validation.measured(run, config.eval.temperature)
                for kind, values in figures.items():
                    metrics |= {f"eval/{kind}/{name}": value for name, value in values.items()}
                offer(step + 1, figures)
            except (Interrupted, RetrievalError) as stop:  # the step is saved below without this evaluation
                stopped = stop
        writer.write(step, metrics)
        write_trajectories(workdir, step, trajectories, rewards, config.train.trajectories_per_step)
        report(bar, step, metrics)
        if (bad := bad_in_a_row(metrics)) >= config.learning.max_bad_steps:
            raise UserError(
                f"step {step}: loss or gradient was not finite in {bad} updates in a row, first in the gradient of "
                f"{first_nonfinite_param(run, metrics)}; lower its learning rate, or look at "
                f"{workdir}/trajectories/{step:06d}.jsonl"
            )
        if metrics["status/not_finite"] == 1:  # gradients do not show this: every rollout is masked
            raise UserError(
                f"step {step}: no rollout had finite logits; config.model.sampling_dtype="
                f"{config.model.sampling_dtype}, accepted: a dtype that the model's weights and activations fit into"
            )
        step += 1
        bar.update()
        asked = processes.together(lambda: (run.stop.arrived, (time.monotonic() - saved) / 60 >= minutes > 0))  # noqa: B023
        if any(arrived for arrived, _ in asked) and step < config.train.steps:
            stopped = stopped or Interrupted()
        late = asked[0][1]  # by the clock of the first process
        if step % config.train.checkpoint_every_steps == 0 or step == config.train.steps or late or stopped:
            save(step, run.loader.state())
            saved = time.monotonic()
        if stopped:
            raise Interrupted(f"saved after step {step}") if isinstance(stopped, Interrupted) else stopped
    bar.close()

    # ---- evaluate after ----
    after = validation.measured_once(run, workdir / "after.json", fresh=True)
    checkpoints.wait()
    if best:
        offer(step, after[""])
        best.wait()
    run.wall_s["total"] = time.monotonic() - started
    of_critic = {CRITIC + k: n for k, n in run.critic.compilations().items()} if run.critic is not None else {}
    summary = {
        "seed": config.seed,
        "steps": step,  # above train.steps if the resumed checkpoint is already past it
        "wall_s": {k: round(v, 2) for k, v in run.wall_s.items()},
        "compilations": {**run.collector.sampler.compilations(), **run.learner.compilations(), **of_critic},
        **({"best": best.record} if best else {}),
        "before": {},
        "after": {},
        **{f"before{suffix}": values for suffix, values in before.items()},
        **{f"after{suffix}": values for suffix, values in after.items()},
    }
    if processes.first():
        write_json(workdir / "summary.json", summary)
    return summary


def _resume(run: Run, checkpoints: Checkpoints, workdir: Path, allow_changes: bool) -> tuple[int, bool]:
    """Restores the newest complete checkpoint and the loader's position into the run.

    Returns:
      The checkpoint's step, and whether settings changed.
    """
    changes: dict[str, str] = {}

    def accept(loop: Mapping[str, Any]) -> None:
        changes.update(processes.agreed(lambda: settings.differences(loop.get("settings"), run.settings)))
        if "learning.algorithm" in changes:  # a critic can only be created at step 0
            raise UserError(
                f"{workdir}: learning.algorithm was {changes['learning.algorithm']}; accepted: the one that the run "
                "started with, or another --workdir"
            )
        if changes and not allow_changes:
            raise UserError(
                f"{workdir}: after step {loop['step']} this run would resume with other settings, "
                f"{settings.described(changes)}; accepted: the original settings, or --allow_changes"
            )

    run.fresh = None  # frees the initial weights before the checkpoint is loaded
    run.state, loop = checkpoints.restore(run.abstract, accept)
    step, config = int(loop["step"]), run.config
    log.info("resuming after step %d", step)
    if changes:
        log.warning("resuming with other settings: %s", settings.described(changes))
    total = updates_per_step(config) * config.train.steps
    if "learning.warmup_ratio" in changes:
        run.state = with_warmup(run.state, warmup_updates(config.learning, total))
    if "critic.warmup_ratio" in changes and run.state.critic is not None:
        critic = with_warmup(run.state.critic, warmup_updates(critic_learning(config), total))
        run.state = replace(run.state, critic=critic)
    try:
        run.loader.restore(loop["loader"])
    except UserError as error:
        if not changes:
            raise
        log.warning("the questions start from the beginning (%s)", error)
    return step, bool(changes)
