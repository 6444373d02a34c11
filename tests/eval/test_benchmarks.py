"""Benchmarks by name and from files, and the published figures."""

import json

import numpy as np
import pytest

from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.eval.benchmarks import closed_world_benchmark, find_published, load_benchmarks, published_table
from psearch_jax.types import KINDS, UserError


def test_closed_world_benchmarks_are_fixed_and_held_out():
    """A benchmark is the same at each call, and asks about entities held out from training."""
    world = small_world()
    held_out = {e.name for e in world.entities if e.held_out}
    for kind in KINDS:
        asked = closed_world_benchmark(world, kind, 10)
        assert asked == closed_world_benchmark(world, kind, 10) and len(asked) == 10
        assert {q.kind for q in asked} == {kind}
        assert all(any(name in q.text for name in held_out) for q in asked)
    asked = closed_world_benchmark(world, "many", 20)
    assert {len(q.metadata["options"]) for q in asked} == {5, 6, 7, 8} and {q.kind for q in asked} == {"parallel"}
    pairs = closed_world_benchmark(world, "pairs", 10)
    assert [q.kind for q in pairs] == ["parallel"] * 5 + ["sequential"] * 5
    assert {q.source for q in pairs} == {"closed_world:pairs"}
    known = closed_world_benchmark(world, "known", 30)
    assert len({q.text for q in known}) == 30 and not any(name in q.text for q in known for name in held_out)


def small_world():
    return ClosedWorld.make(0, persons=80, films=80, cities=60)


def test_closed_world_arguments():
    """Without a set there is one benchmark per kind; several sets can form one benchmark; bad names are refused."""
    benchmarks = load_benchmarks(["closed_world", "closed_world:many"], small_world, 5)
    assert [b.name for b in benchmarks] == [f"closed_world:{kind}" for kind in (*KINDS, "many")]
    assert all(b.closed_world and len(b.questions) == 5 for b in benchmarks)
    assert benchmarks[0].questions == closed_world_benchmark(small_world(), "parallel", 5)
    (both,) = load_benchmarks(["closed_world:parallel+sequential"], small_world, 6)
    assert [q.kind for q in both.questions] == ["parallel"] * 6 + ["sequential"] * 6
    for arguments, words in (
        (["closed_world:double"], "'double' found, accepted: parallel"),
        (["closed_world:mixed", "closed_world:mixed"], "each name once"),
        (["nq:"], "accepted: NAME:FILE"),
    ):
        with pytest.raises(UserError, match=words):
            load_benchmarks(arguments, small_world, 3)


def test_benchmark_from_a_file(shared_data):
    """A file is evaluated under the name given."""
    (benchmark,) = load_benchmarks([f"hotpotqa:{shared_data / 'hotpotqa100' / 'questions.jsonl'}"], small_world)
    assert benchmark.name == "hotpotqa" and {q.source for q in benchmark.questions} == {"hotpotqa"}
    assert [sum(q.kind == kind for q in benchmark.questions) for kind in ("parallel", "sequential")] == [22, 78]


def test_a_count_is_drawn_from_the_whole_file(tmp_path):
    """A count is sampled from the entire file, in its order; larger counts include smaller ones."""
    rows = [{"id": i, "question": f"Who is {i}?", "golden_answers": ["Ada"]} for i in range(100)]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def sampled(count):
        (benchmark,) = load_benchmarks([f"all:{tmp_path / 'all.jsonl'}"], small_world, count)
        return [int(q.id) for q in benchmark.questions]

    assert sampled(20) == sorted(sampled(20)) and len(sampled(20)) == 20 and max(sampled(20)) > 50
    assert set(sampled(20)) < set(sampled(40)) and sampled(0) == sampled(100) == sampled(500) == list(range(100))


def test_published_figures():
    """The published figures average to the averages that the paper prints."""
    averages = {}
    for (_, kind), rows in published_table().items():
        for row in () if kind else rows:
            averages.setdefault((row.method, row.model), []).append(row.em)
    instruct, base = "Qwen2.5-7B-Instruct", "Qwen2.5-7B"
    expected = {
        ("R1 (no search)", instruct): 0.271,
        ("Search-R1", instruct): 0.370,
        ("ZeroSearch", instruct): 0.391,
        ("ParallelSearch", instruct): 0.425,
        ("R1 (no search)", base): 0.276,
        ("Search-R1", base): 0.434,
        ("ParallelSearch", base): 0.458,
    }
    assert {key: len(value) for key, value in averages.items()} == dict.fromkeys(expected, 7)
    for key, average in expected.items():
        assert np.mean(averages[key]) == pytest.approx(average, abs=0.0011), key
    assert find_published("HotpotQA", "parallel")[1].decomposition_ratio == 0.943
    assert find_published("2Wiki") == find_published("2wikimultihopqa") != ()
    assert find_published("hotpotqa100") == (), "a sample of a set is not the set"
