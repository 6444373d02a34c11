"""Plans for absent TPUs and GPUs: the memory of every chip, and refused configs."""

import json
import math
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from programs import ROOT, completed

from psearch_jax.config import FAMILIES, from_mapping
from psearch_jax.planning.plan import bare_sampler, make_plan, model_shape
from psearch_jax.planning.roofline import lower_bounds
from psearch_jax.planning.targets import Target, cuda_target, tpu_target
from psearch_jax.rollout.sampler import SamplerShapes
from psearch_jax.runtime.accelerators import GIB, GPUS, Chip, chip_of
from psearch_jax.sharding import make_mesh
from psearch_jax.types import UserError

pytest.importorskip("libtpu", reason="libtpu is not installed: pip install 'jax[tpu]'")
SHORT = {"context_tokens": 1024, "prompt_tokens": 256, "obs_tokens": 256, "slots": 16, "num_buckets": 1}


def config_file(name, **changes):
    """A config of configs/ with some fields of sections changed."""
    sys.path.insert(0, str(ROOT / "configs"))
    values = __import__(name).get_config().to_dict()
    for section, fields in changes.items():
        values[section] |= fields
    return from_mapping(values)


@pytest.fixture(scope="module")
def target():
    return tpu_target("v5e:4x4")


@pytest.fixture(scope="module")
def qwen7b(target):
    """The plan of configs/qwen7b.py, without a compilation."""
    return make_plan(config_file("qwen7b"), target, names=("start",))


def cpu_target():
    return Target("cpu", jax.devices()[:1], Chip(2**34, 1e12, 1e12), "cpu")


def test_every_chip_holds_its_share(qwen7b):
    share = 7.6e9 / 16
    assert qwen7b.resident["parameters"] == pytest.approx(4 * share, rel=0.01)
    assert qwen7b.resident["optimizer"] == pytest.approx(8 * share, rel=0.01)
    assert qwen7b.resident["reference"] == pytest.approx(2 * share, rel=0.01)
    assert qwen7b.resident["sampling_copy"] == pytest.approx(2 * 7.6e9 / 4, rel=0.01), "split over tensor only"
    cache = 2 * 28 * (128 / 4) * (4 / 4) * 6196 * 128 * 2
    assert cache < qwen7b.resident["sampler_state"] < 1.02 * cache
    start = 2 * qwen7b.resident["parameters"] + qwen7b.resident["optimizer"] + qwen7b.resident["reference"]
    assert qwen7b.programs["start"].total_bytes == start, "the weights are loaded before the state is built from them"
    assert qwen7b.chips == 16 and qwen7b.fits and qwen7b.headroom_bytes > 0


def test_the_sampler_may_have_another_tensor():
    mesh = {"tensor": 1, "rollout_tensor": 4}
    config = config_file("qwen7b", model={"path": "", "preset": "1.5b"}, mesh=mesh, rollout=SHORT)
    plan = make_plan(config, tpu_target("v5e:2x4"), names=())
    assert plan.mesh == {"data": 1, "fsdp": 8, "tensor": 1}
    assert plan.rollout_mesh == {"data": 1, "fsdp": 2, "tensor": 4}
    weights = 1544e6
    assert plan.resident["parameters"] == pytest.approx(4 * weights / 8, rel=0.01)
    assert plan.resident["sampling_copy"] == pytest.approx(2 * weights / 4, rel=0.1)  # kv heads are not split


def test_adapters_share_a_frozen_base():
    config = config_file("qwen7b_lora", rollout={"slots": 2})
    four = tpu_target("v5e:2x2")
    plan = make_plan(config, replace(four, devices=four.devices[:1]), names=())
    assert plan.resident["frozen_base"] == pytest.approx(2 * 7.6e9, rel=0.01)
    assert plan.resident["reference"] == 0
    assert plan.resident["parameters"] == pytest.approx(4 * 81e6, rel=0.01)
    assert plan.resident["optimizer"] == pytest.approx(2 * plan.resident["parameters"], rel=0.01)
    m, rows, positions = model_shape(config), config.rollout.slots, config.rollout.context_tokens
    cache = 2 * 2 * m.layers * rows * m.kv_heads * positions * m.head_dim  # keys and values of two bytes
    assert cache < plan.resident["sampler_state"] < 1.05 * cache


def test_a_critic_counts_next_to_every_program():
    """Policy and critic share their frozen base, which counts once."""
    model = {"path": "", "preset": "toy", "lora_rank": 4}
    names = ("apply", "critic_apply")
    grpo, ppo = (
        make_plan(
            config_file("qwen7b", model=model, mesh={"tensor": 1}, rollout=SHORT, learning={"algorithm": algorithm}),
            cpu_target(),
            names=names,
        )
        for algorithm in ("grpo", "ppo")
    )
    assert set(grpo.programs) == {"apply"} and set(ppo.programs) == set(names)
    held = ppo.resident
    assert held["critic_optimizer"] == pytest.approx(2 * held["critic"], rel=0.01)
    assert held["critic"] == pytest.approx(held["parameters"], rel=0.05) and grpo.resident["critic"] == 0
    more = ppo.programs["apply"].resident_bytes - grpo.programs["apply"].resident_bytes
    assert more == held["critic"] + held["critic_optimizer"]
    others = ("parameters", "optimizer", "frozen_base", "reference")
    assert ppo.programs["critic_apply"].resident_bytes == sum(held[name] for name in others)
    assert held["frozen_base"] > 0 and held["reference"] == 0


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("rollout", {"context_tokens": 400_000}, "at most the model's 32768 positions"),
        ("train", {"prompts": 66}, "a multiple of the 4 processes"),
        ("mesh", {"tensor": 8, "fsdp": 2}, "config.mesh.tensor: found 8, accepted for 28 query heads"),
        ("rollout", {"slots": 126}, "config.rollout.slots: found 126, accepted: a multiple"),
        ("learning", {"micro_batch_rows": 2}, "config.learning.micro_batch_rows: found 2, accepted: a multiple"),
    ],
)
def test_configs_that_a_run_would_refuse_are_refused(target, section, fields, message):
    groups = {"rollout": {"samples": 4}, "learning": {"mini_batch_rollouts": 66 * 4, "micro_batch_rows": 8}}
    config = config_file("qwen7b", **(groups if section == "train" else {}) | {section: fields})
    with pytest.raises(UserError, match=message):
        make_plan(config, target, names=())


def test_hub_ids_name_the_sizes_of_every_family():
    for family in FAMILIES.values():
        for preset, shape in family.presets.items():
            for prefix in family.hub_prefixes:
                assert (
                    model_shape(from_mapping({"model": {"path": f"org/{prefix}{preset}-Instruct".title()}})) is shape
                )


def test_topologies_are_checked():
    with pytest.raises(UserError, match="--topology=v5e:3x5.*accepted: names such as v5e:4x4"):
        tpu_target("v5e:3x5")
    with pytest.raises(UserError, match="--topology=h2000: accepted for GPUs: h200"):
        cuda_target("h2000")
    v4 = tpu_target("v4:2x2x1")
    assert len(v4.devices) == 4 and v4.chip.hbm_bytes > 30 * GIB, "both cores of a chip are one device"


def test_lower_bounds_by_hand(qwen7b):
    seconds = lower_bounds(qwen7b, config_file("qwen7b"), 2000, 500, 250)
    layers, head = 28 * (3584 * (28 + 8) * 128 + 28 * 128 * 3584 + 3 * 3584 * 18_944), 152_064 * 3584
    scores = 2 * 28 * 28 * 128 * 2000**2
    forward = 2560 * (2 * layers * 2000 + 2 * head * 500 + scores) / (16 * 197e12)
    read = (2560 * (2000 - 500 - 250) + 512 * 250) / (2560 * 2000)  # share of the tokens
    assert seconds["update"] == pytest.approx(4 * forward) and seconds["logprobs"] == pytest.approx(2 * forward)
    assert seconds["prefill"] == pytest.approx(read * 2560 * (2 * layers * 2000 + scores) / (16 * 197e12))
    weights = qwen7b.resident["sampling_copy"] - 152_064 * 3584 * 2 / 4  # without the input embedding table
    step_bytes = weights + 2 * 28 * 1 * 128 * 2 * 32 * 1000
    assert seconds["decode"] == pytest.approx(2560 * 500 / 128 * step_bytes / 819e9)
    assert seconds["critic"] == 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        *[(f"NVIDIA {other}", None) for other in ("L40S", "RTX A1000 Laptop GPU", "H100 PCIe", "A100-PCIE-40GB")],
    ],
)
def test_peaks_are_those_of_the_card(kind, name):
    assert chip_of(SimpleNamespace(platform="gpu", device_kind=kind)) == GPUS.get(name)


SIZES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "u8": 1, "s8": 1, "pred": 1}


def collectives_in_loops(text: str, least_bytes: int, kinds: str = "all-gather") -> list[str]:
    """The operations of `kinds`, a regular expression, in loops of a compiled program that output `least_bytes`."""
    computations: dict[str, list[str]] = {}
    for line in text.splitlines():
        if opened := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            computations[opened[1]] = body = []
        elif line.startswith("  "):
            body.append(line.strip())
    called = {
        name: set(re.findall(r"(?:calls|to_apply|body|condition|computations?)=\{?%?([\w.-]+)", " ".join(lines)))
        for name, lines in computations.items()
    }
    waiting = re.findall(r" while\(.*body=%?([\w.-]+)", text)
    inside: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in inside:
            inside.add(name)
            waiting += called.get(name, ())
    matching = []
    for line in (line for name in sorted(inside) for line in computations.get(name, ())):
        match = re.match(rf"(?:ROOT )?\S+ = (.*?) (?:{kinds})(?:-start)?\(", line)
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1]) if match else ()
        sizes = [math.prod(int(d) for d in dims.split(",") if d) * SIZES.get(kind, 8) for kind, dims in shapes]
        if max(sizes, default=0) >= least_bytes:
            matching.append(line[:160])
    return matching


@pytest.mark.weekly
def test_decoding_neither_gathers_weights_nor_copies_the_cache(target):
    model = {"path": "", "preset": "7b"}  # the kernel needs heads of 128
    config = config_file("qwen7b", model=model, rollout={"num_buckets": 1})
    mesh, r = make_mesh(config.mesh, target.devices), config.rollout
    sampler = bare_sampler(config, model_shape(config), mesh)
    shapes = SamplerShapes.of(r, mesh, sampler.by_length)
    state = sampler.abstract_state(shapes.slots, shapes.positions)
    (generate,) = (program for program in sampler.programs(shapes) if program.name == "generate")
    compiled = generate.compile(max(generate.widths))
    text = compiled.as_text()
    assert "while" in text and not collectives_in_loops(text, 2**18), "weights or logits are gathered for each token"
    positions = str(state.cache.v.shape[-2])
    assert not [line for line in collectives_in_loops(text, 2**20, "copy") if positions in line]
    plan = make_plan(config, target, names=("extend",))  # whose kernel takes many queries
    assert plan.fits
    held = plan.resident["sampling_copy"] + 1.2 * plan.resident["sampler_state"]
    assert compiled.memory_analysis().peak_memory_in_bytes < held, "a copy of the cache would make it 2"


def test_the_check_for_collectives_sees_them():
    gather = "(p: f32[2]) -> f32[2] {\n  %g = bf16[1024,1024]{1,0} all-gather(bf16[256,1024] %p), dimensions={0}\n}\n"
    turns = "ENTRY %main () -> f32[2] {\n  %w = f32[2] while(%p), condition=%c, body=%body\n}\n"
    assert len(collectives_in_loops(f"%body {gather}{turns}", 2**20)) == 1
    assert not collectives_in_loops(f"%other {gather}{turns}", 2**20)


@pytest.mark.slow
def test_the_program_prints_tables_and_writes_json(tmp_path):
    fields = {"model.path": "", "model.preset": "toy", "mesh.tensor": 2}
    # With few slots the compiler of libtpu 0.0.42 aborts in `admit`.
    fields |= {f"rollout.{name}": SHORT[name] for name in ("context_tokens", "prompt_tokens", "num_buckets")}
    command = ["launch/plan.py", "--config=configs/qwen7b.py", "--topology=v5e:2x4", f"--json={tmp_path / 'p.json'}"]
    done = completed([*command, *(f"--config.{name}={value}" for name, value in fields.items())])
    assert done.returncode == 0, done.stderr[-2000:]
    plan = json.loads((tmp_path / "p.json").read_text())
    assert plan["fits"] is True and plan["chips"] == 8 and plan["topology"] == "v5e:2x4"
    for name in ("accumulate", "apply", "extend", "generate", "logprobs", "reshard"):
        assert 0 < plan["programs"][name]["total_bytes"] < plan["chip"]["hbm_bytes"]
    assert "| accumulate |" in done.stdout and "headroom" in done.stdout and "a step takes at least" in done.stdout
