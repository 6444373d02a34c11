"""The paper's method and its baselines, as changes to a config."""

from __future__ import annotations

import dataclasses
from typing import Any

from psearch_jax.config.sections import Config, DataSection, Method

# The fields that each baseline changes. Prompt templates other than the default one are kept.
_OUTCOME_ONLY = {"decomposition": 0.0, "search_count": 0.0}
_METHODS: dict[Method, dict[str, dict[str, Any]]] = {
    "parallelsearch": {},
    "parallel_prompt": {"reward": _OUTCOME_ONLY},
    "search_r1": {"data": {"template": "sequential"}, "retrieval": {"max_sub_queries": 1}, "reward": _OUTCOME_ONLY},
    "r1": {
        "data": {"template": "direct"},
        "rollout": {"search_turns": 0, "initial_search": False},
        "reward": _OUTCOME_ONLY,
    },
}


def with_method(config: Config) -> Config:
    """Sets the fields in which the config's `method` differs from the others (arXiv 2508.09303, section 4).

    - parallelsearch: changes nothing;
    - parallel_prompt: the prompt explains splitting, and only answer and format are rewarded;
    - search_r1: one query per search (text after `##` is ignored), and only answer and format are rewarded;
    - r1: no search, and only answer and format are rewarded.
    """
    sections = dict(_METHODS[config.method])
    if config.data.template != DataSection.template:
        sections.pop("data", None)
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)
