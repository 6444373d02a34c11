"""Supervised fine-tuning: cross-entropy on the tokens that a loss mask covers, full or with adapters.

`fit` is the loop. It takes batches by step, so a resumed run trains on the same data as an uninterrupted one. The
caller chooses the batches: rows of transcripts (`RowBatches`), or the curriculum of the toy policy (cold_start.py).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grain
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from psearch_jax.config import Config, DecoderConfig, SFTSection
from psearch_jax.data.transcripts import Row
from psearch_jax.models import decoder
from psearch_jax.runtime import processes
from psearch_jax.runtime.metrics import WEIGHT, Ratio
from psearch_jax.train.checkpointing.checkpoint import Checkpoints
from psearch_jax.train.checkpointing.preemption import Interrupted, StopRequest, describe_saved
from psearch_jax.train.learner import token_logprobs
from psearch_jax.train.saving import CHECKPOINT_EVERY_S
from psearch_jax.train.state import GRADIENT_CLIP, TrainState
from psearch_jax.train.trainable import MAX_NONFINITE_UPDATES, Trainable
from psearch_jax.types import MicroBatch, TrainBatch, UserError

log = logging.getLogger("psearch_jax")


WARMUP_RATIO, WEIGHT_DECAY = 0.05, 0.01


class SupervisedTrainer(Trainable):
    """Device programs of supervised fine-tuning; the score is the log-prob of every token that the mask covers.

    Args (in addition to those of `Trainable`):
      schedule: maps optimizer steps taken to the learning rate.
      vocabulary: number of token ids of the tokenizer.
    """

    def __init__(
        self,
        config: Config,
        model: DecoderConfig,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        *,
        schedule: optax.Schedule,
        vocabulary: int,
        base: nnx.State | None = None,
    ):
        def score_fn(model: decoder.Decoder, micro_batch: MicroBatch) -> jax.Array:
            return token_logprobs(model, micro_batch, 1.0, vocabulary)[0]

        super().__init__(
            config,
            model,
            optimizer,
            mesh,
            loss_fn=functools.partial(_cross_entropy, vocabulary),
            metrics=("loss", "entropy"),
            score_fn=score_fn,
            learning_rate_fn=lambda state: schedule(state.updates),
            base=base,
        )

    def pack(self, rows: Sequence[Row]) -> list[MicroBatch]:
        """Packs rows into micro-batches of the run's widths."""
        return [micro_batch for _, micro_batch in self._packed(row_batch(rows))]

    def mean_loss(self, params: Any, rows: Sequence[Row]) -> float:
        """Cross-entropy per trained token, in nats, without an update."""
        batch = row_batch(rows)
        return float(-self.score(params, batch).sum() / max(batch.mask.sum(), 1))


def _cross_entropy(vocabulary: int, model: decoder.Decoder, micro_batch: MicroBatch) -> tuple[Ratio, dict[str, Ratio]]:
    logprobs, entropy = token_logprobs(model, micro_batch, 1.0, vocabulary)
    count = micro_batch.mask.sum()
    loss = Ratio(-logprobs.sum(), count)  # 0 where the mask is 0
    return loss, {"loss": loss, "entropy": Ratio(entropy.sum(), count)}


def row_batch(rows: Sequence[Row]) -> TrainBatch:
    """Rows padded on the right to the length of the longest."""
    width = max(len(ids) for ids, _ in rows)
    ids, mask = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.float32)
    for i, (row, trained) in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = row, trained
    zeros = np.zeros_like(mask)
    length = np.asarray([len(row) for row, _ in rows], np.int32)
    return TrainBatch(ids, length, mask, zeros, zeros, zeros, zeros, zeros, zeros)


def digest(rows: Sequence[Row]) -> str:
    """SHA-256 of the rows in their order."""
    sha256 = hashlib.sha256()
    for ids, mask in rows:
        sha256.update(b"%d;" % len(ids) + ids.astype("<i4").tobytes() + mask.astype(np.uint8).tobytes())
    return sha256.hexdigest()


def cosine_schedule(peak: float, steps: int, warmup_ratio: float = WARMUP_RATIO) -> optax.Schedule:
    """Warm-up over `warmup_ratio` of the steps, then cosine decay to a tenth of the peak.

    The warm-up is linear, from 1/n of the peak at its first step to the peak at its n-th: every step learns.
    """
    n = max(1, min(steps - 1, round(warmup_ratio * steps)))
    return optax.warmup_cosine_decay_schedule(peak / n, peak, n - 1, steps, 0.1 * peak)


def make_optimizer(section: SFTSection, steps: int) -> optax.GradientTransformation:
    """Global-norm clip, then AdamW with the cosine schedule."""
    adamw = optax.adamw(cosine_schedule(section.learning_rate, steps), weight_decay=WEIGHT_DECAY)
    return optax.chain(optax.clip_by_global_norm(GRADIENT_CLIP), adamw)


# ---- batches ----


class Batches(Protocol):
    """The micro-batches of every step, and a name under which its loss is logged ("" for plain `loss`)."""

    def __getitem__(self, step: int) -> tuple[str, Sequence[MicroBatch]]: ...


class RowBatches:
    """Rows in batches, reshuffled every epoch. Seed and step determine the rows of a batch."""

    def __init__(
        self, rows: Sequence[Row], batch_rows: int, seed: int, pack: Callable[[Sequence[Row]], Sequence[MicroBatch]]
    ):
        self._rows, self._pack = rows, pack
        self.rows, self.steps_per_epoch = len(rows), len(rows) // batch_rows
        used = self.steps_per_epoch * batch_rows
        order = grain.MapDataset.range(len(rows)).seed(seed).shuffle()[:used].repeat(None)
        self._batches = order.batch(batch_rows, drop_remainder=True)

    def __getitem__(self, step: int) -> tuple[str, Sequence[MicroBatch]]:
        return "", self._pack([self._rows[i] for i in self._batches[step]])


# ---- the loop ----


@dataclass(frozen=True)
class FitOptions:
    """How long `fit` runs, and what it logs and saves."""

    steps: int
    log_every_steps: int = 1
    checkpoint_every_steps: int = 50
    record: Mapping[str, Any] = field(default_factory=dict)  # JSON-ready, saved in every checkpoint
    all_steps: int = 0  # of the run, of which these are a part; 0: the same


def fit(
    trainer: Trainable,
    state: TrainState,
    batches: Batches,
    options: FitOptions,
    log_metrics: Callable[[int, dict[str, float]], None],
    checkpoints: Checkpoints | None = None,
    stop: StopRequest | None = None,
    first: int = 0,
) -> TrainState:
    """Takes the optimizer steps from `first` to `options.steps` and returns the last state.

    Args:
      state: donated.
      log_metrics: called with the steps taken and the means since the last call.
      checkpoints: where the state is saved, also after the last step.
      stop: checked before every micro-batch.

    Raises:
      Interrupted: after SIGTERM or Ctrl-C, once the last complete step is saved.
      UserError: too many updates in a row were not finite.
    """
    stop = stop or StopRequest()
    started = saved = time.monotonic()
    tokens, window = 0, []

    def save(step: int) -> None:
        if checkpoints and checkpoints.latest() != step:
            checkpoints.save(step, state, options.record)

    for step in range(first, options.steps):
        name, pieces = batches[step]
        try:
            state, metrics = trainer.update_micro_batches(state, pieces, stop.checker())
        except Interrupted:
            if checkpoints:
                if step:
                    save(step)
                checkpoints.wait()
            raise Interrupted(describe_saved(step)) from None
        if metrics["nonfinite_in_a_row"] >= MAX_NONFINITE_UPDATES:
            raise UserError(
                f"step {step + 1}: loss or gradient was not finite in {MAX_NONFINITE_UPDATES} updates in a "
                f"row, {trainer.nonfinite_cause(metrics)}; lower sft.learning_rate"
            )
        window.append({f"{name}/{key}" if name and key in trainer.metrics else key: v for key, v in metrics.items()})
        tokens += sum(int(np.count_nonzero(micro_batch.segments)) for micro_batch in pieces)
        done = step + 1
        if done % options.log_every_steps == 0 or done == options.steps:
            keys = dict.fromkeys(key for row in window for key in row if key not in ("nonfinite_param", WEIGHT))
            means = {key: float(np.mean([row[key] for row in window if key in row])) for key in keys}
            seconds = time.monotonic() - started
            means |= {"progress": done / (options.all_steps or options.steps), "tokens_per_s": tokens / seconds}
            log_metrics(done, means | {"steps_per_s": (done - first) / seconds})
            window = []
        # By the clock of the first process, because all save together.
        late = processes.broadcast(lambda: time.monotonic() - saved) >= CHECKPOINT_EVERY_S  # noqa: B023
        if done % options.checkpoint_every_steps == 0 or done == options.steps or late:
            save(done)
            saved = time.monotonic()
    if checkpoints:
        checkpoints.wait()
    return state
