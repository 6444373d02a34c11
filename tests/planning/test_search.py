"""The search for the fastest settings that fit a machine, and the expected seconds that it compares."""

import math
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from programs import ROOT

from psearch_jax.config import PRESETS, from_mapping, with_method
from psearch_jax.limits import validate
from psearch_jax.planning import expected
from psearch_jax.planning import search as searching
from psearch_jax.planning.plan import make_plan, model_shape
from psearch_jax.planning.search import (
    LEARNING,
    SAMPLING,
    SLOTS,
    _from_the_fastest,
    least_bytes,
    search,
    with_changes,
    write_config,
)
from psearch_jax.planning.targets import Target, tpu_target
from psearch_jax.runtime.accelerators import CHIPS, GPUS, Chip, forward_flops
from psearch_jax.sharding import can_regroup, check_rows, make_meshes, mesh_sizes
from psearch_jax.types import UserError


def config_file(name, **changes):
    """A config of configs/ with some fields of sections changed."""
    values = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"]().to_dict()
    for section, fields in changes.items():
        values[section] |= fields
    return from_mapping(values)


def job(**changes):
    """A step of 320 rollouts of 1.5B."""
    config = config_file("qwen1p5b", **({"train": {"prompts": 64}} | changes))
    return expected.Job(PRESETS["1.5b"], config, 3000.0, 600.0)


@pytest.mark.slow
def test_the_search_ends_at_the_fastest_that_fits(tmp_path):
    """Settings that do not fit, or slower ones than others that fit; or a config file that is not what was chosen."""
    budgets = {
        "slots": 2,
        "samples": 2,
        "context_tokens": 512,
        "prompt_tokens": 256,
        "obs_tokens": 128,
        "num_buckets": 1,
    }
    batches = {"mini_batch_rollouts": 2, "micro_batch_rows": 1}
    config = config_file("smoke", model={"path": "", "preset": "toy"}, rollout=budgets, learning=batches)
    target, log = Target("here", jax.devices()[:1], Chip(64_000_000, 1e12, 1e12), "cpu"), []
    settings = search(config, target, 400, 100, log.append)
    tried = [re.fullmatch(r"(.*): ([\d.e+-]+) s, (fits|does not fit)", line).groups() for line in log]
    for field in ("learning.micro_batch_rows", "rollout.slots"):
        of_kind = [(float(seconds), verdict) for shown, seconds, verdict in tried if field in shown]
        assert [verdict for _, verdict in of_kind] == ["does not fit"] * (len(of_kind) - 1) + ["fits"], log
        assert of_kind[-1][0] >= 0.97 * of_kind[0][0], "the first ones tried are the fastest"
    assert 2 < settings.changes["rollout.slots"] < max(SLOTS) and settings.changes["mesh.tensor"] == 1
    plan = make_plan(with_changes(config, settings.changes), target)
    assert plan.fits and plan.headroom_bytes < 0.5 * target.chip.hbm_bytes
    write_config(tmp_path / "mine.py", ROOT / "configs" / "smoke.py", settings.changes, "here", "1 s expected")
    written = from_mapping(runpy.run_path(str(tmp_path / "mine.py"))["get_config"]().to_dict())
    assert written == with_changes(config_file("smoke"), settings.changes)
    tiny = replace(target, chip=replace(target.chip, hbm_bytes=1_000_000))
    assert search(config, tiny, 400, 100, log.append) is None


def test_similar_times_are_tried_in_their_own_order():
    """More slots, and less memory to spare, for a gain that the model of the time cannot tell."""
    assert _from_the_fastest([2.0, 1.02, 1.0, 1.04, 2.05]) == [1, 2, 3, 0, 4]
    assert _from_the_fastest([1.0, 0.99, 0.96]) == [2, 0, 1]


def test_training_and_sampling_are_divided_separately(monkeypatch):
    """A search that gives the sampler the mesh of training, or a sampler that does not fit; slots that its mesh does
    not divide; or that ends with the first choice that does not fit."""
    asked = []

    def plan(config, target, names, **_):
        _, rollout_mesh = make_meshes(config.mesh, target.devices)
        check_rows(rollout_mesh, rollout__slots=config.rollout.slots)
        asked.append((names, config))
        fits = config.model.remat == "full" if names == LEARNING else rollout_mesh.shape["tensor"] == 4
        return SimpleNamespace(fits=fits and (names == LEARNING or config.rollout.slots <= 128))

    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'jax[tpu]'")
    monkeypatch.setattr(searching, "make_plan", plan)
    devices = tpu_target("v6e:4x4").devices
    target = Target("v6e:4x4", devices, CHIPS["TPU v6 lite"], "v6e")
    config = config_file("qwen7b")
    settings = search(config, target, 3098, 600, lambda _: None)
    mesh = {"mesh.data": 1, "mesh.fsdp": -1, "mesh.tensor": 1, "mesh.rollout_tensor": 4}
    assert settings.changes == {**mesh, "rollout.slots": 128, "model.remat": "full", "learning.micro_batch_rows": 64}
    # Compared with the config's own mesh, whose sums over `tensor` are those of 4 for both.
    one_mesh = expected.Machine(target.chip, 16, 4)
    of_config = expected.Job(PRESETS["7b"], config, 3098, 600)
    assert sum(settings.seconds.values()) < 0.75 * sum(
        [
            *expected.learning_seconds(of_config, one_mesh, expected.Shares()).values(),
            *expected.sampling_seconds(
                of_config, one_mesh, 128, expected.typical_step(of_config, 128), expected.Shares()
            ).values(),
        ]
    )
    assert all(config.mesh.tensor == 1 for names, config in asked if names == SAMPLING)
    monkeypatch.setattr(searching, "make_plan", lambda *_, names, **__: SimpleNamespace(fits=names == LEARNING))
    assert search(config, target, 3098, 600, lambda _: None) is None


def test_what_the_search_refuses(tmp_path):
    """A search that ignores a division of the devices, a file that is overwritten after minutes of compiling, or
    lengths that no rollout has."""
    target = Target("here", jax.devices()[:1], Chip(64_000_000, 1e12, 1e12), "cpu")
    with pytest.raises(UserError, match="--search: found config.mesh.rollout_devices=1, accepted: 0"):
        search(config_file("smoke", mesh={"rollout_devices": 1}), target, 400, 100, print)
    old = tmp_path / "old.py"
    old.write_text("")
    for flags, line in (
        ((f"--write={tmp_path / 'new.py'}",), "accepted: with --search"),
        ((f"--write={old}", "--search"), "accepted: a new file"),
        (("--mean_ids=100", "--sampled_ids=80", "--prompt_ids=30"), "found 100, 80, 30, accepted: 0 < sampled_ids"),
    ):
        command = [sys.executable, "launch/plan.py", "--config=configs/smoke.py", "--topology=t4", *flags]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 2 and line in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["smoke", "smoke_lora"])
def test_nothing_that_fits_is_ruled_out_by_counting(name):
    """Settings that fit are never tried, because a count that is meant as a lower bound exceeds the compiler's."""
    lora = {"model": {"path": "", "preset": "toy", "lora_rank": 4 if name == "smoke_lora" else 0, "remat": "none"}}
    budgets = {"slots": 4, "context_tokens": 512, "prompt_tokens": 256, "obs_tokens": 128, "num_buckets": 1}
    batches = {"mini_batch_rollouts": 8, "micro_batch_rows": 2}
    config = config_file("smoke", rollout=budgets, learning=batches, **lora)
    target = Target("here", jax.devices()[:1], Chip(2**40, 1e12, 1e12), "cpu")
    for names, program in ((SAMPLING, "generate"), (LEARNING, "accumulate")):
        plan = make_plan(config, target, names=(program,))
        assert 0 < least_bytes(config, plan.model, 1, names) < plan.programs[program].total_bytes


def test_the_count_of_adapters_without_fsdp():
    """One chip samples adapters from the frozen weights, which are counted once: 7B fits chips of 32 GB."""
    config = config_file("qwen7b_lora", rollout={"slots": 32})
    chip = CHIPS["TPU v6 lite"]
    plan = make_plan(config, Target("v6e", jax.devices()[:1], chip, "v6e"), names=())
    counted = least_bytes(config, plan.model, 1, SAMPLING)
    held = plan.resident["frozen_base"] + plan.resident["sampler_state"]
    assert plan.in_place and plan.resident["frozen_base"] < counted < min(held, chip.hbm_bytes)
    unequal = config_file("qwen7b_lora", rollout={"slots": 32}, model={"int8_weights": True})
    assert least_bytes(unequal, plan.model, 1, SAMPLING) > counted


def test_expected_seconds():
    """Communication that costs nothing, or costs where an axis has one device; work that more chips share and that
    takes as long as before."""
    chip, none = CHIPS["TPU v5 lite"], replace(CHIPS["TPU v5 lite"], link=math.inf)
    shares, step = expected.Shares(0.5, 0.5, 1.0), expected.typical_step(job(), 64)

    def seconds(chip, chips, tensor, of=None):
        where = expected.Machine(chip, chips, tensor)
        sampling = expected.sampling_seconds(of or job(), where, 64, step, shares)
        return sampling | expected.learning_seconds(of or job(), where, shares)

    one, four, split, free = (seconds(*at) for at in ((chip, 1, 1), (chip, 4, 1), (chip, 4, 4), (none, 4, 4)))
    for name in ("prefill and extend", "logprobs", "update"):
        assert one[name] == pytest.approx(4 * free[name]), "without communication, chips divide the work"
        assert free[name] < split[name], "sums over tensor take time"
        assert four[name] == pytest.approx(free[name]), "weights are gathered while products run"
    # By hand, a decode step of one chip: weights, and half of the final cache, in 16 bits.
    m = PRESETS["1.5b"]
    cache = 2 * m.layers * m.kv_heads * m.head_dim * 2 * 64 * 1500
    moved = forward_flops(m, [1], 1) + cache
    assert one["decode"] == pytest.approx(step.decode_steps * moved / (0.5 * chip.bandwidth))
    assert seconds(replace(chip, link=1e8), 4, 1)["update"] > 2 * four["update"], "then gathers take longer"
    lora = job(model={"lora_rank": 8})
    passes = 3 + (lora.config.model.remat == "full")
    assert seconds(chip, 1, 1, lora)["update"] == pytest.approx(one["update"] * (passes - 1) / passes)
    int8 = seconds(chip, 1, 1, job(model={"int8_weights": True}))["decode"]  # embedding and head stay in 16 bits
    bytes_read = forward_flops(m, [1], 1) / 2 + m.vocab_rows * m.width + cache
    assert int8 == pytest.approx(step.decode_steps * bytes_read / (0.5 * chip.bandwidth))
    assert seconds(chip, 1, 1, job(learning={"algorithm": "ppo"}))["critic"] > one["update"]
    # Two kv heads over four chips: each holds both, and reads complete rows.
    whole = expected.sampling_seconds(job(), expected.Machine(none, 4, 4), 64, step, shares)["decode"]
    span = 2 * m.layers * m.kv_heads * m.head_dim * 2 * 64 * job().config.rollout.context_tokens
    moved = forward_flops(m, [1], 1) / 4 + span
    hops = step.decode_steps * 2 * m.layers * 6 * expected.HOP_S
    assert whole == pytest.approx(step.decode_steps * moved / (0.5 * chip.bandwidth) + hops)


def test_a_typical_step():
    """More slots that take more decode steps, or rollouts that sample another number of tokens."""
    few, many = (expected.typical_step(job(), slots) for slots in (64, 256))
    assert many.decode_steps < few.decode_steps and few.row_steps == many.row_steps
    assert few.row_steps == pytest.approx(320 * 600, rel=0.1)
    assert few.decode_steps > few.row_steps / 64


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "machines").glob("*.py")), ids=lambda file: file.stem)
def test_the_configs_of_machines(file):
    """A config for a machine that changes what is learned, that contradicts itself, or that cannot fit the machine."""
    about = file.read_text()
    base, topology = re.match(r'"""(\w+)\.py with settings for ([\w:-]+), by launch/plan\.py --search', about).groups()
    config = from_mapping(runpy.run_path(str(file))["get_config"]().to_dict())
    chosen = ("mesh.tensor", "mesh.rollout_tensor", "rollout.slots", "learning.micro_batch_rows", "model.remat")
    changes = {name: getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in chosen}
    assert config == with_changes(config_file(base), changes)
    validate(config)
    name, _, count = topology.partition(":")
    if name in GPUS:
        chip, chips = GPUS[name], int(count or 1)
    else:
        pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'jax[tpu]'")
        target = tpu_target(topology)
        chip, chips = target.chip, len(target.devices)
    sizes = mesh_sizes(config.mesh, chips)
    assert can_regroup(*sizes[1:], config.mesh.rollout_tensor)
    assert config.learning.micro_batch_rows % (chips // config.mesh.tensor) == 0
    assert config.rollout.slots % (chips // config.mesh.rollout_tensor) == 0
    for names in (LEARNING, SAMPLING):
        assert least_bytes(with_method(config), model_shape(config), chips, names) < chip.hbm_bytes
