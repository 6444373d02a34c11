"""Starts training runs for tests and reads their results."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from helpers import by_name, same_bits
from programs import Program, completed, wait_until

from psearch_jax.assembly.questions import make_world, training_questions
from psearch_jax.config import Config, from_mapping
from psearch_jax.data.scripted_transcripts import transcript_row
from psearch_jax.data.transcripts import TranscriptTurn
from psearch_jax.train.checkpointing import checkpoint

SMALL = {
    "rollout.slots": 8,
    "rollout.samples": 2,
    "rollout.context_tokens": 256,
    "rollout.turn_tokens": 24,
    "rollout.obs_tokens": 128,
    "rollout.search_turns": 1,
    "rollout.num_buckets": 1,  # every width costs a compilation
    "data.world_questions": 200,
    # The other terms pay a random policy nothing. Without a signal, AdamW takes full steps along rounding errors.
    "reward.terms": f"{Path(__file__).with_name('terms.py')}:last_digit=1.0",
    "learning.kl_coefficient": 0.001,
    "learning.decay_ratio": 0.0,  # the rates do not depend on train.steps
    "learning.mini_batch_rollouts": 4,
    "learning.micro_batch_rows": 4,
    "train.prompts": 4,
    "train.checkpoint_every_steps": 2,
    "eval.questions_per_kind": 2,
    "eval.temperature": 0.0,
}


def command(workdir: Path, policy: Path, steps: int, config: str = "smoke", **fields) -> list[str]:
    values = {**SMALL, "model.path": policy, "train.steps": steps, **fields}
    flags = [f"--config.{name}={value}" for name, value in values.items()]
    return [sys.executable, "launch/train.py", f"--config=configs/{config}.py", f"--workdir={workdir}", *flags]


def run(arguments: list[str], expect: int = 0) -> subprocess.CompletedProcess:
    done = completed(arguments)
    assert done.returncode == expect, done.stderr[-3000:]
    return done


def metrics_without_clocks(workdir: Path) -> list[dict]:
    """A run's metrics without times, and without costs, which depend on the mesh and the processes."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.endswith(("_s", "_per_s")) and k[:5] != "cost/"} for row in rows]


def final_params(workdir: Path) -> dict[str, np.ndarray]:
    return by_name(checkpoint.load_params(checkpoint.find_checkpoint(workdir))[1])


def assert_same_run(workdir: Path, other: Path) -> None:
    """Metrics, trajectories and parameters are equal to the bit, and something was learned."""
    rows = metrics_without_clocks(workdir)
    assert rows == metrics_without_clocks(other) and any(row["groups_without_signal"] < 1 for row in rows)
    ours, theirs = final_params(workdir), final_params(other)
    assert ours.keys() == theirs.keys() and same_bits(ours, theirs)
    files = sorted(file.name for file in (other / "trajectories").iterdir())
    assert files == sorted(file.name for file in (workdir / "trajectories").iterdir())
    for name in files:
        assert (workdir / "trajectories" / name).read_bytes() == (other / "trajectories" / name).read_bytes()


def assert_same_params(workdir: Path, other: Path) -> None:
    """Equal up to the rounding of another mesh.

    Where a gradient is only rounding noise, AdamW still takes a full step. That concerns a few entries everywhere, and
    all key biases, because attention does not depend on them.
    """
    theirs = final_params(other)
    for name, value in final_params(workdir).items():
        far = np.abs(value - theirs[name]) > 1e-5 * np.abs(theirs[name]).max() + 1e-7
        assert far.mean() <= 0.05 or name.endswith("k_bias"), (name, far.mean())


def wait_for(condition, process: Program, seconds: float = 300) -> None:
    def holds() -> bool:
        if condition():
            return True
        assert process.poll() is None, f"the run ended too early: {process.communicate()[1]}"
        return False

    wait_until(holds, seconds)


def small_config(policy: Path, **fields) -> Config:
    sections: dict[str, dict] = {"data": {"source": "closed_world", "template": "toy"}}
    for name, value in {**SMALL, "model.path": str(policy), "rollout.prompt_tokens": 64, **fields}.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = value
    sections["model"] = {"dtype": "float32", "sampling_dtype": "float32", **sections["model"]}
    return from_mapping(sections)


def write_transcripts(file: Path, config: Config) -> Path:
    """Transcripts of every second training question of the closed world: a split search, then an answer."""
    world = make_world(config)
    turns = [TranscriptTurn("<think> a </think><search> a ## b </search>", ("a", "b"), (world.passages[:1],) * 2)]
    turns.append(TranscriptTurn("<think> a </think><answer> 1815 </answer>"))
    rows = [transcript_row(question, turns) for question in training_questions(config, world)[::2]]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


# ---- several processes ----

SEVERAL = {"rollout.search_turns": 2, "eval.questions_per_kind": 0, "learning.mini_batch_rollouts": 8}
SEVERAL |= {"train.prompts": 8}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(arguments: list[str], devices: int = 1, **streams) -> Program:
    """Starts one process with `devices` devices; stdout and stderr are pipes unless `streams` says otherwise."""
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    return Program(arguments, environment, **streams)


def start_run(count: int, devices: int, workdir: Path, policy: Path, steps: int, **fields) -> list[Program]:
    """Starts the processes of one run over count x devices devices."""
    several = [f"--coordinator=127.0.0.1:{free_port()}", f"--processes={count}"] if count > 1 else []
    started = []
    for i in range(count):
        number = [f"--process={i}"] if several else []
        started.append(start([*command(workdir, policy, steps, **SEVERAL | fields), *several, *number], devices))
    return started


def ended(started: list[Program], seconds: float = 600) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each process."""
    deadline = time.monotonic() + seconds
    results = []
    try:
        for process in started:
            out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
            results.append((process.returncode, out, err))
    finally:
        for process in started:
            process.kill()
    return results
