"""Plans for absent TPUs and GPUs: the memory of every chip, and refused configs."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from helpers import collectives_in_loops
from programs import ROOT, completed
from runs import small_config

from psearch_jax.config import Config, ModelSection, from_mapping
from psearch_jax.models.buckets import buckets
from psearch_jax.planning.plan import ProgramMemory, advice, bare_sampler, make_plan, model_shape
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


def test_adapters_from_a_file_are_planned_as_adapters(tiny_policy, tmp_path):
    config = small_config(tiny_policy)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 3, "lora_alpha": 6}')
    from_file, by_rank = (
        make_plan(replace(config, model=replace(config.model, **fields)), cpu_target(), names=())
        for fields in ({"adapters": str(tmp_path)}, {"lora_rank": 3, "lora_alpha": 6.0})
    )
    assert from_file.resident == by_rank.resident and from_file.checkpoint_bytes == by_rank.checkpoint_bytes
    assert from_file.resident["frozen_base"] > from_file.resident["parameters"]


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


def test_every_width_is_compiled():
    """A narrower shape, with another form of attention, may need more memory than the widest."""
    budgets = {"slots": 8, "context_tokens": 512, "prompt_tokens": 64, "obs_tokens": 256, "num_buckets": 2}
    config = config_file("smoke", model={"path": "", "preset": "toy"}, rollout=budgets)
    lines, widths = [], buckets(256, 2)
    plan = make_plan(config, cpu_target(), lines.append, names=("extend",))
    assert [int(line.split()[1].strip(":")) for line in lines] == list(widths)
    assert len(lines) == 2 and plan.programs["extend"].width in widths


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


def test_topologies_are_checked():
    with pytest.raises(UserError, match="--topology=v5e:3x5.*accepted: names such as v5e:4x4"):
        tpu_target("v5e:3x5")
    with pytest.raises(UserError, match="--topology=h2000: accepted for GPUs: h200"):
        cuda_target("h2000")
    v4 = tpu_target("v4:2x2x1")
    assert len(v4.devices) == 4 and v4.chip.hbm_bytes > 30 * GIB, "both cores of a chip are one device"


def test_shapes_are_known_without_weights():
    assert model_shape(Config(model=ModelSection(path="Qwen/Qwen2.5-14B-Instruct"))).layers == 48
    assert model_shape(Config(model=ModelSection(path="Qwen/Qwen2.5-0.5B"))).layers == 24
    shape = model_shape(Config(model=ModelSection(path="Qwen/Qwen3-4B-Instruct-2507")))
    assert (shape.qk_norm, shape.layers, shape.head_dim) == (True, 36, 128)
    assert model_shape(Config(model=ModelSection(path="toy", preset="7b"))).width == 128
    for name in ("some/model", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3.5-9B"):
        with pytest.raises(UserError, match=f"config.model.path={name}: .*no known size in the name; accepted: names"):
            model_shape(Config(model=ModelSection(path=name)))


def test_advice_names_the_fields_to_change(qwen7b):
    config, room = config_file("qwen7b"), qwen7b.chip.hbm_bytes
    programs = {
        "generate": ProgramMemory(0, 0, 1.0, refused="20.1 GiB of temporaries, 15.75 available"),
        "accumulate": ProgramMemory(room, GIB, 1.0),
        "apply": ProgramMemory(room - GIB, GIB, 1.0),
    }
    plan = replace(qwen7b, programs=programs)
    assert not plan.fits
    refused, over = advice(plan, config)
    assert refused.startswith("generate does not fit even on its own (20.1") and "config.rollout.slots=128" in refused
    assert over.startswith("accumulate is 1.00 GiB over: lower config.learning.micro_batch_rows=16 (a multiple of 4)")


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
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        *[(f"NVIDIA {other}", None) for other in ("L40S", "RTX A1000 Laptop GPU", "GH200 480GB", "T400 4GB")],
        *[(f"NVIDIA {other}", None) for other in ("H100 PCIe", "A100-PCIE-40GB", "H100 NVL")],
    ],
)
def test_peaks_are_those_of_the_card(kind, name):
    assert chip_of(SimpleNamespace(platform="gpu", device_kind=kind)) == GPUS.get(name)


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
    plan = make_plan(config, target, names=())
    held = plan.resident["sampling_copy"] + 1.2 * plan.resident["sampler_state"]
    assert compiled.memory_analysis().peak_memory_in_bytes < held, "a copy of the cache would make it 2"


def test_the_check_for_collectives_sees_them():
    gather = "(p: f32[2]) -> f32[2] {\n  %g = bf16[1024,1024]{1,0} all-gather(bf16[256,1024] %p), dimensions={0}\n}\n"
    turns = "ENTRY %main () -> f32[2] {\n  %w = f32[2] while(%p), condition=%c, body=%body\n}\n"
    assert len(collectives_in_loops(f"%body {gather}{turns}", 2**20)) == 1
    assert not collectives_in_loops(f"%other {gather}{turns}", 2**20)


@pytest.mark.weekly
def test_the_largest_training_program_keeps_no_attention_scores(target):
    """An update of 6,656 positions fits in memory, which it would not with the scores of its attention."""
    fields = {"model": {"path": "", "preset": "0.5b"}, "mesh": {"tensor": 2}, "rollout": {"num_buckets": 1}}
    plan = make_plan(config_file("qwen7b", **fields), target, names=("accumulate",))
    program, rows = plan.programs["accumulate"], 16 // plan.mesh["fsdp"]
    scores = 4 * rows * (plan.model.heads // 2) * program.width**2  # of one layer on one chip, in float32
    assert program.peak_bytes - plan.resident["parameters"] < scores


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
