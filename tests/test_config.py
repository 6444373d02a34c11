"""A run's configuration: an error is one clear line, and valid values round-trip unchanged."""

import dataclasses
import json
import re

import pytest
from ml_collections import ConfigDict

from psearch_jax.config import (
    PRESETS,
    RENAMED,
    Config,
    DecoderConfig,
    best_metric,
    from_mapping,
    to_mapping,
    with_method,
)
from psearch_jax.config.setting import Resume, setting, settings_of
from psearch_jax.limits import check_fields, validate
from psearch_jax.train.checkpointing.settings import fields
from psearch_jax.types import UserError


def refused(values, *words) -> None:
    with pytest.raises(UserError) as caught:
        validate(from_mapping(values))
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in words), line


def test_defaults_and_the_round_trip_through_json():
    """config.json in a run directory would rebuild another run."""
    config = from_mapping({"seed": 3, "learning": {"learning_rate": 1}, "mesh": {"fsdp": 4}})
    validate(config)
    assert config.learning.learning_rate == 1.0 and isinstance(config.learning.learning_rate, float)
    assert from_mapping(json.loads(json.dumps(to_mapping(config)))) == config
    validate(Config())


def test_every_field_is_declared_with_a_setting():
    """A field with a plain default has no limits, no entry in the reference, and stops every run that records it."""
    assert list(settings_of(Config)) == list(fields(Config()))


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        (Resume.SAME_VALUE, ["seed", "learning.learning_rate", "rollout.temperature", "train.prompts"]),
        (Resume.SAME_CONTENT, ["model.path", "data.source", "retrieval.index"]),
        (Resume.FREE, ["train.steps", "rollout.slots", "mesh.fsdp", "retrieval.url", "learning.micro_batch_rows"]),
    ],
)
def test_fields_have_the_resume_policy_of_their_kind(policy, names):
    """A run that may not be moved to other hardware, or one that silently resumes with another learning rate."""
    assert {settings_of(Config)[name].resume for name in names} == {policy}


@pytest.mark.parametrize(
    ("bounds", "words", "good", "bad"),
    [
        ({"at_least": 1}, "at least 1", [1, 2], [0]),
        ({"above": 0}, "above 0", [0.1], [0, -1]),
        ({"above": 0, "at_most": 1}, "above 0, at most 1", [0.5, 1], [0, 1.5]),
        ({"at_least": 0, "below": 1}, "at least 0, below 1", [0, 0.5], [-0.1, 1]),
        ({"at_least": 0, "at_most": 1}, "from 0 to 1", [0, 1], [-0.1, 1.1]),
    ],
)
def test_bounds_are_checked_and_put_into_words(bounds, words, good, bad):
    """A bound whose comparison excludes the wrong side, or whose message says another bound than the one checked."""
    cls = dataclasses.make_dataclass("Bounded", [("size", float, setting(1.0, "A size.", **bounds))])
    for value in good:
        check_fields(cls(value))
    for value in bad:
        with pytest.raises(UserError) as refused:
            check_fields(cls(value))
        assert str(refused.value) == f"config.size: found {value!r}, accepted: {words}"


def test_a_config_dict_is_accepted_as_it_comes_from_the_flag():
    """Nested ConfigDicts from ml_collections, which are not dicts, would be refused."""
    config = from_mapping(ConfigDict({"rollout": {"slots": 2, "temperature": 1}, "data": {"source": "q.jsonl"}}))
    assert config.rollout.slots == 2 and config.data.source == "q.jsonl"


@pytest.mark.parametrize(
    ("values", "words"),
    [
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
        ({"learning": {"aggregation": "sum"}}, ["config.learning.aggregation", "token_mean"]),
        ({"model": {"preset": "8b"}}, ["config.model.preset", "'8b'", "7b"]),
    ],
)
def test_an_unknown_key_or_a_wrong_type_is_one_line(values, words):
    """A misspelt override that is silently ignored would train another run than the one asked for."""
    refused(values, *words)


CLOSED = {"source": "closed_world"}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rollout": {"slots": 0}}, ["config.rollout.slots", "0", "at least 1"]),
        ({"rollout": {"search_turns": -1}}, ["config.rollout.search_turns", "-1", "at least 0"]),
        ({"rollout": {"prompt_tokens": 0}}, ["config.rollout.prompt_tokens"]),
        ({"rollout": {"max_tokens_after_answer": -1}}, ["config.rollout.max_tokens_after_answer", "-1"]),
        ({"rollout": {"temperature": 0.0}}, ["config.rollout.temperature", "0.0"]),
        ({"rollout": {"top_p": 0.9}}, ["top_p=0.9", "accepted in training: top_p=1"]),
        ({"rollout": {"top_k": 5}}, ["top_k=5", "top_k=0"]),
        ({"rollout": {"top_p": 0.9}, "learning": {"importance_cap": 2.0}}, ["top_p=0.9", "another distribution"]),
        ({"rollout": {"top_k": 50}, "learning": {"importance_cap": 2.0}}, ["top_k=50", "another distribution"]),
        (
            {"learning": {"importance_cap": 1.1, "old_logprobs": "sampler"}},
            ["importance_cap=1.1", "old_logprobs=sampler"],
        ),
        ({"learning": {"dual_clip": 1.1}}, ["dual_clip=1.1", "1.2"]),
        (
            {"reward": {"parallelism": "critical_path"}, "rollout": {"samples": 1}},
            ["config.reward.parallelism", "rollout.samples"],
        ),
        ({"reward": {"profile": "compat", "outcome": "f1"}}, ["outcome=em", "profile=compat"]),
        ({"reward": {"profile": "compat", "gate_bonus_on_outcome": True}}, ["gate_bonus_on_outcome=False"]),
        ({"reward": {"profile": "compat", "mixed": "parallel"}}, ["mixed=sequential", "profile=compat"]),
        ({"rollout": {"top_p": 0.9}, "learning": {"old_logprobs": "sampler"}}, ["top_p=0.9", "another distribution"]),
        ({"rollout": {"top_p": 0.0}, "learning": {"importance_cap": 2.0}}, ["config.rollout.top_p", "0.0"]),
        ({"rollout": {"top_k": -1}, "learning": {"importance_cap": 2.0}}, ["config.rollout.top_k", "-1"]),
        ({"rollout": {"prompt_tokens": 9000}}, ["prompt_tokens=9000", "context_tokens=6196"]),
        ({"rollout": {"yield_share": 0.0}}, ["config.rollout.yield_share", "0.0"]),
        ({"learning": {"mini_batch_rollouts": 258, "micro_batch_rows": 1}}, ["258", "samples=5", "group"]),
        ({"learning": {"mini_batch_rollouts": 255, "micro_batch_rows": 2}}, ["255", "micro_batch_rows=2"]),
        ({"train": {"prompts": 2}, "learning": {"mini_batch_rollouts": 20}}, ["20", "10"]),
        ({"rollout": {"samples": 1}}, ["config.rollout.samples=1", "at least 2"]),
        ({"rollout": {"samples": 1}, "learning": {"advantage": "mean"}}, ["config.rollout.samples=1"]),
        ({"seed": -1}, ["config.seed", "-1"]),
        ({"learning": {"gradient_clip": 0.0}}, ["config.learning.gradient_clip", "0.0", "inf: no clip"]),
        ({"learning": {"learning_rate": -1e-6}}, ["config.learning.learning_rate", "-1e-06"]),
        ({"learning": {"beta2": 1.0}}, ["config.learning.beta2", "1.0", "below 1"]),
        ({"learning": {"clip_low": 1.5}}, ["config.learning.clip_low", "1.5"]),
        (
            {"data": {"source": "q.jsonl"}, "eval": {"every_steps": 5}},
            ["eval.every_steps", "5", "data.validation=FILE"],
        ),
        (
            {"eval": {"every_steps": 5, "questions_per_kind": 0}, "data": CLOSED},
            ["eval.every_steps", "no evaluation questions"],
        ),
        ({"data": CLOSED | {"validation": "v.jsonl"}}, ["config.data.validation", "closed world"]),
        ({"data": CLOSED | {"validation_share": 0.1}}, ["config.data.validation_share", "closed world"]),
        ({"data": {"validation": "v.jsonl", "validation_share": 0.1}}, ["validation and validation_share"]),
        ({"data": {"validation_share": 1.0}}, ["config.data.validation_share", "1.0", "below 1"]),
        ({"data": {"validation": "v.jsonl"}, "eval": {"questions_per_kind": 0}}, ["questions_per_kind", "0"]),
        ({"eval": {"best_metric": "loss"}}, ["config.eval.best_metric", "'loss'", "parallel/em"]),
        ({"eval": {"best_metric": "eval/hard/em"}}, ["config.eval.best_metric", "hard", "mixed"]),
    ],
)
def test_fields_at_odds_are_one_line(values, words):
    """A contradiction would stop the run only after an hour on the machine, or without naming the two fields."""
    base = {"learning": {"mini_batch_rollouts": 40, "micro_batch_rows": 4}}
    if "learning" not in values:
        values = {**values, **base}
    elif "mini_batch_rollouts" not in values["learning"]:
        values = {**values, "learning": {**base["learning"], **values["learning"]}}
    refused(values, *words)


def test_filters_are_accepted_where_nothing_is_learned():
    """The refusal of top_p would also hit an evaluation, which may sample as it likes."""
    validate(from_mapping({"rollout": {"top_p": 0.9, "top_k": 50}}), training=False)


def test_model_shapes_that_cannot_be_are_refused():
    """Query heads that the number of kv heads does not divide would be grouped wrongly."""
    good = dict(vocab_rows=8, width=8, layers=1, heads=4, kv_heads=2, head_dim=2, mlp=8, tied=True)
    DecoderConfig(**good)
    with pytest.raises(UserError, match="heads=4.*kv_heads=3"):
        DecoderConfig(**{**good, "kv_heads": 3})
    with pytest.raises(UserError, match="head_dim=3"):
        DecoderConfig(**{**good, "head_dim": 3})


def test_presets_hold_published_shapes():
    """A head size would be computed where Qwen3's is published, or the other way round."""
    for name, config in PRESETS.items():
        expected = 128 if config.qk_norm else config.width // config.heads
        assert dataclasses.is_dataclass(config) and config.head_dim == expected, name


def changed(method, **sections):
    """The fields that a method changes, as {section.field: value}."""
    config = from_mapping({"method": method, **sections})
    before, after = to_mapping(config), to_mapping(with_method(config))
    return {
        f"{section}.{name}": value
        for section, values in after.items()
        if isinstance(values, dict)
        for name, value in values.items()
        if value != before[section][name]
    }


def test_a_baseline_differs_in_what_makes_it_one():
    """A baseline with another learning rate, or that keeps a bonus, would say nothing about the method."""
    outcome_only = {"reward.decomposition": 0.0, "reward.search_count": 0.0}
    assert changed("parallelsearch") == {}
    assert changed("parallel_prompt") == outcome_only
    assert changed("search_r1") == outcome_only | {"data.template": "sequential", "retrieval.max_sub_queries": 1}
    published = changed("search_r1", data={"template": "published"})
    assert published == changed("search_r1") | {"data.template": "published_sequential"}
    assert changed("r1", rollout={"initial_search": True}) == outcome_only | {
        "data.template": "direct",
        "rollout.search_turns": 0,
        "rollout.initial_search": False,
    }


def test_a_template_of_the_users_own_stays():
    """The toy policy, which knows only its own prompt, would get another one."""
    assert "data.template" not in changed("search_r1", data={"template": "toy"})
    once = with_method(from_mapping({"method": "search_r1"}))
    assert with_method(once) == once, "engine and trainer both apply it"


def test_the_best_metric_is_read_as_it_is_logged():
    """A name copied from metrics.jsonl would be refused, or one kind's metric be taken for that of all questions."""
    assert best_metric("em") == best_metric("eval/all/em") == ("all", "em")
    assert best_metric("eval/parallel/f1") == best_metric("parallel/f1") == ("parallel", "f1")


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_renamed_field_is_refused_with_its_new_name(old, new):
    """A config of an older version ends in a list of all fields, and its user has to guess which one is meant."""
    _, section, field = old.split(".")
    with pytest.raises(UserError, match=f"^{re.escape(old)}: this field is now called {re.escape(new)}$"):
        from_mapping({section: {field: 1}})
    _, section, field = new.split(".")
    assert hasattr(getattr(Config(), section), field)


def test_an_unknown_method_is_refused():
    """A misspelt baseline would train the full method."""
    refused({"method": "search-r1"}, "config.method", "'search-r1'", "search_r1", "parallel_prompt", "r1")
