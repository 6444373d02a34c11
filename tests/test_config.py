"""A run's configuration: an error is one clear line, and valid values round-trip unchanged."""

import dataclasses
import json

import pytest
from ml_collections import ConfigDict

from psearch_jax.config import Config, DecoderConfig, best_metric, from_mapping, to_mapping, with_method
from psearch_jax.config.setting import Resume, setting, settings_of
from psearch_jax.limits import check_fields, validate
from psearch_jax.train.checkpointing.settings import fields
from psearch_jax.types import UserError


def test_a_config_survives_json_and_config_dicts():
    """config.json and the --config flag rebuild the same config; an integer is accepted for a number."""
    config = from_mapping(ConfigDict({"seed": 3, "learning": {"learning_rate": 1}, "mesh": {"fsdp": 4}}))
    validate(config)
    assert config.learning.learning_rate == 1.0 and isinstance(config.learning.learning_rate, float)
    assert from_mapping(json.loads(json.dumps(to_mapping(config)))) == config
    validate(Config())


def test_every_field_is_declared_with_a_setting_and_a_resume_policy():
    """Fields that affect results are kept on resume; those that depend on the machine may change."""
    settings = settings_of(Config)
    assert list(settings) == list(fields(Config()))
    kept = {"seed", "learning.learning_rate", "rollout.temperature", "train.prompts"}
    free = {"train.steps", "rollout.slots", "mesh.fsdp", "retrieval.url", "learning.micro_batch_rows"}
    assert {settings[name].resume for name in kept} == {Resume.SAME_VALUE}
    assert {settings[name].resume for name in ("model.path", "data.source")} == {Resume.SAME_CONTENT}
    assert {settings[name].resume for name in free} == {Resume.FREE}


@pytest.mark.parametrize(
    ("bounds", "words", "good", "bad"),
    [
        ({"at_least": 1}, "at least 1", [1, 2], [0]),
        ({"above": 0, "at_most": 1}, "above 0, at most 1", [0.5, 1], [0, 1.5]),
        ({"at_least": 0, "below": 1}, "at least 0, below 1", [0, 0.5], [-0.1, 1]),
    ],
)
def test_bounds_are_checked_and_put_into_words(bounds, words, good, bad):
    """The message names the bounds that are checked."""
    cls = dataclasses.make_dataclass("Bounded", [("size", float, setting(1.0, "A size.", **bounds))])
    for value in good:
        check_fields(cls(value))
    for value in bad:
        with pytest.raises(UserError) as refused:
            check_fields(cls(value))
        assert str(refused.value) == f"config.size: found {value!r}, accepted: {words}"


CLOSED = {"source": "closed_world"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        # unknown keys and wrong types
        ({"sed": 1}, ["config", "'sed'", "'seed'"]),
        ({"rollout": {"slot": 1}}, ["config.rollout", "'slot'", "'slots'"]),
        ({"rollout": {"zzz": 1}}, ["config.rollout", "'zzz'", "accepted", "temperature"]),
        ({"rollout": 5}, ["config.rollout", "5", "section"]),
        ({"rollout": {"slots": "8"}}, ["config.rollout.slots", "'8'", "int"]),
        ({"rollout": {"slots": 8.0}}, ["config.rollout.slots", "8.0", "int"]),
        ({"rollout": {"slots": True}}, ["config.rollout.slots", "True", "int"]),
        ({"rollout": {"slots": None}}, ["config.rollout.slots", "None", "int"]),
        ({"rollout": {"initial_search": 1}}, ["config.rollout.initial_search", "1", "bool"]),
        ({"learning": {"learning_rate": "fast"}}, ["config.learning.learning_rate", "'fast'", "float"]),
        ({"learning": {"learning_rate": float("nan")}}, ["config.learning.learning_rate", "nan"]),
        ({"model": {"path": 7}}, ["config.model.path", "7", "str"]),
        ({"model": {"dtype": "int8"}}, ["config.model.dtype", "'int8'", "float32, bfloat16, float16"]),
        ({"model": {"preset": "8b"}}, ["config.model.preset", "'8b'", "7b"]),
        ({"method": "search-r1"}, ["config.method", "'search-r1'", "search_r1", "parallel_prompt", "r1"]),
        # values out of range
        ({"seed": -1}, ["config.seed", "-1"]),
        ({"rollout": {"slots": 0}}, ["config.rollout.slots", "0", "at least 1"]),
        ({"rollout": {"temperature": 0.0}}, ["config.rollout.temperature", "0.0"]),
        ({"learning": {"learning_rate": -1e-6}}, ["config.learning.learning_rate", "-1e-06"]),
        ({"data": {"validation_share": 1.0}}, ["config.data.validation_share", "1.0", "below 1"]),
        ({"eval": {"best_metric": "loss"}}, ["config.eval.best_metric", "'loss'", "parallel/em"]),
        ({"eval": {"best_metric": "eval/hard/em"}}, ["config.eval.best_metric", "hard", "mixed"]),
        # fields that do not agree
        ({"rollout": {"prompt_tokens": 9000}}, ["prompt_tokens=9000", "context_tokens=6196"]),
        ({"rollout": {"samples": 1}}, ["config.rollout.samples=1", "at least 2"]),
        ({"learning": {"mini_batch_rollouts": 258}}, ["258", "samples=5", "group"]),
        ({"train": {"prompts": 2}, "learning": {"mini_batch_rollouts": 20}}, ["20", "10"]),
        ({"rollout": {"top_p": 0.9}}, ["top_p=0.9", "accepted in training: top_p=1"]),
        ({"rollout": {"top_k": 50}, "learning": {"importance_cap": 2.0}}, ["top_k=50", "another distribution"]),
        (
            {"learning": {"importance_cap": 1.1, "old_logprobs": "sampler"}},
            ["importance_cap=1.1", "old_logprobs=sampler"],
        ),
        (
            {"reward": {"critical_path": 0.5}, "rollout": {"samples": 1}},
            ["config.reward.critical_path=0.5", "rollout.samples"],
        ),
        ({"reward": {"profile": "compat", "outcome": "f1"}}, ["outcome=em", "profile=compat"]),
        ({"reward": {"profile": "compat", "gated": True}}, ["gated=False", "profile=compat"]),
        ({"reward": {"critical_path": 0.5, "gated": True}}, ["config.reward.gated", "critical_path"]),
        ({"reward": {"evidence": 0.5}, "rollout": {"search_turns": 0}}, ["config.reward.evidence", "search_turns=0"]),
        ({"learning": {"kl_in": "reward"}}, ["kl_in=reward", "algorithm=ppo"]),
        ({"learning": {"kl_to": "wrong", "kl_coefficient": 0.0}}, ["kl_to=wrong", "kl_coefficient above 0"]),
        ({"train": {"scripted_steps": 5}}, ["scripted=''", "scripted_steps=5", "both or none"]),
        ({"learning": {"algorithm": "ppo"}, "train": {"dynamic_sampling_rounds": 1}}, ["dynamic_sampling_rounds"]),
        (
            {"learning": {"algorithm": "ppo"}, "critic": {"pretrain_steps": 60}, "train": {"steps": 60}},
            ["pretrain_steps"],
        ),
        ({"retrieval": {"url": "127.0.0.1:8000/retrieve"}}, ["config.retrieval.url", "http://host:port/retrieve"]),
        ({"retrieval": {"url": "http://127.0.0.1:8000"}}, ["config.retrieval.url", "http://host:port/retrieve"]),
        ({"retrieval": {"index": "i", "corpus": "c"}}, ["config.retrieval", "index and corpus"]),
        ({"data": {"source": "q.jsonl"}, "eval": {"every_steps": 5}}, ["every_steps", "5", "data.validation=FILE"]),
        ({"eval": {"every_steps": 5, "questions_per_kind": 0}, "data": CLOSED}, ["no evaluation questions"]),
        ({"data": CLOSED | {"validation": "v.jsonl"}}, ["config.data.validation", "closed world"]),
        ({"data": {"validation": "v.jsonl", "validation_share": 0.1}}, ["validation and validation_share"]),
        ({"data": {"validation": "v.jsonl"}, "eval": {"questions_per_kind": 0}}, ["questions_per_kind", "0"]),
    ],
)
def test_a_bad_config_is_refused_in_one_line(values, words):
    """The message names the field or the fields, the value found and what is accepted."""
    learning = {"mini_batch_rollouts": 40, "micro_batch_rows": 4} | values.get("learning", {})
    with pytest.raises(UserError) as caught:
        validate(from_mapping({**values, "learning": learning}))
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in words), line


def test_filters_are_accepted_where_nothing_is_learned():
    """An evaluation may sample from a filtered distribution."""
    validate(from_mapping({"rollout": {"top_p": 0.9, "top_k": 50}}), training=False)


def test_impossible_model_shapes_are_refused():
    """Heads are a multiple of kv heads, and rotary embeddings need an even head size."""
    good = dict(vocab_rows=8, width=8, layers=1, heads=4, kv_heads=2, head_dim=2, mlp=8, tied=True)
    DecoderConfig(**good)
    for changes, words in (({"kv_heads": 3}, "heads=4.*kv_heads=3"), ({"head_dim": 3}, "head_dim=3")):
        with pytest.raises(UserError, match=words):
            DecoderConfig(**{**good, **changes})


def changed(method, **sections):
    """The fields that a method changes, by dotted name."""
    config = from_mapping({"method": method, **sections})
    before = fields(config)
    return {name: value for name, value in fields(with_method(config)).items() if value != before[name]}


def test_a_baseline_changes_only_the_fields_that_define_it():
    """Baselines drop the bonuses and change the prompt; a template of the user's own stays."""
    outcome_only = {"reward.decomposition": 0.0, "reward.search_count": 0.0}
    assert changed("parallelsearch") == {}
    assert changed("parallel_prompt") == outcome_only
    assert changed("search_r1") == outcome_only | {"data.template": "sequential", "retrieval.max_sub_queries": 1}
    published = changed("search_r1", data={"template": "published"})
    assert published == changed("search_r1") | {"data.template": "published_sequential"}
    assert changed("search_r1", reward={"sub_query_penalty": 0.05})["reward.sub_query_penalty"] == 0
    assert changed("r1", rollout={"initial_search": True}) == outcome_only | {
        "data.template": "direct",
        "rollout.search_turns": 0,
        "rollout.initial_search": False,
    }
    assert "data.template" not in changed("search_r1", data={"template": "toy"})
    tools = with_method(
        from_mapping({"rollout": {"dialect": "tool_calls"}, "model": {"path": "toy", "tokenizer": "x"}})
    )
    assert (tools.model.path, tools.model.tokenizer) == ("toy_tools", "x")
    applied = with_method(from_mapping({"method": "search_r1"}))
    assert with_method(applied) == applied


def test_the_best_metric_is_accepted_as_it_is_logged():
    """A metric's name has a kind or is of all questions, with or without the prefix `eval/`."""
    assert best_metric("em") == best_metric("eval/all/em") == ("all", "em")
    assert best_metric("eval/parallel/f1") == best_metric("parallel/f1") == ("parallel", "f1")
