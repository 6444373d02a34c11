"""Evaluation: rows on disk, the engine, and what makes an evaluation the same one."""

import copy
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers import (
    PASSAGES,
    ScriptedSampler,
    make_collector,
    make_sampler,
    random_params,
    rollout_section,
    tiny_config,
)
from helpers import question as plain_question

from psearch_jax.config import Lora, from_mapping
from psearch_jax.eval.evaluate import (
    evaluate,
    evaluate_benchmarks,
    policy_settings,
    trajectory_row,
    weights_digest,
    write_results,
)
from psearch_jax.eval.scores import group_by_kind, score, summarise
from psearch_jax.models import lora
from psearch_jax.rollout.sampling import id_words, row_keys
from psearch_jax.types import Question, Trajectory, Turn, UserError


def search(*queries, n=5):
    return Turn("<search>", "search", True, queries, tuple((PASSAGES[0],) for _ in queries), None, n)


SPLIT = Trajectory(
    Question("test", "0", "Who is older?", ("Ada Lovelace",), "parallel"),
    0,
    "answered",
    (search("a", "b"), Turn("<answer>", "answer", True, answer="Ada Lovelace", n_sampled=4)),
    np.zeros(3, np.int32),
    np.zeros(3, bool),
    np.zeros(3, np.float32),
    3,
)


def scripted(tokenizer, texts, rollout):
    """Collector, parameters and questions; the rollout of question i samples the i-th list of turns."""
    config = tiny_config(tokenizer.size + 6)
    sampler = make_sampler(tokenizer, config, cls=ScriptedSampler)
    sampler.after = min(tokenizer.stop_ids)
    questions = [plain_question(i, kind=kind) for i, (kind, _) in enumerate(texts)]
    keys = row_keys(3, 5, [id_words(q.source, q.id) for q in questions], [0] * len(questions))
    token_ids = [[i for turn in turns for i in tokenizer.encode_foreign(turn)] for _, turns in texts]
    sampler.scripts = {(int(a), int(b)): ids for (a, b), ids in zip(keys, token_ids, strict=True)}
    return make_collector(tokenizer, sampler, rollout), random_params(config), questions


def test_evaluation_runs_the_training_engine(tiny_tokenizer):
    """Evaluation uses the training engine; its trajectories are in order, and its figures those of the scripts."""
    a_search = "<think> x </think><search> Ada ## Alan </search>"
    an_answer = "<think> y </think><answer> Ada Lovelace </answer>"
    texts = [("parallel", (a_search, an_answer)), ("sequential", (an_answer,)), ("parallel", (an_answer,))]
    collector, params, questions = scripted(tiny_tokenizer, texts, rollout_section(slots=2, context_tokens=256))
    seen = []
    options = {"seed": 3, "step": 5, "temperature": 1.0, "progress": lambda done, of: seen.append((done, of))}
    trajectories = evaluate(collector, collector.sampler.weights(params), questions, **options)
    assert [t.question.id for t in trajectories] == ["0", "1", "2"] and seen[-1] == (3, 3)
    kinds = {kind: summarise(group) for kind, group in group_by_kind(map(score, trajectories)).items()}
    expected = {"em": 1.0, "decomposition_ratio": 0.5, "sub_queries": 1.0, "turns": 1.5, "valid_format": 1.0}
    assert {name: kinds["parallel"][name] for name in expected} == expected and kinds["sequential"]["turns"] == 1
    row = trajectory_row(trajectories[0], None, 5)
    assert len(row["ids"]) == len(row["mask"]) == len(row["logprobs"]) > 0
    assert sum(row["mask"]) == sum(turn["n_sampled"] for turn in row["turns"])
    assert [p["title"] for p in row["turns"][0]["passages"][1]][0] == "Alan Turing"


def test_parts_are_not_done_twice(tmp_path):
    """A resumed evaluation repeats only its unfinished part, and refuses other settings and broken rows."""
    all_questions = [Question("set", str(i), f"{i}?", ("x",), "single") for i in range(7)]
    sets = {"a": all_questions[:4], "b": all_questions[4:]}
    seen = []

    def roll_out(questions, progress):
        seen.append([q.id for q in questions])
        if len(seen) == 3:
            raise KeyboardInterrupt
        progress(1, 2 * len(questions))
        return [replace(SPLIT, question=q, sample=s) for q in questions for s in range(2)]

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        evaluate_benchmarks(out, sets, {"seed": 1}, roll_out, 3)
    with pytest.raises(UserError, match="holds results with seed 1, found 2"):
        evaluate_benchmarks(out, sets, {"seed": 2}, None, 3)
    with pytest.raises(UserError, match="questions.b '3 .*, found None"):
        evaluate_benchmarks(out, {"a": all_questions[:4]}, {"seed": 1}, None, 3)
    scores = evaluate_benchmarks(out, dict(reversed(sets.items())), {"seed": 1}, roll_out, 3)
    assert seen == [["0", "1", "2"], ["3", "4", "5"], ["6"], ["6"]]
    assert {name: [(s.id, s.sample) for s in group] for name, group in scores.items()} == {
        "a": [(str(i), s) for i in range(4) for s in range(2)],
        "b": [(str(i), s) for i in range(4, 7) for s in range(2)],
    }
    write_results(out, {"benchmarks": {name: {} for name in sets}}, "table")
    assert sorted(p.name for p in out.iterdir()) == ["a.jsonl", "b.jsonl", "results.json", "results.md"]
    assert evaluate_benchmarks(out, sets, {"seed": 1}, None, 3) == scores
    for line in ('{"benchmark": "a", "sou', "[1]", "{}"):
        (out / "a.jsonl").write_text(line)
        with pytest.raises(UserError, match="a.jsonl: line 1: .*accepted: a row of an evaluation"):
            evaluate_benchmarks(out, sets, {"seed": 1}, None, 3)


def test_the_results_of_something_else_are_not_an_evaluation(tmp_path):
    """A directory with a foreign results.json is refused and left as it is."""
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(UserError, match="results.json: not the results of an evaluation"):
        evaluate_benchmarks(tmp_path, {"a": [SPLIT.question]}, {"seed": 1}, None, 3)
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_other_gold_facts_are_another_evaluation(tmp_path):
    """Questions with other metadata are another evaluation."""
    evaluate_benchmarks(tmp_path / "out", {"a": [SPLIT.question]}, {"seed": 1}, lambda asked, progress: [SPLIT], 3)
    other = replace(SPLIT.question, metadata={"supporting_titles": ["B"]})
    with pytest.raises(UserError, match=r"questions\.a"):
        evaluate_benchmarks(tmp_path / "out", {"a": [other]}, {"seed": 1}, None, 3)


def test_settings_of_a_policy_name_what_changes_its_rollouts(tiny_tokenizer, tmp_path):
    """Prompt, own code, passages, sub-queries, the tokenizer and the scale of adapters are settings, by content."""
    shape, prompt = tiny_config(), tmp_path / "prompt.txt"
    params = lora.join_adapters(random_params(shape), lora.init_adapters(shape, Lora(2, 4.0), 0))
    other = copy.copy(tiny_tokenizer)
    other.identity = (*tiny_tokenizer.identity[:1], "[0]", tiny_tokenizer.identity[2])

    def settings(text="As asked: {question}", ranking="r", tokenizer=tiny_tokenizer, code="", corpus="c", **changes):
        prompt.write_text(text)
        config = from_mapping({"data": {"template": str(prompt)}, **changes})
        passages = {"corpus": corpus, "corpus_sha256": corpus, "ranking_sha256": ranking, "rows": 3}
        own = {"rollout.tools": ("tools.py:ROLL", code)}
        return json.dumps(policy_settings(config, tokenizer, params, passages, own), sort_keys=True)

    changes = [{"text": "Briefly: {question}"}, {"ranking": "s"}, {"tokenizer": other}]
    changes += [{"retrieval": {"max_sub_queries": 1}}, {"model": {"lora_alpha": 8.0}}, {"code": "another file"}]
    changes += [{"retrieval": {"service": f"{name}.py:Own"}} for name in "ab"]
    changes += [{"corpus": None, "retrieval": {"url": f"http://{host}/retrieve"}} for host in ("a", "b")]
    assert len({settings(), *(settings(**change) for change in changes)}) == 1 + len(changes)
    assert settings(retrieval={"url": "http://a/retrieve"}) == settings(), "a server that describes its passages moves"
    assert settings(model={"lora_rank": 2}) == settings()  # which the weights tell
    assert json.loads(settings())["retrieval"]["corpus"] == "", "the config's field, not the name that a server gives"


def test_digest_of_weights(tiny_tokenizer):
    """The digest changes with any bit and with the order of values, not with how they are stored."""
    config = tiny_config(tiny_tokenizer.size + 6)
    params = random_params(config)
    leaves, tree = jax.tree.flatten(params)
    changed = [leaves[0].at[(0,) * leaves[0].ndim].multiply(1 + 1e-6), *leaves[1:]]
    reordered = [x[::-1] for x in leaves]
    assert weights_digest(params) == weights_digest(random_params(config))
    assert len({weights_digest(jax.tree.unflatten(tree, x)) for x in (leaves, changed, reordered)}) == 3
