"""A supervised fine-tuning run in its directory: resume, loss on held-out transcripts, metrics, checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from psearch_jax.config import Config
from psearch_jax.data.transcripts import Row
from psearch_jax.runtime import processes
from psearch_jax.runtime.metrics import MetricsWriter, cut_jsonl
from psearch_jax.runtime.paths import locate, make_writable, read_json
from psearch_jax.sft.loop import FitOptions, RowBatches, SupervisedTrainer, fit
from psearch_jax.train.checkpointing import settings
from psearch_jax.train.checkpointing.checkpoint import Checkpoints
from psearch_jax.train.checkpointing.preemption import StopRequest
from psearch_jax.train.monitoring.alarms import read_rows
from psearch_jax.train.monitoring.records import write_config, write_json
from psearch_jax.train.state import TrainState

log = logging.getLogger("psearch_jax")


@dataclass
class SupervisedRun:
    """The parts of a supervised run, made by build.py."""

    config: Config
    user_config: Config  # as the user set it, without the changes of the method; recorded in config.json
    trainer: SupervisedTrainer
    batches: RowBatches
    held_out: Sequence[Row]  # transcripts whose loss is logged and which are not trained on
    abstract: TrainState  # the state as ShapeDtypeStructs with shardings
    initial_state: Callable[[], TrainState] | None  # makes the state of step 0, once
    steps: int
    tokenizer_path: str
    record: Mapping[str, Any]  # what every checkpoint records about the model, the adapters and the settings
    stop: StopRequest = field(default_factory=StopRequest)


def train(run: SupervisedRun, workdir: str | Path, allow_changes: bool = False) -> dict[str, Any]:
    """Trains to the end, resuming from the workdir's newest checkpoint, and returns the summary it wrote.

    Args:
      allow_changes: resume even if settings that affect the results have changed.

    Raises:
      Interrupted: after SIGTERM or Ctrl-C, once the checkpoint is on disk.
      UserError: the settings or transcripts differ from those of the run, or as `fit`.
    """
    workdir, config = locate(workdir), run.config
    make_writable(workdir)
    started, epoch = time.monotonic(), run.batches.steps_per_epoch
    with ExitStack() as closers:
        closers.enter_context(run.stop.listen())
        checkpoints = Checkpoints(workdir / "checkpoints", config.train.keep_checkpoints)
        closers.enter_context(closing(checkpoints))
        step, state = _resume(run, checkpoints, workdir, allow_changes)
        if processes.first():
            write_config(workdir, run.user_config, step)
            # Without a checkpoint, also what another start measured at step 0.
            cut_jsonl(workdir / "metrics.jsonl", step + 1 if step else 0)
        if step == run.steps and (known := _known_summary(workdir)):  # nothing left to do
            return known
        writer = closers.enter_context(closing(MetricsWriter(workdir)))
        bar = closers.enter_context(
            tqdm(total=run.steps, initial=step, unit="step", disable=not processes.on_terminal())
        )
        validation = _validation(workdir)

        def measure(done: int, state: TrainState) -> None:
            if run.held_out:
                validation[done] = run.trainer.mean_loss(state.params, run.held_out)
                writer.write(done, {"validation/loss": validation[done]})
                log.info("step %d: validation loss %.4f", done, validation[done])

        def log_metrics(done: int, values: dict[str, float]) -> None:
            writer.write(done, values)
            text = f"loss {values['loss']:.4f} {values['tokens_per_s']:.0f} tokens/s"
            if bar.disable:
                log.info("step %d of %d %s", done, run.steps, text)
            else:
                bar.set_postfix_str(text)
                bar.update(done - bar.n)

        record = {**run.record, "tokenizer": run.tokenizer_path}
        record = {name: value for name, value in record.items() if value is not None}
        if step % epoch == 0 and step not in validation:  # step 0, or killed before this was measured
            measure(step, state)
        while step < run.steps:  # one epoch at a time, to measure the held-out loss in between
            end = min(run.steps, (step // epoch + 1) * epoch)
            options = FitOptions(
                end,
                all_steps=run.steps,
                checkpoint_every_steps=config.train.checkpoint_every_steps,
                record=record,
            )
            state = fit(run.trainer, state, run.batches, options, log_metrics, checkpoints, run.stop, step)
            step = end
            measure(step, state)
        summary = {
            "steps": run.steps,
            "epochs": config.sft.epochs,
            "transcripts": run.batches.rows,
            "wall_s": round(time.monotonic() - started, 2),
            "validation_loss": {str(done): round(loss, 6) for done, loss in validation.items()},
        }
        if processes.first():
            write_json(workdir / "summary.json", summary)
        return summary


def _validation(workdir: Path) -> dict[int, float]:
    """The losses on held-out transcripts that the run has measured, by step."""

    def read() -> dict[int, float]:
        name = "validation/loss"
        return {row["step"]: row[name] for row in read_rows(workdir / "metrics.jsonl") if row.get(name) is not None}

    return processes.broadcast(read)


def _known_summary(workdir: Path) -> dict[str, Any]:
    """The summary of a run that has ended; {} if there is none."""
    file = workdir / "summary.json"
    return processes.broadcast(lambda: read_json(file) if file.is_file() else {})


def _resume(
    run: SupervisedRun, checkpoints: Checkpoints, workdir: Path, allow_changes: bool
) -> tuple[int, TrainState]:
    """The steps taken and the state after them, from the newest checkpoint or at step 0."""

    def accept(loop: Mapping[str, Any]) -> None:
        settings.check_changes(loop, run.record["settings"], workdir, allow_changes)

    make, run.initial_state = run.initial_state, None  # it holds the weights that the state is made from
    assert make is not None, "a run is trained once"
    if checkpoints.latest() is None:
        return 0, make()
    del make
    state, loop = checkpoints.restore(run.abstract, accept)
    step = int(loop["step"])
    log.info("resuming after step %d", step)
    return step, state
