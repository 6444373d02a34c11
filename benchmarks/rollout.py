"""`launch/bench.py rollout`: multi-turn rollouts of scripted lengths, compared with transformers on PyTorch.

Both have the same weights (random, or those of --model), prompts and lengths, and run alternately on one machine:
compare the ratios. `equal` is 64 rollouts of one length; the peer runs it without any scheduler, which suits it best.
`ragged` is 256 rollouts of different lengths on 64 slots, only ours. --slots scales both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import timing
from benchmarks.scripted import WORKS, ScriptedRollouts, Work, on_slots
from psearch_jax.runtime.cli import configure_jax


def main(argv: Sequence[str]) -> None:
    parser = timing.make_parser("rollout", __doc__, WORKS)
    parser.add_argument("--slots", type=int, default=64, help="rows decoded in one batch, a multiple of 8")
    parser.add_argument(
        "--settings", default={}, type=json.loads, help="our settings as JSON, sections of config fields"
    )
    flags = parser.parse_args(argv)
    if flags.slots < 8 or flags.slots % 8:
        parser.error(f"--slots={flags.slots}: accepted: a multiple of 8, the rollouts of a group")
    configure_jax()
    peers, lines = timing.find_peers(flags.peers, "torch", "transformers"), []
    for size, policy in timing.load_policies(flags).items():
        for name in flags.works:
            work = on_slots(WORKS[name](flags.scale), flags.slots)
            with_peer = peers and name == "equal"
            figures = compare(work, *policy, flags.dtype, flags.settings, with_peer, flags.repeats)
            lines += [{"size": size, "work": name} | line for line in figures]
    timing.report(flags, "rollout", lines)


def compare(
    work: Work, model: Any, params: Any, dtype: str, settings: dict[str, Any], with_peer: bool, repeats: int
) -> list[dict[str, Any]]:
    """A line for each contender; the recorded log-probs of both are checked against a PyTorch forward pass."""
    ours = ScriptedRollouts(work, model, params, dtype, settings)
    contenders: dict[str, Any] = {timing.OURS: ours.run}
    if with_peer:
        from benchmarks.peers import TorchRollouts, token_logprobs, torch_model

        theirs = torch_model(params, model, dtype)
        contenders["torch"] = TorchRollouts(work, model, theirs).run
    last: dict[str, Any] = {}

    def keep_result(name: str) -> Any:
        return lambda: last.update({name: contenders[name]()})

    seconds = timing.run_alternately({name: keep_result(name) for name in contenders}, repeats)
    lines = timing.summarise_seconds(seconds, len(work.scripts), "rollouts_per_s")
    usage = ours.usage
    lines[timing.OURS] |= {"row_use": round(usage.row_use, 3), "decode_steps": usage.decode_steps}
    lines[timing.OURS] |= {"extend_use": round(usage.extend_use, 3), "host_s": round(usage.host_s, 3)}
    if with_peer:
        trajectory, (ids, logprobs) = last[timing.OURS][0], last["torch"]
        rows = {timing.OURS: (trajectory.ids, trajectory.logprobs), "torch": (ids[0], logprobs[0])}
        for name, (tokens, recorded) in rows.items():
            sampled = work.scripts[0].mask(work.prompt_tokens) > 0
            difference = np.abs(token_logprobs(theirs, np.asarray(tokens)) - recorded)[sampled].max()
            if difference > (1e-3 if dtype == "float32" else 0.5):
                raise AssertionError(f"{name}: log-probs differ by {difference:.1e} from a PyTorch forward pass")
            lines[name]["max_difference"] = float(f"{difference:.1e}")
    return list(lines.values())
