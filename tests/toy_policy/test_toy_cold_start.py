"""The cold start: the names in its batches, and how it resumes."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict, replace

import pytest
from programs import ROOT, Program, completed, wait_until

from experiments.toy.cold_start import Batches, ToySFTConfig, make_rows
from psearch_jax.closed_world.names import is_new
from retrieval.service import RetrievalService

SMALL = ToySFTConfig(
    steps=24,
    worlds=1,
    trajectories_per_world=60,
    exercise_rows=40,
    tokens_per_batch=512,
    log_every_steps=1,
    checkpoint_every_steps=4,
)


@pytest.fixture(scope="module")
def rows(tokenizer):
    return make_rows(SMALL, tokenizer, RetrievalService.from_corpus)


def test_no_name_comes_twice_and_no_new_one_at_all(tokenizer, rows):
    """Names do not repeat, and none is a new one of the closed world."""
    config = replace(SMALL, steps=400)
    batches = Batches(config, tokenizer, rows)
    first, later = set(), set()
    for step in range(150, 250):
        skill, (piece,) = batches[step]
        if skill == "recalling":
            continue
        text = "\n".join(tokenizer.decode(row) for row in piece.ids)
        names = {word for word in text.replace("'s", " ").replace("?", " ").split() if _is_name(word)}
        assert names and not any(is_new(name) for name in names)
        (first if step < 200 else later).update(names)
    assert len(first & later) < 0.02 * len(first)


def _is_name(word: str) -> bool:
    return len(word) == 7 and word.isalpha() and word[0].isupper() and word[1:].islower()


def command(workdir, **fields) -> list[str]:
    settings = [f"--config.{name}={value}" for name, value in {**asdict(SMALL), **fields}.items() if name != "seed"]
    return [str(ROOT / "experiments" / "toy" / "__main__.py"), f"--workdir={workdir}", *settings]


@pytest.mark.slow
def test_a_killed_cold_start_goes_on(tmp_path):
    """A killed cold start resumes to the same files as an uninterrupted one."""
    uninterrupted, killed = tmp_path / "whole", tmp_path / "killed"
    done = completed([sys.executable, *command(uninterrupted)])
    assert done.returncode == 0, done.stderr[-2000:]
    process = Program(command(killed))
    wait_until(lambda: any(p.name.isdigit() for p in (killed / "checkpoints").glob("*")), 300)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (killed / "policy").exists()
    again = completed([sys.executable, *command(killed)])
    assert again.returncode == 0 and "resuming after step" in again.stderr, again.stderr[-2000:]
    for name in ("model.safetensors", "tokenizer.json"):
        assert (uninterrupted / "policy" / name).read_bytes() == (killed / "policy" / name).read_bytes()
    steps = [json.loads(line)["step"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, SMALL.steps + 1))
    refused = completed([sys.executable, *command(killed)])
    assert refused.returncode == 2 and "exists already" in refused.stderr
    other = completed([sys.executable, *command(tmp_path / "whole", steps=41)])
    assert other.returncode == 2
