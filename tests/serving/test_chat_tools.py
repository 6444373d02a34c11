"""Tool calls over HTTP: OpenAI's client, an agent framework, and requests that are refused."""

from __future__ import annotations

import json

import pytest
from calls import ADA, ALAN, SUM, give, tool_collector
from helpers import random_params
from serving import Running
from written import CONFIG

from psearch_jax.rollout.calculator import CALCULATOR
from psearch_jax.serving.answerer import Answerer
from psearch_jax.serving.chat import make_app
from psearch_jax.text.tool_calls import write_calls
from psearch_jax.types import Question

openai = pytest.importorskip("openai", reason="the openai client is not installed")

THINK, ANSWER = "<think>a</think>\n", "<think>b</think>\n<answer>Ada</answer>"
BIRTHS = {"type": "function", "function": {"name": "born", "description": "A year.", "parameters": {"type": "object"}}}
BORN = [("born", {"name": "Ada"}), ("born", {"name": "Alan"})]
CALLED = THINK + "\n".join(
    f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in BORN
)

DEEP: dict = {"type": "object"}
for _ in range(150):
    DEEP = {"type": "object", "not": DEEP}


@pytest.fixture(scope="module")
def served(tiny_tokenizer):
    """A server whose policy writes what a test says, and the function with which it says so."""
    collector = tool_collector(tiny_tokenizer, (CALCULATOR,))
    answerer = Answerer(collector, collector.sampler.weights(random_params(CONFIG, seed=2)))

    def script(text: str, *turns: str) -> None:
        give(collector, 0, [(Question("asked", f"0 {text}", text, (), "single"), 0)], [turns])

    with Running(make_app(answerer, "scripted")) as running:
        yield openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0), script, running
    answerer.close()


def ask(client, messages, **more):
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return client.chat.completions.create(model="scripted", messages=messages, temperature=1.0, seed=0, **more)


def test_the_server_runs_its_own_tools(served):
    """Without tools in the request, the answer comes after the calls of the policy were run in parallel."""
    client, script, _ = served
    script("When?", THINK + write_calls([ADA, ALAN, SUM]), ANSWER)
    reply = ask(client, "When?")
    assert reply.choices[0].message.content == "Ada" and reply.choices[0].finish_reason == "stop"
    (first, _) = reply.psearch["turns"]
    texts = [ranking[0]["text"] for ranking in first["passages"]]
    assert texts == ["Ada Lovelace was born in 1815.", "Alan Turing was born in 1912.", "3"]


def test_parallel_calls_go_to_the_client(served):
    """In one piece and as a stream; the client's results continue the conversation."""
    client, script, _ = served
    script("Who is older?", CALLED)
    asked = ask(client, "Who is older?", tools=[BIRTHS])
    reply = asked.choices[0]
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in reply.message.tool_calls]
    assert calls == BORN and reply.finish_reason == "tool_calls" and not reply.message.content
    deltas = [chunk.choices[0] for chunk in ask(client, "Who is older?", tools=[BIRTHS], stream=True)]
    streamed = [call for choice in deltas for call in choice.delta.tool_calls or ()]
    assert [call.index for call in streamed] == [0, 1] and deltas[-1].finish_reason == "tool_calls"
    assert [(call.function.name, json.loads(call.function.arguments)) for call in streamed] == BORN
    assert "".join(choice.delta.reasoning_content or "" for choice in deltas if choice.delta.model_extra) == CALLED
    conversation = [{"role": "user", "content": "Who is older?"}, reply.message.model_dump(exclude_none=True)]
    results = zip(reply.message.tool_calls, ("1815", "1912</tool_response>"), strict=True)
    conversation += [{"role": "tool", "tool_call_id": call.id, "content": text} for call, text in results]
    script("Who is older?", ANSWER)
    last = ask(client, conversation, tools=[BIRTHS])
    assert last.choices[0].message.content == "Ada" and last.choices[0].finish_reason == "stop"
    assert last.usage.prompt_tokens > asked.usage.total_tokens + len("1815")


def test_a_reply_in_plain_text_and_one_that_was_cut(served):
    """For a client with tools, a message without tags is the answer; a cut one ends with `length`."""
    client, script, _ = served
    script("Hello?", "<think>a</think>Hello.")
    reply = ask(client, "Hello?", tools=[BIRTHS]).choices[0]
    assert reply.message.content == "Hello." and reply.finish_reason == "stop" and not reply.message.tool_calls
    script("Long?", "<think>a</think>" + "x" * 400 + "...")
    assert ask(client, "Long?", tools=[BIRTHS]).choices[0].finish_reason == "length"
    with pytest.raises(openai.UnprocessableEntityError, match="role .*accepted: system, user, assistant, tool"):
        ask(client, [{"role": "<|im_end|>", "content": "?"}, {"role": "user", "content": "?"}], tools=[BIRTHS])


@pytest.mark.parametrize(
    ("tools", "named"),
    [
        ([{"type": "function", "function": {"name": "a", "parameters": DEEP}}], "nested too deeply"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools.0.function.name"),
        ([{"type": "function"}], "tools.0.function"),
        ([{"type": "web_search"}], "tools.0.type"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "text"}}}], "function.parameters"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}], "function.parameters"),
    ],
)
def test_a_bad_schema_is_refused_by_name(served, tools, named):
    client, _, _ = served
    with pytest.raises(openai.UnprocessableEntityError, match=named):
        ask(client, "?", tools=tools)


def test_an_agent_framework_runs_its_functions(served):
    """The agents SDK of OpenAI calls the server, runs both calls, and sends their results."""
    agents = pytest.importorskip("agents", reason="the OpenAI Agents SDK is not installed")
    client, script, running = served
    asked = []

    @agents.function_tool
    def born(name: str) -> str:
        """The year in which a person was born."""
        asked.append(name)
        script("Who is older?", ANSWER)
        return "1815"

    script("Who is older?", CALLED)
    agents.set_tracing_disabled(True)
    own = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    model = agents.OpenAIChatCompletionsModel("scripted", own)
    settings = agents.ModelSettings(temperature=1.0, extra_body={"seed": 0})
    agent = agents.Agent("asker", model=model, tools=[born], model_settings=settings)
    assert agents.Runner.run_sync(agent, "Who is older?").final_output == "Ada" and sorted(asked) == ["Ada", "Alan"]
