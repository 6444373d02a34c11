"""`launch/bench.py update`: one optimizer step of the policy, ours beside transformers on PyTorch.

Equal weights (random, float32), rows, loss and optimizer; the contenders take turns on the same machine, so read the
ratios. `equal` is 32 rows of 640 ids in two micro-batches; `ragged` 64 rows in four, of the lengths of the ragged
rollouts (benchmarks/scripted.py), or with `--lengths` of those in a run's trajectories. Only real ids are counted. The
peer `padded` is this project again, with a row for each trajectory.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.scripted import Script, ragged
from benchmarks.timing import SIZES, by_turns, log, machine, missing, parser, rates, tabled, written
from psearch_jax import programs
from psearch_jax.buckets import buckets
from psearch_jax.config import Config, DecoderConfig, MeshSection, from_mapping
from psearch_jax.launching import configure_jax
from psearch_jax.models import decoder
from psearch_jax.sharding import make_mesh
from psearch_jax.train.learner import Learner
from psearch_jax.train.state import TrainState, init_state, make_optimizer
from psearch_jax.types import TrainBatch, UserError

OURS = "this project"
_TORCH = ("torch", "transformers")
PEERS = {"padded": (), "torch": _TORCH, "torch.compile": _TORCH, "trl": (*_TORCH, "trl")}  # and what they need
WORKS = ("equal", "ragged")
MICRO_ROWS = 16
COLUMNS = ("size", "work", "contender", "ids_per_s", "speed_to_ours", "loss", "gradient_norm")


def main(argv: Sequence[str]) -> None:
    flags = _flags(argv)
    configure_jax()
    report: dict[str, Any] = {"machine": machine(), "arguments": vars(flags), "update": [], "skipped": []}
    lacking = {name: missing(*PEERS[name]) for name in flags.peers}
    report["skipped"] = [f"{name}: left out, {what} is not installed" for name, what in lacking.items() if what]
    peers = [name for name, what in lacking.items() if not what]
    for size in flags.sizes:
        for name in flags.works:
            masks = _masks(name, flags.scale, flags.lengths)
            report["update"] += [{"work": name} | line for line in compare(size, masks, peers, flags.repeats)]
    print(tabled(report["update"], COLUMNS))
    for line in report["skipped"]:
        print(line)
    written(flags.json, report)


def compare(size: str, masks: Sequence[np.ndarray], peers: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """A line for each contender; `speed_to_ours` is that of a contender over ours.

    Args:
      masks: by row, where ids were sampled.
    """
    model, longest = SIZES[size], max(map(len, masks))
    params = decoder.init_params(model, 0)
    config = config_of(len(masks), longest)
    ours = Ours(config, model, params, masks)
    contenders: dict[str, Callable[[], dict[str, float]]] = {OURS: ours.run}
    for name in peers:
        if name == "padded":
            contenders[name] = Ours(config, model, params, masks, pack=False).run
            continue
        from benchmarks.peers import TorchUpdate, TrlUpdate, torch_model

        theirs = torch_model(params, model)
        if name == "trl":
            peer = TrlUpdate(theirs, config.learning)
        else:
            compiled = name == "torch.compile"  # a program for each width, so few of them
            widths = buckets(longest, config.rollout.widths) if compiled else None
            peer = TorchUpdate(theirs, config.learning, widths, compiled)
        peer.lay(ours.batch)
        contenders[name] = peer.run
    first: dict[str, dict[str, float]] = {}

    def noting(name: str) -> Callable[[], Any]:
        return lambda: first.setdefault(name, contenders[name]())

    seconds = by_turns({name: noting(name) for name in contenders}, repeats, log)
    lines = []
    for name, taken in seconds.items():
        line = {"size": size, "contender": name, "ids_per_s": rates(sum(map(len, masks)), taken)}
        line["speed_to_ours"] = round(float(np.median(seconds[OURS]) / np.median(taken)), 2)
        line["seconds"] = [round(s, 3) for s in taken]
        line |= {key: float(f"{first[name][key]:.5g}") for key in ("loss", "gradient_norm")}
        for key in ("loss", "gradient_norm"):  # of the first update: later ones start from other roundings
            if abs(line[key] - first[OURS][key]) > 1e-3 * max(1.0, abs(line[key])):
                raise AssertionError(f"{name}: {key} {line[key]}, ours {first[OURS][key]}")
        lines.append(line)
    return lines


class Ours:
    """This project's update of a batch with the given masks."""

    def __init__(
        self, config: Config, model: DecoderConfig, params: Any, masks: Sequence[np.ndarray], pack: bool = True
    ):
        self._learner, self._state = learner_of(config, model, params, pack)
        batch = _batch(masks, model.vocab_rows)
        # A policy that has moved a little, from itself and from its reference.
        noise = 0.01 * np.random.default_rng(1).standard_normal(batch.mask.shape).astype(np.float32) * batch.mask
        old = self._learner.score(self._state.params, batch)
        self.batch = replace(batch, old_logprobs=old + noise, ref_logprobs=old - noise, sampler_logprobs=old)

    def run(self) -> dict[str, float]:
        self._state, metrics = self._learner.update(self._state, self.batch)
        return metrics


def learner_of(config: Config, model: DecoderConfig, params: Any, pack: bool = True) -> tuple[Learner, TrainState]:
    """The learner of a config on one device, and a state with copies of the parameters."""
    optimizer = make_optimizer(config.learning, 10)
    mesh = make_mesh(MeshSection(1, 1, 1), jax.devices()[:1])
    learner = programs.make_learner(config, model, mesh, optimizer, model.vocab_rows, pack)
    return learner, init_state(jax.tree.map(lambda x: x.copy(), params), optimizer, mesh)


def config_of(rows: int, longest: int) -> Config:
    """What learns from `rows` trajectories of at most `longest` ids, in float32 and in one optimizer step."""
    return from_mapping(
        {
            "model": {"dtype": "float32", "sampling_dtype": "float32", "remat": "dots"},
            "rollout": {"context_tokens": longest},
            "learning": {"micro_batch_rows": MICRO_ROWS, "mini_batch_rollouts": rows, "warmup_ratio": 0.0},
        }
    )


def _batch(masks: Sequence[np.ndarray], n_ids: int) -> TrainBatch:
    rng, shape = np.random.default_rng(0), (len(masks), max(map(len, masks)))
    mask, ids = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    for row, values in enumerate(masks):
        mask[row, : len(values)] = values
        ids[row, : len(values)] = rng.integers(0, n_ids, len(values))
    length = np.array(list(map(len, masks)), np.int32)
    advantage = mask * rng.standard_normal((len(masks), 1)).astype(np.float32)
    return TrainBatch(ids, length, mask, advantage, *[np.zeros(shape, np.float32)] * 5)


def _masks(work: str, scale: float, lengths: Path | None) -> list[np.ndarray]:
    """By row, where ids were sampled."""
    if work == "equal":
        turn, observation, prompt = (max(1, round(n * scale)) for n in (60, 150, 160))
        return [_mask(prompt, Script((turn,) * 3, (observation,) * 2))] * (2 * MICRO_ROWS)
    if lengths is not None:
        return _recorded(lengths)
    rollouts = ragged(scale)
    return [_mask(rollouts.prompt_tokens, script) for script in rollouts.scripts[: 4 * MICRO_ROWS]]


def _mask(prompt: int, script: Script) -> np.ndarray:
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
    flags.add_argument("--lengths", type=Path, help="jsonl file of trajectories, whose lengths the ragged work takes")
    return flags.parse_args(argv)
