"""The tools and the dialect that a config names."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import replace

from psearch_jax.config import Config, RolloutSection
from psearch_jax.rollout.calculator import CALCULATOR
from psearch_jax.rollout.mcp_tools import open_server
from psearch_jax.rollout.tools import SEARCH_SCHEMA, Tool, from_function
from psearch_jax.runtime.own_code import load_object
from psearch_jax.text.dialects import Dialect, Tags, ToolCalls
from psearch_jax.text.prompts import load_template
from psearch_jax.text.tags import SEARCH_OPEN
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.checkpointing.settings import hash_texts
from psearch_jax.types import SEARCH, UserError

FIELD, DIALECT_FIELD = "config.rollout.tools", "config.rollout.dialect"
_DIALECTS: dict[str, type[Dialect]] = {"tags": Tags, "tool_calls": ToolCalls}


def make_tools(section: RolloutSection) -> list[Tool]:
    """The tools besides the search. Runs the code of files and modules, and connects to servers.

    Raises:
      UserError: a tool that does not exist or cannot be opened, or two of one name.
    """
    tools: list[Tool] = []
    for spec in filter(None, map(str.strip, section.tools.split(","))):
        kind, _, rest = spec.partition(":")
        if spec == CALCULATOR.name:
            tools.append(CALCULATOR)
        elif kind == "mcp" and rest:
            tools += open_server(rest, section.tool_timeout_s)
        elif rest:
            tools.append(_own_tool(spec))
        else:
            raise UserError(
                f"{FIELD}: {spec!r} found, accepted: {CALCULATOR.name}, FILE.py:NAME, MODULE:NAME, mcp:TARGET"
            )
    names = [SEARCH, *(tool.name for tool in tools)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{FIELD}: two tools of the name {twice[0]} found, accepted: different names")
    return tools


def describe_tools(section: RolloutSection, tools: Sequence[Tool]) -> tuple[str, str]:
    """What `rollout.tools` names, and a fingerprint: of the schemas of the tools, and of a user's files."""
    schemas = [json.dumps(tool.schema, sort_keys=True) for tool in tools]
    digests = [tool.identity for tool in tools if tool.identity]
    return section.tools, hash_texts(*schemas, *digests) if section.tools else ""


def _own_tool(spec: str) -> Tool:
    value, digest = load_object(spec, FIELD)
    if isinstance(value, Tool) or inspect.isfunction(value):
        return replace(value if isinstance(value, Tool) else from_function(value), identity=digest)
    raise UserError(f"{FIELD}: {spec} is neither a function nor a Tool, accepted: the name of one")


def make_dialect(config: Config, tokenizer: Tokenizer, tools: Sequence[Tool] = ()) -> Dialect:
    """The dialect that a config names.

    Raises:
      UserError: the prompt template explains another dialect, or a user's dialect cannot be loaded.
    """
    section, name = config.rollout, config.data.template
    made = _DIALECTS.get(section.dialect) or load_object(section.dialect, DIALECT_FIELD)[0]
    if not (isinstance(made, type) and issubclass(made, Dialect)):
        raise UserError(f"{DIALECT_FIELD}={section.dialect}: no Dialect found, accepted: a class of that kind")
    if tools and issubclass(made, Tags):
        raise UserError(f"{FIELD}={section.tools}: found with {made.__name__}, accepted: a dialect that calls tools")
    if made is ToolCalls and not config.data.prompts_in_rows and SEARCH_OPEN in load_template(name):
        raise UserError(
            f"config.data.template={name}: explains {SEARCH_OPEN}, accepted with rollout.dialect=tool_calls: "
            "tool_calls, or a file of your own"
        )
    schemas = [SEARCH_SCHEMA] * (section.search_turns > 0) + [tool.schema for tool in tools]
    return made(tokenizer, section.obs_tokens, config.retrieval.max_sub_queries, schemas=schemas)


def describe_dialect(section: RolloutSection) -> tuple[str, str]:
    """What `rollout.dialect` names, and a fingerprint: the name, or the SHA-256 of a user's file."""
    named = section.dialect
    return named, named if named in _DIALECTS else load_object(named, DIALECT_FIELD)[1]
