"""Supervised fine-tuning: cross-entropy on the tokens that a loss mask covers, full or with adapters.

Batches are a function of the step, so a resumed run trains on the same data as an uninterrupted one. They are rows of
transcripts (`RowBatches`), or the curriculum of the toy policy (experiments/toy).
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
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
from psearch_jax.runtime.metrics import Ratio
from psearch_jax.train.learner import token_logprobs
from psearch_jax.train.state import GRADIENT_CLIP, TrainState
from psearch_jax.train.trainable import Trainable, never_stop
from psearch_jax.types import MicroBatch, TrainBatch

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

    @property
    def abstract(self) -> TrainState:
        """The state as ShapeDtypeStructs with shardings."""
        return self._abstract

    def pack(self, rows: Sequence[Row]) -> list[MicroBatch]:
        """Packs rows into micro-batches of the run's widths."""
        return [micro_batch for _, micro_batch in self._packed(row_batch(rows))]

    def mean_loss(self, params: Any, rows: Sequence[Row], check_stop: Callable[[], None] = never_stop) -> float:
        """Cross-entropy per trained token, in nats, without an update. `check_stop` is as in `score`."""
        batch = row_batch(rows)
        return float(-self.score(params, batch, check_stop).sum() / max(batch.mask.sum(), 1))


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


def hash_rows(rows: Sequence[Row]) -> str:
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
