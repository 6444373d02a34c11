"""Supervised fine-tuning on scripted trajectories: the cold start of the toy policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from psearch_jax.config import PRESETS, Qwen2Config, Remat
from psearch_jax.data.closed_world import ClosedWorld
from psearch_jax.data.scripted import Mixture, ordering_exercise, scripted_trajectories
from psearch_jax.models import qwen2
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import UserError
from retrieval.protocol import Passage, Retriever

Row = tuple[np.ndarray, np.ndarray]  # ids [S] int32, loss mask [S] bool


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum: from names alone to whole trajectories with distractors."""

    topk: int  # passages per search; 0: the trajectory ends with its first search
    worlds: int
    trajectories_per_world: int = 5000


@dataclass(frozen=True)
class SFTConfig:
    """A cold-start run. World 0 is the one that policies are evaluated in; worlds 1, 2, .. are trained on."""

    seed: int = 0
    preset: str = "toy"
    ordering_rows: int = 24_000  # exercises in comparing years, trained on together with the first stage
    copying: Stage = Stage(topk=0, worlds=5)
    reading: Stage = Stage(topk=1, worlds=4)
    whole: Stage = Stage(topk=3, worlds=9)
    parallel_share: float = 0.6
    sequential_share: float = 0.3  # the rest are single
    tokens_per_batch: int = 2048  # padding included; small batches learn to copy sooner
    buckets: tuple[int, ...] = (48, 96, 128, 192, 256)  # row lengths in ids; longer rows are left out
    remat: Remat = "dots"  # on a CPU computing the rest anew is faster than storing it
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    final_learning_rate_share: float = 0.05
    weight_decay: float = 0.01
    beta2: float = 0.98
    gradient_clip: float = 1.0
    log_every_steps: int = 100
    mixture: Mixture = field(default_factory=Mixture)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """In the order of training."""
        return (self.copying, self.reading, self.whole)


def make_rows(
    config: SFTConfig, tokenizer: Tokenizer, make_retriever: Callable[[Sequence[Passage]], Retriever]
) -> list[list[Row]]:
    """The rows of every stage; no name of a held-out entity of world 0 occurs in them."""
    reserved = ClosedWorld.make(0).held_out_names
    seed, out = 0, []
    for stage in config.stages:
        n = stage.trajectories_per_world
        counts = {"parallel": round(n * config.parallel_share), "sequential": round(n * config.sequential_share)}
        counts["single"] = n - sum(counts.values())
        rows: list[Row] = []
        for _ in range(stage.worlds):
            seed += 1
            world = ClosedWorld.make(seed, reserved_names=reserved)
            retriever = make_retriever(world.passages)
            rng = np.random.default_rng([config.seed, seed, 0x0A])
            questions = [q for kind, m in counts.items() for q in world.questions("train", kind, m, config.seed)]
            rows += scripted_trajectories(questions, retriever, tokenizer, rng, config.mixture, stage.topk)
        out.append(rows)
    rng = np.random.default_rng([config.seed, 0x0C])
    out[0] += [ordering_exercise(tokenizer, rng) for _ in range(config.ordering_rows)]
    return out


def batches(rows: Sequence[Row], config: SFTConfig, stage: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches (ids [B, T] int32, mask [B, T] bool) of one stage, each row padded to its bucket, in a seeded order.

    Every batch holds about `tokens_per_batch` positions. The last rows of a bucket that fill no batch are left out,
    so that each bucket has one shape.
    """
    rng = np.random.default_rng([config.seed, stage, 0x0B])
    groups: dict[int, list[int]] = {bucket: [] for bucket in config.buckets}
    for i in rng.permutation(len(rows)):
        bucket = next((b for b in config.buckets if len(rows[i][0]) <= b), None)
        if bucket is not None:
            groups[bucket].append(i)
    chunks = []
    for bucket, members in groups.items():
        size = max(1, config.tokens_per_batch // bucket)
        chunks += [(bucket, members[k : k + size]) for k in range(0, len(members) - size + 1, size)]
    for k in rng.permutation(len(chunks)):
        bucket, members = chunks[k]
        ids, mask = np.zeros((len(members), bucket), np.int32), np.zeros((len(members), bucket), bool)
        for row, i in enumerate(members):
            length = len(rows[i][0])
            ids[row, :length], mask[row, :length] = rows[i]
        yield ids, mask


def optimizer(config: SFTConfig, steps: int) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay and clipping by the global norm; vectors (norms, biases) do not decay."""
    peak = config.learning_rate
    warmup = min(config.warmup_steps, max(1, steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, steps, peak * config.final_learning_rate_share)
    decays = partial(jax.tree.map, lambda x: x.ndim > 2)
    adamw = optax.adamw(schedule, b2=config.beta2, weight_decay=config.weight_decay, mask=decays)
    return optax.chain(optax.clip_by_global_norm(config.gradient_clip), adamw)


def loss_fn(
    params: nnx.State, graph: nnx.GraphDef, ids: jax.Array, mask: jax.Array, n_ids: int
) -> tuple[jax.Array, jax.Array]:
    """Mean cross-entropy of the masked ids, and the share of them that is the likeliest id. ids, mask: [B, T]."""
    model = nnx.merge(graph, params)
    hidden, _ = model.hidden(ids[:, :-1])
    logits = model.logits(hidden, 1.0, n_ids)
    targets, weight = ids[:, 1:], mask[:, 1:]
    nll = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    count = jnp.maximum(jnp.sum(weight), 1)
    right = jnp.sum((jnp.argmax(logits, axis=-1) == targets) * weight)
    return jnp.sum(nll * weight) / count, right / count


def train(
    config: SFTConfig,
    tokenizer: Tokenizer,
    stages: Sequence[Sequence[Row]],
    log: Callable[[int, dict[str, float]], None],
) -> tuple[Qwen2Config, nnx.State]:
    """Train a policy of the preset's shape, with as many embedding rows as the tokenizer has ids (rounded up to 64).

    `log(step, values)` is called every `log_every_steps` and at the end. Returns the policy's config and its float32
    parameters. Raises UserError when the rows fill no batch or the preset is unknown.
    """
    shape = policy_shape(config, tokenizer)
    steps = sum(1 for i, rows in enumerate(stages) for _ in batches(rows, config, i))
    if steps == 0:
        raise UserError(f"config.tokens_per_batch={config.tokens_per_batch}: the trajectories fill no batch")
    graph, tx = qwen2.graphdef(shape, jnp.float32, config.remat), optimizer(config, steps)
    params = starting_params(shape, config.seed)
    opt_state = tx.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, ids, mask):
        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, graph, ids, mask, tokenizer.size)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jnp.stack([loss, accuracy])

    start, done, tokens, window = time.monotonic(), 0, 0, []
    for ids, mask in (batch for i, rows in enumerate(stages) for batch in batches(rows, config, i)):
        params, opt_state, figures = step(params, opt_state, ids, mask)
        window.append(figures)
        done, tokens = done + 1, tokens + ids.size
        if done % config.log_every_steps == 0 or done == steps:
            loss, accuracy = np.mean(jax.device_get(window), axis=0)
            values = {"share": done / steps, "loss": loss, "accuracy": accuracy, "tokens": tokens}
            log(done, {name: float(value) for name, value in values.items()} | {"train_s": time.monotonic() - start})
            window = []
    return shape, params


def policy_shape(config: SFTConfig, tokenizer: Tokenizer) -> Qwen2Config:
    """The preset with the tokenizer's number of ids, rounded up to 64 rows, and its stop ids."""
    if config.preset not in PRESETS:
        raise UserError(f"config.preset: found {config.preset!r}, accepted: {', '.join(PRESETS)}")
    rows = -(-tokenizer.size // 64) * 64
    return replace(PRESETS[config.preset], vocab_rows=rows, eos_ids=tuple(sorted(tokenizer.stop_ids)))


def starting_params(shape: Qwen2Config, seed: int) -> nnx.State:
    """Random parameters for a narrow model.

    The published std of 0.02 suits widths in the thousands: at a width of 128 it leaves attention nearly uniform, and
    copying is found much later. What reads the residual stream starts at 1 / sqrt(width) instead, and the embedding
    above the outputs of the layers, which keep 0.02.
    """
    readers = {"q_kernel", "k_kernel", "v_kernel", "gate_kernel", "up_kernel", "embedding"}
    factor = shape.width**-0.5 / 0.02
    flat = nnx.to_flat_state(qwen2.init_params(shape, seed))
    return nnx.from_flat_state(
        [(path, v.replace(v.get_value() * factor) if path[-1] in readers else v) for path, v in flat]
    )
