"""`launch/bench.py update`: one optimizer step of the policy, compared with transformers on PyTorch.

Both have the same weights, rows, loss and optimizer, and run alternately on one machine: compare the ratios. `equal`
is 32 rows of 640 tokens in two micro-batches; `ragged` is 64 rows in four, with the lengths of the ragged rollouts.
--rows scales both. Padding is not counted. With
--model, LoRA adapters are trained on the frozen weights, in micro-batches of one row, without the peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import timing
from benchmarks.scripted import WORKS, Script, ragged, scaled
from psearch_jax.config import Config, DecoderConfig, Lora, MeshSection, from_mapping
from psearch_jax.models import lora
from psearch_jax.runtime.cli import configure_jax
from psearch_jax.sharding import make_mesh
from psearch_jax.train.learner import Learner
from psearch_jax.train.state import TrainState, init_state, make_optimizer
from psearch_jax.types import TrainBatch

LORA = Lora(8, 16.0)


def main(argv: Sequence[str]) -> None:
    parser = timing.make_parser("update", __doc__, WORKS)
    parser.add_argument("--rows", type=int, default=32, help="rows of `equal`; `ragged` has twice that number")
    flags = parser.parse_args(argv)
    if flags.rows < 1:
        parser.error(f"--rows={flags.rows}: accepted: at least 1")
    configure_jax()
    peers = timing.find_peers(flags.peers and not flags.model, "torch", "transformers")
    lines = []
    for size, policy in timing.load_policies(flags).items():
        for name in flags.works:
            masks = make_masks(name, flags.scale, flags.rows)
            adapters = make_adapters(policy[0]) if flags.model else None
            figures = compare(masks, *policy, adapters, flags.dtype, peers, flags.repeats)
            lines += [{"size": size, "work": name} | line for line in figures]
    timing.report(flags, "update", lines)


def compare(
    masks: Sequence[np.ndarray],
    model: DecoderConfig,
    params: Any,
    adapters: nnx.State | None,
    dtype: str,
    with_peer: bool,
    repeats: int,
) -> list[dict[str, Any]]:
    """A line for each contender. Loss and gradient norm of their first updates are checked to be equal."""
    config = make_config(len(masks), max(map(len, masks)), dtype, adapters is not None)
    ours = Update(config, model, params, masks, adapters)
    contenders = {timing.OURS: ours.run}
    if with_peer:
        from benchmarks.peers import TorchUpdate, torch_model

        peer = TorchUpdate(torch_model(params, model, dtype), config.learning)
        peer.load(ours.batch)
        contenders["torch"] = peer.run
    first: dict[str, dict[str, float]] = {}

    def keep_first(name: str) -> Any:
        return lambda: first.setdefault(name, contenders[name]())

    seconds = timing.run_alternately({name: keep_first(name) for name in contenders}, repeats)
    lines = timing.summarise_seconds(seconds, sum(map(len, masks)), "tokens_per_s")
    tolerance = 1e-3 if dtype == "float32" else 5e-2
    for name, line in lines.items():
        for key in ("loss", "gradient_norm"):  # of the first update: later ones differ by accumulated rounding
            value, expected = first[name][key], first[timing.OURS][key]
            if abs(value - expected) > tolerance * max(1.0, abs(expected)):
                raise AssertionError(f"{name}: {key} {value}, ours {expected}")
            line[key] = float(f"{value:.5g}")
    return list(lines.values())


class Update:
    """This project's update of a batch with the given masks; with `adapters` it trains only those."""

    def __init__(
        self,
        config: Config,
        model: DecoderConfig,
        params: Any,
        masks: Sequence[np.ndarray],
        adapters: nnx.State | None = None,
    ):
        trained, base = (params, None) if adapters is None else (adapters, params)
        self._learner, self._state = make_learner(config, model, trained, base)
        batch = make_batch(masks, model.vocab_rows)
        # Old policy and reference differ a little from the policy.
        noise = 0.01 * np.random.default_rng(1).standard_normal(batch.mask.shape).astype(np.float32) * batch.mask
        old = self._learner.score(self._state.params, batch)
        self.batch = replace(batch, old_logprobs=old + noise, ref_logprobs=old - noise, sampler_logprobs=old)

    def run(self) -> dict[str, float]:
        self._state, metrics = self._learner.update(self._state, self.batch)
        return metrics


def make_learner(config: Config, model: DecoderConfig, params: Any, base: Any = None) -> tuple[Learner, TrainState]:
    """The learner of a config on one device, and a train state with copies of the parameters."""
    optimizer = make_optimizer(config.learning, 10)
    mesh = make_mesh(MeshSection(1, 1, 1), jax.devices()[:1])
    learner = Learner(config, model, optimizer, mesh, model.vocab_rows, base=base)
    return learner, init_state(jax.tree.map(lambda x: x.copy(), params), optimizer, mesh)


def make_config(
    rows: int, longest: int, dtype: str = "float32", adapted: bool = False, micro_batch_rows: int = 16, remat: str = ""
) -> Config:
    """A config for one optimizer step on `rows` trajectories of at most `longest` tokens."""
    model = {"dtype": dtype, "sampling_dtype": dtype, "remat": remat or ("none" if adapted else "dots")}
    model |= {"lora_rank": LORA.rank, "lora_alpha": LORA.alpha} if adapted else {}
    learning = {
        "micro_batch_rows": 1 if adapted else micro_batch_rows,
        "mini_batch_rollouts": rows,
        "warmup_ratio": 0.0,
    }
    return from_mapping({"model": model, "rollout": {"context_tokens": longest}, "learning": learning})


def make_adapters(model: DecoderConfig) -> nnx.State:
    """Adapters whose matrices both get a gradient (b starts nonzero)."""
    rng, adapters = np.random.default_rng(3), lora.init_adapters(model, LORA, 0)
    flat = dict(nnx.to_flat_state(adapters))
    for path, variable in flat.items():
        if path[-1].endswith("_b"):
            flat[path] = variable.replace(jnp.asarray(0.01 * rng.standard_normal(variable.shape), jnp.float32))
    return nnx.from_flat_state(flat)


def make_batch(masks: Sequence[np.ndarray], n_ids: int) -> TrainBatch:
    rng, shape = np.random.default_rng(0), (len(masks), max(map(len, masks)))
    mask, ids = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    for row, values in enumerate(masks):
        mask[row, : len(values)] = values
        ids[row, : len(values)] = rng.integers(0, n_ids, len(values))
    length = np.array(list(map(len, masks)), np.int32)
    advantage = mask * rng.standard_normal((len(masks), 1)).astype(np.float32)
    return TrainBatch(ids, length, mask, advantage, *[np.zeros(shape, np.float32)] * 5)


def make_masks(work: str, scale: float, rows: int) -> list[np.ndarray]:
    """By row, 1 at sampled tokens; `rows` rows of `equal`, 2 * `rows` of `ragged`."""
    if work == "equal":
        script = Script((scaled(60, scale),) * 3, (scaled(150, scale),) * 2)
        return [script.mask(scaled(160, scale))] * rows
    rollouts = ragged(scale)
    return [script.mask(rollouts.prompt_tokens) for script in rollouts.scripts[: 2 * rows]]
