"""A supervised fine-tuning run in its directory: the loop, resume, loss on held-out rows, metrics, checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from psearch_jax.data.transcripts import Row
from psearch_jax.runtime import processes
from psearch_jax.runtime.metrics import WEIGHT, MetricsWriter, cut_jsonl
from psearch_jax.runtime.paths import locate, make_writable, read_json
from psearch_jax.sft.learner import Batches, SupervisedTrainer
from psearch_jax.train.checkpointing import settings
from psearch_jax.train.checkpointing.checkpoint import Checkpoints
from psearch_jax.train.checkpointing.preemption import Interrupted, StopRequest, describe_saved
from psearch_jax.train.monitoring.alarms import read_rows
from psearch_jax.train.monitoring.records import write_config, write_json
from psearch_jax.train.saving import CHECKPOINT_EVERY_S
from psearch_jax.train.state import TrainState
from psearch_jax.train.trainable import MAX_NONFINITE_UPDATES
from psearch_jax.types import UserError

log = logging.getLogger("psearch_jax")


@dataclass
class SupervisedRun:
    """The parts of a supervised run, made by assembly/build_sft.py or experiments/toy."""

    config: Any  # a dataclass, as the user set it; recorded in config.json
    trainer: SupervisedTrainer
    batches: Batches
    initial_state: Callable[[], TrainState] | None  # makes the state of step 0, once
    steps: int
    steps_per_epoch: int
    record: Mapping[str, Any]  # what every checkpoint records about model, tokenizer, adapters and settings
    checkpoint_every_steps: int
    keep_checkpoints: int
    log_every_steps: int = 1
    held_out: Sequence[Row] = ()  # their loss is logged after every epoch; they are not trained on
    stop: StopRequest = field(default_factory=StopRequest)


def train(run: SupervisedRun, workdir: str | Path, allow_changes: bool = False, log_to: str = "") -> dict[str, Any]:
    """Trains to the end, resuming from the workdir's newest checkpoint, and returns the summary it wrote.

    Args:
      allow_changes: resume even if settings that affect the results have changed.
      log_to: `log` of `MetricsWriter`.

    Raises:
      Interrupted: after SIGTERM or Ctrl-C, once the last complete step is on disk.
      UserError: the settings or rows differ from those of the run, or too many updates in a row were not finite.
    """
    workdir, started = locate(workdir), time.monotonic()
    make_writable(workdir)
    with ExitStack() as closers:
        closers.enter_context(run.stop.listen())
        checkpoints = closers.enter_context(closing(Checkpoints(workdir / "checkpoints", run.keep_checkpoints)))
        step, state = _resume(run, checkpoints, workdir, allow_changes)
        if processes.first():
            write_config(workdir, run.config, step)
            # Without a checkpoint, also what another start measured at step 0.
            cut_jsonl(workdir / "metrics.jsonl", step + 1 if step else 0)
        if step == run.steps and (known := _known_summary(workdir)):  # nothing left to do
            return known
        validation = _measured_losses(workdir)
        progress = closers.enter_context(closing(_Progress(run, workdir, step, log_to)))
        saved = time.monotonic()
        while True:
            try:
                if run.held_out and step % run.steps_per_epoch == 0 and step not in validation:
                    validation[step] = run.trainer.mean_loss(state.params, run.held_out, run.stop.checker())
                    progress.writer.write(step, {"validation/loss": validation[step]})
                    log.info("step %d: validation loss %.4f", step, validation[step])
                if step == run.steps:
                    break
                name, micro_batches = run.batches[step]
                state, metrics = run.trainer.update_micro_batches(state, micro_batches, run.stop.checker())
            except Interrupted:
                if step and checkpoints.latest() != step:
                    checkpoints.save(step, state, run.record)
                checkpoints.wait()
                raise Interrupted(describe_saved(step)) from None
            step += 1
            if metrics["nonfinite_in_a_row"] >= MAX_NONFINITE_UPDATES:
                raise UserError(
                    f"step {step}: loss or gradient was not finite in {MAX_NONFINITE_UPDATES} updates in a row, "
                    f"{run.trainer.nonfinite_cause(metrics)}; lower the learning rate"
                )
            tokens = sum(int(np.count_nonzero(micro_batch.segments)) for micro_batch in micro_batches)
            progress.add(step, name, metrics, tokens)
            # By the clock of the first process, because all save together.
            is_late = processes.broadcast(lambda: time.monotonic() - saved) >= CHECKPOINT_EVERY_S  # noqa: B023
            if step % run.checkpoint_every_steps == 0 or step == run.steps or is_late:
                checkpoints.save(step, state, run.record)
                saved = time.monotonic()
        checkpoints.wait()
    summary = {
        "steps": run.steps,
        "epochs": run.steps // run.steps_per_epoch,
        "wall_s": round(time.monotonic() - started, 2),
        "validation_loss": {str(at): round(loss, 6) for at, loss in validation.items()},
    }
    if processes.first():
        write_json(workdir / "summary.json", summary)
    return summary


class _Progress:
    """Writes and shows the means of metrics over `log_every_steps` steps."""

    def __init__(self, run: SupervisedRun, workdir: Path, first: int, log_to: str):
        self._run, self._first, self._started = run, first, time.monotonic()
        self._tokens, self._window = 0, list[dict[str, float]]()
        self.writer = MetricsWriter(workdir, log=log_to, config=dataclasses.asdict(run.config))
        self._bar = tqdm(total=run.steps, initial=first, unit="step", disable=not processes.on_terminal())

    def add(self, step: int, name: str, metrics: Mapping[str, float], tokens: int) -> None:
        """Adds the metrics of a step; those of the loss are logged under `name`."""
        run = self._run
        self._tokens += tokens
        self._window.append({f"{name}/{k}" if name and k in run.trainer.metrics else k: v for k, v in metrics.items()})
        if step % run.log_every_steps and step != run.steps:
            return
        keys = dict.fromkeys(key for row in self._window for key in row if key not in ("nonfinite_param", WEIGHT))
        means = {key: float(np.mean([row[key] for row in self._window if key in row])) for key in keys}
        seconds = time.monotonic() - self._started
        speed = {"tokens_per_s": self._tokens / seconds, "steps_per_s": (step - self._first) / seconds}
        self.writer.write(step, means | {"progress": step / run.steps} | speed)
        losses = " ".join(f"{key} {value:.4f}" for key, value in means.items() if key.endswith("loss"))
        text = f"{losses} {speed['tokens_per_s']:.0f} tokens/s"
        if self._bar.disable:
            log.info("step %d of %d %s", step, run.steps, text)
        self._bar.set_postfix_str(text)
        self._bar.update(step - self._bar.n)
        self._window = []

    def close(self) -> None:
        self.writer.close()
        self._bar.close()


def _measured_losses(workdir: Path) -> dict[int, float]:
    """The losses on held-out rows that the run has measured, by step."""

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
    state, loop = checkpoints.restore(run.trainer.abstract, accept)
    step = int(loop["step"])
    log.info("resuming after step %d", step)
    return step, state
