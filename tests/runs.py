"""Training runs as the tests start and read them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from flax import nnx

from psearch_jax.config import Config, from_mapping
from psearch_jax.train import checkpoint

ROOT = Path(__file__).resolve().parent.parent
SMALL = {
    "rollout.slots": 8,
    "rollout.samples": 2,
    "rollout.context_tokens": 256,
    "rollout.turn_tokens": 24,
    "rollout.obs_tokens": 128,
    "rollout.search_turns": 1,
    "learning.mini_batch_rollouts": 4,
    "learning.micro_batch_rows": 4,
    "train.prompts": 4,
    "train.checkpoint_every_steps": 2,
    "eval.questions_per_kind": 2,
    "eval.also_greedy": False,
}


def command(workdir: Path, policy: Path, steps: int, config: str = "smoke", **fields) -> list[str]:
    values = {**SMALL, "model.path": policy, "train.steps": steps, **fields}
    flags = [f"--config.{name}={value}" for name, value in values.items()]
    return [sys.executable, "launch/train.py", f"--config=configs/{config}.py", f"--workdir={workdir}", *flags]


def run(arguments: list[str], expect: int = 0) -> subprocess.CompletedProcess:
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == expect, done.stderr[-3000:]
    return done


def metrics_without_clocks(workdir: Path) -> list[dict]:
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith(("_s", "_per_s"))} for row in rows]


def final_params(workdir: Path) -> dict[str, np.ndarray]:
    _, params, _ = checkpoint.load_params(checkpoint.find_checkpoint(workdir))
    return {".".join(path): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(params)}


def assert_same_params(workdir: Path, other: Path) -> None:
    """Equal up to the rounding of another mesh.

    Where a gradient is nothing but rounding, AdamW makes a whole step of it: of a few entries everywhere, and of all
    key biases, which attention does not depend on.
    """
    theirs = final_params(other)
    for name, value in final_params(workdir).items():
        far = np.abs(value - theirs[name]) > 1e-5 * np.abs(theirs[name]).max() + 1e-7
        assert far.mean() <= 0.01 or name.endswith("k_bias"), (name, far.mean())


def wait_for(condition, process: subprocess.Popen, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it was interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def small_config(policy: Path, **fields) -> Config:
    sections: dict[str, dict] = {"data": {"source": "closed_world", "template": "toy", "world_questions": 200}}
    for name, value in {**SMALL, "model.path": str(policy), "rollout.prompt_tokens": 64, **fields}.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    sections["model"] |= {"dtype": "float32", "sampling_dtype": "float32"}
    return from_mapping(sections)
