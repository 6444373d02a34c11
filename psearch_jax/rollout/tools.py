"""Tools: what a policy can call, and how the calls of all waiting rollouts run, one batch per tool.

The search is the first tool. It is a part of the method: its failure is an error of the step (docs/architecture.md).
Other tools may fail, hang or be called wrongly without ending a run: the policy gets one line that says so.
"""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import jsonschema
from jsonschema.exceptions import best_match
from transformers.utils.chat_template_utils import get_json_schema

from psearch_jax.text.tool_calls import QUERY
from psearch_jax.types import SEARCH, TOOL_ERROR, TOOL_TIMEOUT, Call, UserError, first_line
from retrieval.protocol import Passage, RetrievalError, Retriever, as_utf8, in_background, in_utf8

log = logging.getLogger("psearch_jax")
_FAILED = "error:"  # begins the text of a failed call
_LATE = f"{_FAILED} no response"

Calls = Mapping[int, tuple[Call, ...]]  # order of a rollout (rollouts.Rollout) -> its calls
Passages = dict[int, tuple[tuple[Passage, ...], ...]]  # order of a rollout -> the passages of each call
Arguments = Mapping[str, Any]

SEARCH_SCHEMA = {
    "type": "function",
    "function": {
        "name": SEARCH,
        "description": "Returns the passages of an encyclopedia that match a query best.",
        "parameters": {
            "type": "object",
            "properties": {QUERY: {"type": "string", "description": "What to look up."}},
            "required": [QUERY],
        },
    },
}


@dataclass(frozen=True)
class Tool:
    """A tool other than the search.

    Attributes:
      name: by which it is called.
      description: for the model.
      parameters: the JSON schema of its arguments.
      batch: the arguments of N calls -> N texts. It may be called from any thread, by one at a time. A call that fails
        on its own returns an error's text; an exception fails all of them.
      timeout_s: instead of that of the toolbox.
      identity: of a user's tool, the SHA-256 of its file.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    batch: Callable[[Sequence[Arguments]], Sequence[str]]
    timeout_s: float | None = None
    identity: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates and the API of OpenAI take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def from_function(function: Callable[..., Any]) -> Tool:
    """A tool that calls a function with type hints and a Google-style docstring, once for each call of a batch.

    Raises:
      UserError: the schema cannot be derived from its signature and docstring.
    """
    try:
        schema = get_json_schema(function)["function"]
    except Exception as error:  # of the docstring's format, or of a type
        raise UserError(
            f"{inspect.getsourcefile(function)}: {function.__name__}: {first_line(error)}, accepted: a function with "
            "type hints and a docstring that describes it and has a section `Args`"
        ) from error

    def call(arguments: Arguments) -> str:
        try:
            return str(function(**arguments))
        except Exception as error:
            return failure(f"{type(error).__name__}: {first_line(error)}")

    def batch(calls: Sequence[Arguments]) -> list[str]:
        return [call(arguments) for arguments in calls]

    return Tool(schema["name"], schema["description"], schema["parameters"], batch)


def failure(reason: str) -> str:
    """The text of a failed call."""
    return f"{_FAILED} {' '.join(reason.split())[:300]}"


def late(seconds: float) -> str:
    """The text of a call without a response."""
    return f"{_LATE} in {seconds:g} s"


def _result(text: str) -> Passage:
    return Passage(
        TOOL_TIMEOUT if text.startswith(_LATE) else TOOL_ERROR if text.startswith(_FAILED) else "", "", text
    )


@dataclass(frozen=True)
class Toolbox:
    """Runs the calls of many rollouts.

    Args:
      retriever: None if the budgets allow no search.
      topk: passages per query.
      tools: those other than the search.
      budget: calls of each tool in a rollout; 0: any number.
      timeout_s: seconds for a batch of a tool, after which its calls fail.
    """

    retriever: Retriever | None
    topk: int
    tools: Sequence[Tool] = ()
    budget: int = 0
    timeout_s: float = 30.0
    _running: dict[str, Future] = field(default_factory=dict)  # the last batch of each tool

    def run(self, calls: Calls) -> Passages:
        """The results of all calls: passages of a search, best first; of another tool one passage without a title.

        Raises:
          RetrievalError: the search failed.
        """
        flat = [call for of_rollout in calls.values() for call in of_rollout]
        results: list[tuple[Passage, ...]] = [()] * len(flat)
        accepted: dict[str, dict[int, Arguments]] = {}  # of each tool, by the index of the call
        for i, call in enumerate(flat):
            arguments, problem = self._check(call)
            if problem:
                results[i] = (Passage(TOOL_ERROR, "", failure(problem)),)
            else:
                accepted.setdefault(call.tool, {})[i] = arguments
        searches = accepted.pop(SEARCH, {})
        started = {name: self._start(self._by_name[name], list(batch.values())) for name, batch in accepted.items()}
        for i, ranking in zip(searches, self._search([flat[i].text for i in searches]), strict=True):
            results[i] = ranking
        for name, future in started.items():
            for i, passage in zip(accepted[name], self._await(name, future, len(accepted[name])), strict=True):
                results[i] = (passage,)
        by_call = iter(results)
        return {order: tuple(next(by_call) for _ in of_rollout) for order, of_rollout in calls.items()}

    @functools.cached_property
    def _by_name(self) -> dict[str, Tool]:
        return {tool.name: tool for tool in self.tools}

    def _check(self, call: Call) -> tuple[Arguments, str]:
        """The arguments of a call, and what is wrong with it, in one line; "" if nothing is."""
        if call.tool == SEARCH:
            return {QUERY: call.text}, "" if call.text else f"{QUERY}: a text is required"
        if call.tool not in self._by_name:
            return {}, f"no tool {call.tool[:40]!r}, there are: {', '.join([SEARCH, *self._by_name])}"
        tool, arguments = self._by_name[call.tool], json.loads(call.text)
        if self.budget and call.number >= self.budget:
            return {}, f"all {self.budget} calls of {tool.name} were made"
        try:
            error = best_match(jsonschema.Draft202012Validator(tool.parameters).iter_errors(arguments))
        except RecursionError:
            return arguments, "arguments: nested too deeply"
        # str(error) would format the complete arguments, which fails if they are nested deeply
        where = "" if error is None else ".".join(map(str, error.path)) or "arguments"
        return arguments, "" if error is None else f"{where}: {error.message}"

    def _start(self, tool: Tool, arguments: Sequence[Arguments]) -> Future | None:
        """Starts a batch in the background; None if the last one has not ended, since a batch that hangs stays."""
        if tool.name in self._running and not self._running[tool.name].done():
            return None
        self._running[tool.name] = in_background(functools.partial(tool.batch, arguments))
        return self._running[tool.name]

    def _search(self, queries: Sequence[str]) -> list[tuple[Passage, ...]]:
        rankings = self.retriever.search(list(queries), self.topk) if queries and self.retriever else []
        if len(rankings) != len(queries):
            raise RetrievalError(f"the retriever returned {len(rankings)} rankings for {len(queries)} queries")
        return [tuple(map(in_utf8, ranking)) for ranking in rankings]

    def _await(self, name: str, future: Future | None, count: int) -> list[Passage]:
        """The results of a batch of `count` calls, each as a passage."""
        own = self._by_name[name].timeout_s
        timeout_s = self.timeout_s if own is None else own
        if future is None:
            return [Passage(TOOL_TIMEOUT, "", failure(f"{name} does not respond"))] * count
        if not concurrent.futures.wait([future], timeout_s).done:
            log.warning("%s did not respond in %g s; its %d calls fail", name, timeout_s, count)
            return [_result(late(timeout_s))] * count
        try:
            texts = [as_utf8(str(text)) for text in future.result()]
            if len(texts) != count:
                raise ValueError(f"{len(texts)} results for {count} calls")
        except BaseException as error:  # also what a library in another language raises
            log.warning("%s failed: %s", name, first_line(error))
            texts = [failure(f"{type(error).__name__}: {first_line(error)}")] * count
        return [_result(text) for text in texts]
