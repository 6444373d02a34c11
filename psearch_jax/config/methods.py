"""The paper's method and its baselines, as changes to a config."""

from __future__ import annotations

import dataclasses
from typing import Any

from psearch_jax.config.sections import Config, Method

# The fields that each baseline changes.
_PRICES = ("sub_query_penalty", "no_search_penalty")
_OUTCOME_ONLY = dict.fromkeys(("critical_path", "decomposition", "search_count", "evidence", *_PRICES), 0.0)
_METHODS: dict[Method, dict[str, dict[str, Any]]] = {
    "parallelsearch": {},
    "parallel_prompt": {"reward": _OUTCOME_ONLY},
    "search_r1": {"retrieval": {"max_sub_queries": 1}, "reward": _OUTCOME_ONLY},
    "r1": {
        "rollout": {"search_turns": 0, "initial_search": False},
        "reward": _OUTCOME_ONLY,
    },
}
# The packaged templates that a baseline replaces, and by which; all other templates are kept.
_TEMPLATES: dict[str, dict[Method, str]] = {
    "parallel": {"search_r1": "sequential", "r1": "direct"},
    "published": {"search_r1": "published_sequential", "r1": "direct"},
}


_TOY_FIELDS = ("path", "tokenizer")


def with_method(config: Config) -> Config:
    """Sets the fields in which the config's `method` differs from the others (arXiv 2508.09303, section 4).

    - parallelsearch: changes nothing;
    - parallel_prompt: the prompt explains splitting, and only answer and format are rewarded;
    - search_r1: one query per search (text after `##` is ignored), and only answer and format are rewarded;
    - r1: no search, and only answer and format are rewarded.

    Also names the toy policy that writes the config's dialect.
    """
    named = config.data.template
    template = _TEMPLATES.get(named, {}).get(config.method, named)
    sections = {"data": {"template": template}, **_METHODS[config.method]}
    if config.rollout.dialect == "tool_calls":
        model, teacher = config.model, config.learning.teacher
        toys = {"toy": "toy_tools"}
        sections["model"] = {name: toys.get(getattr(model, name), getattr(model, name)) for name in _TOY_FIELDS}
        sections["learning"] = {"teacher": toys.get(teacher, teacher)}
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)
