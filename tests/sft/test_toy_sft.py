"""The cold start: its batches, its initial weights, and how it resumes."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
from programs import ROOT, Program, completed, wait_until

from psearch_jax.closed_world.names import is_new
from psearch_jax.config import PRESETS
from psearch_jax.sft import cold_start
from psearch_jax.sft.cold_start import BUCKETS, SKILLS, Batches, ToySFTConfig, make_rows, make_run
from psearch_jax.sft.trainer import train
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


def test_rows_of_every_skill(tokenizer, rows):
    """Every skill has rows, every row has trained tokens, and the arguments determine the rows."""
    assert tuple(sorted(rows)) == tuple(sorted(SKILLS))
    assert all(len(ids) == len(mask) and mask.any() for members in rows.values() for ids, mask in members)
    again = make_rows(SMALL, tokenizer, RetrievalService.from_corpus)
    for skill, members in rows.items():
        for (ids, mask), (others, theirs) in zip(members, again[skill], strict=True):
            assert np.array_equal(ids, others) and np.array_equal(mask, theirs)


def test_batches_follow_from_seed_and_step(tokenizer, rows):
    """Seed and step determine a batch, and there are few shapes."""
    batches, again = (Batches(SMALL, tokenizer, rows) for _ in range(2))
    shapes, skills = set(), set()
    for step in range(SMALL.steps):
        skill, (piece,) = batches[step]
        other, (same,) = again[step]
        ids, mask = piece.ids, piece.mask
        assert skill == other and np.array_equal(ids, same.ids) and np.array_equal(mask, same.mask)
        assert ids.shape == mask.shape and ids.shape[1] in BUCKETS and mask.any()
        assert ids.size <= max(SMALL.tokens_per_batch, ids.shape[1])
        shapes.add(ids.shape)
        skills.add(skill)
    assert len(shapes) <= len(BUCKETS) and len(skills) > 3


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


def test_sft_learns(tokenizer, rows, tmp_path):
    """A few steps lower the loss, and the shape fits the tokenizer."""
    only = {skill: rows["copying"] for skill in SKILLS}
    train(make_run(replace(SMALL, steps=60), tokenizer, only), tmp_path)
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    losses = [value for values in lines for name, value in values.items() if name.endswith("/loss")]
    assert len(losses) == 60 and np.mean(losses[-5:]) < np.mean(losses[:5]) - 1
    shape = cold_start.policy_shape(tokenizer)
    assert shape.vocab_rows >= tokenizer.size and shape.layers == PRESETS["toy"].layers


def command(workdir, **fields) -> list[str]:
    settings = [f"--config.{name}={value}" for name, value in {**asdict(SMALL), **fields}.items() if name != "seed"]
    return [str(ROOT / "launch" / "sft.py"), "--config=configs/toy_sft.py", f"--workdir={workdir}", *settings]


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
