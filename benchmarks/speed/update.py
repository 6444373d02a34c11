"""`launch/bench.py update`: one optimizer step of the policy, compared with transformers on PyTorch.

All contenders have the same weights, rows, loss and optimizer, and run alternately on one machine: compare the ratios.
`equal` is 32 rows of 640 tokens in two micro-batches. `ragged` is 64 rows in four, with the lengths of the ragged
rollouts (scripted.py), or with --lengths those of a run's trajectories. --rows scales both. Padding tokens
are not counted. The peer `padded` is this project with one row per trajectory.

With --model, LoRA adapters are trained on the frozen weights of a directory, with micro-batches of one row.
`products_gflops` is the rate, in GFLOP/s, of the products with weights that every contender needs, forward and
backward.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.speed.scripted import Script, ragged
from benchmarks.speed.timing import (
    SIZES,
    add_model_flags,
    log,
    machine,
    missing,
    parser,
    policies,
    rates,
    run_alternately,
    tabled,
    written,
)
from psearch_jax.assembly import programs
from psearch_jax.config import Config, DecoderConfig, Lora, MeshSection, from_mapping
from psearch_jax.models import decoder, lora
from psearch_jax.models.buckets import buckets
from psearch_jax.runtime.cli import configure_jax
from psearch_jax.sharding import make_mesh
from psearch_jax.train.learner import Learner
from psearch_jax.train.state import TrainState, init_state, make_optimizer
from psearch_jax.types import TrainBatch, UserError

OURS = "this project"
_TORCH = ("torch", "transformers")
PEERS = {"padded": (), "torch": _TORCH, "torch.compile": _TORCH, "trl": (*_TORCH, "trl")}  # and what they need
WORKS = ("equal", "ragged")
MICRO_ROWS = 16
LORA = Lora(8, 16.0)
COLUMNS = ("size", "work", "contender", "tokens_per_s", "relative_speed", "products_gflops", "loss", "gradient_norm")


def main(argv: Sequence[str]) -> None:
    flags = _flags(argv)
    configure_jax()
    report: dict[str, Any] = {"machine": machine(), "arguments": vars(flags), "update": [], "skipped": []}
    lacking = {name: missing(*PEERS[name]) for name in flags.peers}
    report["skipped"] = [f"{name}: left out, {what} is not installed" for name, what in lacking.items() if what]
    peers = [name for name, what in lacking.items() if not what]
    for size, policy in policies(flags).items():
        for name in flags.works:
            masks = _masks(name, flags.scale, flags.lengths, flags.rows)
            lines = compare(size, masks, peers, flags.repeats, flags.dtype, policy)
            report["update"] += [{"work": name} | line for line in lines]
    print(tabled(report["update"], COLUMNS))
    for line in report["skipped"]:
        print(line)
    written(flags.json, report)


def compare(
    size: str,
    masks: Sequence[np.ndarray],
    peers: Sequence[str],
    repeats: int,
    dtype: str = "float32",
    policy: tuple[DecoderConfig, nnx.State] | None = None,
) -> list[dict[str, Any]]:
    """A line for each contender; `relative_speed` is its speed relative to ours.

    Args:
      masks: by row, 1 at sampled tokens.
      dtype: of products of all contenders.
      policy: shape and frozen weights of `size`, in `dtype`; default: a random policy, trained in full.
    """
    model, params = policy or (SIZES[size], decoder.init_params(SIZES[size], 0))
    longest, adapters = max(map(len, masks)), adapters_of(model) if policy else None
    config = config_of(len(masks), longest, dtype, adapters is not None)
    ours = Ours(config, model, params, masks, adapters=adapters)
    contenders: dict[str, Callable[[], dict[str, float]]] = {OURS: ours.run}
    for name in peers:
        if name == "padded":
            contenders[name] = Ours(config, model, params, masks, pack=False, adapters=adapters).run
            continue
        from benchmarks.speed.peers import TorchUpdate, TrlUpdate, add_adapters, torch_model

        theirs = torch_model(params, model, dtype)
        if adapters is not None:
            add_adapters(theirs, adapters, LORA)
        if name == "trl":
            peer = TrlUpdate(theirs, config.learning)
        else:
            compiled = name == "torch.compile"  # compiles a program per width, so it uses few widths
            widths = buckets(longest, config.rollout.num_buckets) if compiled else None
            peer = TorchUpdate(theirs, config.learning, widths, compiled)
        peer.lay(ours.batch)
        contenders[name] = peer.run
    first: dict[str, dict[str, float]] = {}

    def noting(name: str) -> Callable[[], Any]:
        return lambda: first.setdefault(name, contenders[name]())

    seconds = run_alternately({name: noting(name) for name in contenders}, repeats, log)
    # FLOPs per weight and token: 2 forward, 2 for the input's gradient, 2 for the weight's unless it is frozen.
    times, loose = 4 if adapters is not None else 6, 1e-3 if dtype == "float32" else 5e-2
    gflop = 1e-9 * times * sum(map(len, masks)) * sum(x.size for x in jax.tree.leaves(params["layers"]))
    gflop += 1e-9 * times * float(sum(map(np.sum, masks))) * model.width * model.vocab_rows
    lines = []
    for name, taken in seconds.items():
        line = {"size": size, "contender": name, "tokens_per_s": rates(sum(map(len, masks)), taken)}
        line["relative_speed"] = round(float(np.median(seconds[OURS]) / np.median(taken)), 2)
        line["products_gflops"] = float(f"{gflop / np.median(taken):.3g}")
        line["seconds"] = [round(s, 3) for s in taken]
        line |= {key: float(f"{first[name][key]:.5g}") for key in ("loss", "gradient_norm")}
        for key in ("loss", "gradient_norm"):  # of the first update: later ones differ by accumulated rounding
            if abs(line[key] - first[OURS][key]) > loose * max(1.0, abs(line[key])):
                raise AssertionError(f"{name}: {key} {line[key]}, ours {first[OURS][key]}")
        lines.append(line)
    return lines


class Ours:
    """This project's update of a batch with the given masks; with `adapters` it trains only those."""

    def __init__(
        self,
        config: Config,
        model: DecoderConfig,
        params: Any,
        masks: Sequence[np.ndarray],
        pack: bool = True,
        adapters: nnx.State | None = None,
    ):
        trained, base = (params, None) if adapters is None else (adapters, params)
        self._learner, self._state = learner_of(config, model, trained, base, pack)
        batch = _batch(masks, model.vocab_rows)
        # Old policy and reference differ a little from the policy.
        noise = 0.01 * np.random.default_rng(1).standard_normal(batch.mask.shape).astype(np.float32) * batch.mask
        old = self._learner.score(self._state.params, batch)
        self.batch = replace(batch, old_logprobs=old + noise, ref_logprobs=old - noise, sampler_logprobs=old)

    def run(self) -> dict[str, float]:
        self._state, metrics = self._learner.update(self._state, self.batch)
        return metrics


def learner_of(
    config: Config, model: DecoderConfig, params: Any, base: Any = None, pack: bool = True
) -> tuple[Learner, TrainState]:
    """The learner of a config on one device, and a train state with copies of the parameters."""
    optimizer = make_optimizer(config.learning, 10)
    mesh = make_mesh(MeshSection(1, 1, 1), jax.devices()[:1])
    learner = programs.make_learner(config, model, mesh, optimizer, model.vocab_rows, base, pack)
    return learner, init_state(jax.tree.map(lambda x: x.copy(), params), optimizer, mesh)


def config_of(rows: int, longest: int, dtype: str = "float32", adapted: bool = False) -> Config:
    """A config for one optimizer step on `rows` trajectories of at most `longest` tokens.

    `adapted`: train LoRA adapters with micro-batches of one row, as configs/qwen0p5b_cpu.py does.
    """
    model = {"dtype": dtype, "sampling_dtype": dtype, "remat": "dots"}
    if adapted:
        model |= {"remat": "none", "lora_rank": LORA.rank, "lora_alpha": LORA.alpha}
    micro = 1 if adapted else MICRO_ROWS
    return from_mapping(
        {
            "model": model,
            "rollout": {"context_tokens": longest},
            "learning": {"micro_batch_rows": micro, "mini_batch_rollouts": rows, "warmup_ratio": 0.0},
        }
    )


def adapters_of(model: DecoderConfig) -> nnx.State:
    """Adapters whose matrices both get a gradient (b starts nonzero)."""
    rng, flat = np.random.default_rng(3), dict(nnx.to_flat_state(lora.init_adapters(model, LORA, 0)))
    for path, variable in flat.items():
        if path[-1].endswith("_b"):
            flat[path] = variable.replace(jnp.asarray(0.01 * rng.standard_normal(variable.shape), jnp.float32))
    return nnx.from_flat_state(flat)


def _batch(masks: Sequence[np.ndarray], n_ids: int) -> TrainBatch:
    rng, shape = np.random.default_rng(0), (len(masks), max(map(len, masks)))
    mask, ids = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    for row, values in enumerate(masks):
        mask[row, : len(values)] = values
        ids[row, : len(values)] = rng.integers(0, n_ids, len(values))
    length = np.array(list(map(len, masks)), np.int32)
    advantage = mask * rng.standard_normal((len(masks), 1)).astype(np.float32)
    return TrainBatch(ids, length, mask, advantage, *[np.zeros(shape, np.float32)] * 5)


def _masks(work: str, scale: float, lengths: Path | None, rows: int) -> list[np.ndarray]:
    """By row, 1 at sampled tokens; `rows` rows of `equal`, 2 * `rows` of `ragged`."""
    if work == "equal":
        turn, observation, prompt = (max(1, round(n * scale)) for n in (60, 150, 160))
        return [mask_of(prompt, Script((turn,) * 3, (observation,) * 2))] * rows
    if lengths is not None:
        return _recorded(lengths)
    rollouts = ragged(scale)
    return [mask_of(rollouts.prompt_tokens, script) for script in rollouts.scripts[: 2 * rows]]


def mask_of(prompt: int, script: Script) -> np.ndarray:
    """By token of a scripted rollout, 1 where it is sampled."""
    parts = [np.zeros(prompt)]
    for i, turn in enumerate(script.turns):
        parts += [np.ones(turn), *(np.zeros(n) for n in script.observations[i : i + 1])]
    return np.concatenate(parts).astype(np.float32)


def _recorded(path: Path) -> list[np.ndarray]:
    """The masks in a file of a run's trajectories."""
    try:
        with path.open(encoding="utf-8") as lines:
            masks = [np.asarray(json.loads(line)["mask"], np.float32) for line in lines]
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"--lengths={path}: {error!r} found, accepted: a file of WORKDIR/trajectories") from None
    if not masks:
        raise UserError(f"--lengths={path}: no rows found, accepted: a file of WORKDIR/trajectories")
    return masks


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    flags = parser("bench update", __doc__, WORKS, PEERS)
    add_model_flags(flags)
    flags.add_argument(
        "--rows", type=int, default=2 * MICRO_ROWS, help="rows of `equal`; `ragged` has twice that number"
    )
    flags.add_argument("--lengths", type=Path, help="jsonl file of a run's trajectories, for the lengths of `ragged`")
    parsed = flags.parse_args(argv)
    if parsed.dtype != "float32" and not parsed.model:
        flags.error(f"--dtype={parsed.dtype}: accepted with --model")
    if parsed.rows < 1:
        flags.error(f"--rows={parsed.rows}: accepted: at least 1")
    return parsed
