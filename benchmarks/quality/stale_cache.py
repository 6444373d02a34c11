"""`launch/bench.py stale_cache`: what keeping the cache of suspended rollouts would cost.

With `train.staleness`, a rollout that continues under newer weights has its keys and values computed again. If they
were kept, the newer policy would read what older weights cached. For recorded rollouts of a run with a checkpoint at
every step, transformers computes the log-probs of the sampled tokens in a rollout's second half, by the policy that is
`age` updates newer than the one that sampled them: with its own cache, and with the older policy's cache of the first
half. `stale gap` is the mean difference of the two. `policy gap` is the difference of the two policies themselves,
which staleness has in any case. The run must have sampled at temperature 1 and without staleness.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.timing import log, machine, written
from psearch_jax.eval.tables import table
from psearch_jax.models.hf import save_hf
from psearch_jax.runtime import cli
from psearch_jax.runtime.metrics import mean
from psearch_jax.train.checkpointing.checkpoint import load_params
from psearch_jax.types import UserError

MAX_FIRST_STEPS = 5  # steps from which ages are counted
RECORDED_GAP = 1e-3  # nats; more means that other weights sampled the rollouts


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="bench stale_cache", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", required=True, help="a run with checkpoints and trajectories of consecutive steps")
    parser.add_argument("--ages", type=int, nargs="+", default=[1, 2, 4], help="updates between the two policies")
    parser.add_argument("--count", type=int, default=32, help="rollouts of each step")
    parser.add_argument("--json", help="file for the figures")
    flags = parser.parse_args(argv)
    cli.configure_jax()
    lines = measured(Path(flags.run), flags.ages, flags.count)
    written(flags.json, {"machine": machine(), "arguments": vars(flags), "stale_cache": lines})
    columns = ["age", "rollouts", "tokens", "stale gap", "policy gap"]
    print(table([columns, *([_shown(line[name]) for name in columns] for line in lines)]))


def measured(run: Path, ages: Sequence[int], count: int) -> list[dict[str, Any]]:
    """One line per age; gaps are means of |difference| over sampled tokens, in nats.

    Raises:
      UserError: the run has no two checkpoints of that distance with the trajectories between them.
    """
    steps = {int(d.name) for d in (run / "checkpoints").glob("[0-9]*")}
    rollouts = {step: _rollouts(run / "trajectories" / f"{step:06d}.jsonl", count) for step in sorted(steps)}
    first = {age: [s for s in rollouts if s + age in steps and rollouts[s]][:MAX_FIRST_STEPS] for age in ages}
    for age, own in first.items():
        if not own:
            raise UserError(f"--run={run}: checkpoints of steps {list(rollouts)} found, accepted: two {age} apart")
    needed = {step for age, own in first.items() for s in own for step in (s, s + age)}
    with tempfile.TemporaryDirectory() as folder:
        policies = {s: _policy(run / "checkpoints" / str(s), Path(folder) / str(s)) for s in sorted(needed)}
    lines = []
    for age, own in first.items():
        log(f"age {age}: steps {', '.join(map(str, own))}")
        gaps = [_gaps(policies[s], policies[s + age], *one) for s in own for one in rollouts[s]]
        stale, policy, recorded = (np.concatenate([gap[i] for gap in gaps]) for i in range(3))
        if recorded.mean() > RECORDED_GAP:
            raise UserError(
                f"--run={run}: log-probs of the older policy differ from the recorded ones by {recorded.mean():.3g} "
                f"on average, accepted: at most {RECORDED_GAP}, as in runs without staleness at temperature 1"
            )
        line = {"age": age, "rollouts": len(gaps), "tokens": len(stale)}
        lines.append({**line, "stale gap": mean(stale), "policy gap": mean(policy)})
    return lines


def _rollouts(file: Path, count: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The ids, mask and log-probs, each [T], of recorded rollouts with at least two sampled tokens."""
    if not file.is_file():
        return []
    rows = [json.loads(line) for line in file.read_bytes().splitlines()[:count]]
    arrays = ((np.asarray(r["ids"]), np.asarray(r["mask"], bool), np.asarray(r["logprobs"])) for r in rows)
    return [one for one in arrays if one[1].sum() > 1]


def _policy(checkpoint: Path, folder: Path) -> Any:
    """A checkpoint as a model of transformers, in float32."""
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    config, params, loop = load_params(checkpoint)
    save_hf(params, config, loop["tokenizer"], folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def _gaps(older: Any, newer: Any, ids: np.ndarray, mask: np.ndarray, recorded: np.ndarray) -> list[np.ndarray]:
    """|difference| at the sampled tokens of the second half: of the caches, of the policies, and of the recorded
    log-probs from those of the older policy.
    """
    import torch

    sampled = np.flatnonzero(mask)
    cut = int(sampled[len(sampled) // 2])
    wanted = sampled[sampled > cut]
    tokens = torch.tensor(ids[None])

    def logprobs(logits: Any, first: int) -> np.ndarray:
        """Of the wanted tokens, from logits [1, T - first, V] of the positions from `first`."""
        places = torch.tensor(wanted)
        scores = torch.log_softmax(logits[0].float(), dim=-1)[places - 1 - first]
        return scores.gather(1, tokens[0, places][:, None])[:, 0].numpy()

    with torch.no_grad():
        own, old = (logprobs(policy(tokens).logits, 0) for policy in (newer, older))
        cache = older(tokens[:, :cut], use_cache=True).past_key_values
        stale = logprobs(newer(tokens[:, cut:], past_key_values=cache).logits, cut)
    return [np.abs(stale - own), np.abs(old - own), np.abs(recorded[wanted] - old)]


def _shown(value: Any) -> str:
    return f"{value:.5f}" if isinstance(value, float) else str(value)
