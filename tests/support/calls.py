"""Tool calls for tests: a chat template that writes them, and a collector whose policy writes what a test says."""

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
from helpers import retriever, rollout_section, scripted_sampler
from transformers import AutoTokenizer
from written import CONFIG, say

from psearch_jax.config import RetrievalSection
from psearch_jax.rollout.boundary import TOKENS_AFTER_ANSWER
from psearch_jax.rollout.collect import Collector
from psearch_jax.rollout.tools import SEARCH_SCHEMA
from psearch_jax.text import tags
from psearch_jax.text.dialects import Dialect, ToolCalls
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Call, Trajectory, pair_calls
from retrieval.protocol import Passage

# In the format of Qwen2.5's template, with the same separators.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:
<tools>
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{% endfor %}
</tools><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- "<|im_start|>user" }}{% endif %}
{{- "\\n<tool_response>\\n" + m.content + "\\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- "<|im_end|>\\n" }}{% endif %}
{%- else %}{{- "<|im_start|>" + m.role + "\\n" + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + "}\\n</tool_call>" }}
{%- endfor %}{{- "<|im_end|>\\n" }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{% endif %}"""
THOUGHT = "<think>Two dates.</think>\n"
ADA, ALAN, SUM = Call("search", "Ada born"), Call("search", "Alan born"), Call("calculator", '{"expression": "1 + 2"}')


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def check_template(dialect: ToolCalls) -> None:
    """A conversation is the text that the chat template renders, and the dialect reads the template's own calls."""
    calls, hf = (ADA, SUM), dialect.tokenizer.hf
    results = ((Passage("1", "Ada", "Ada was born in 1815."),), (Passage("", "", "3"),))
    called = [{"name": call.tool, "arguments": json.loads(call.text)} for call in calls[1:]]
    called.insert(0, {"name": "search", "arguments": {"query": "Ada born"}})
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "<think>\nTwo.\n</think>", "tool_calls": called},
        {"role": "tool", "content": "Ada was born in 1815.\n"},
        {"role": "tool", "content": "3\n"},
        {"role": "assistant", "content": "<think>\nDone.\n</think>\n\n<answer>3</answer>"},
    ]
    rendered = hf.apply_chat_template(messages, tools=list(dialect.schemas), tokenize=False)
    for schema in dialect.schemas:  # in which we escape tags
        assert json.dumps(schema) in rendered
        rendered = rendered.replace(json.dumps(schema), tags.escape_tags(json.dumps(schema, ensure_ascii=False)))
    header = "<|im_start|>assistant\n"
    first, last = (piece.partition("<|im_end|>")[0] for piece in rendered.split(header)[-2:])
    action = dialect.parse(first)
    assert action.well_formed and pair_calls(action.tools, action.queries) == calls
    assert not dialect.parse(first, ended=False).well_formed and dialect.parse(last).answer == "3"
    assert dialect.write_calls(calls) in first
    observed = dialect.observe(calls, results)
    ids = dialect.chat(messages[:1]) + dialect.encode_reply(first, True) + observed.ids
    ids += dialect.encode_reply(last, False)
    assert dialect.tokenizer.decode(ids, control=True) + "\n" == rendered
    assert observed.shown == (("Ada was born in 1815.",), ("3",))
    # Begun in the middle of a reply, the host ends it first.
    assert dialect.observe(calls, results, ended=False).ids == [dialect.tokenizer.reply_stop, *observed.ids]


def tool_collector(tokenizer: Tokenizer, tools=(), **options) -> Collector:
    """A collector of rollouts with tool calls, whose sampled tokens are those of `give`."""
    hf = AutoTokenizer.from_pretrained(tokenizer.directory)
    hf.chat_template = TEMPLATE
    tokenizer = Tokenizer(hf, "tools")
    budgets = dict(samples=1, context_tokens=3000, prompt_tokens=1600, turn_tokens=300, obs_tokens=240)
    rollout = rollout_section(dialect="tool_calls", **budgets, **options)
    dialect = ToolCalls(tokenizer, rollout.obs_tokens, 3, schemas=[SEARCH_SCHEMA, *(t.schema for t in tools)])

    def render(question):
        return dialect.chat([{"role": "user", "content": question.text}])

    parts = scripted_sampler(tokenizer, CONFIG, dialect.stops), tokenizer, retriever(), render, rollout
    return Collector.of(*parts, RetrievalSection(topk=1), dialect=dialect, tools=tools)


def give(collector: Collector, seed: int, rollouts, scripts) -> None:
    """Lets (question, sample) pairs write their turns, each with a stop token unless it ends with `...`."""
    stop = collector.tokenizer.reply_stop
    parts = [[p for t in turns for p in ((t[:-3],) if t.endswith("...") else (t, stop))] for turns in scripts]
    collector.sampler.give(seed, 0, rollouts, [say(collector.tokenizer, *part) for part in parts])


def turns_of(trajectory: Trajectory) -> list[tuple[int, int]]:
    """(first, end) of each span of sampled tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], trajectory.mask.astype(np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def count_ends(
    tokenizer: Tokenizer, dialect: Dialect, trajectories: Sequence[Trajectory], turn_tokens: int
) -> Counter[str]:
    """How the sampled turns ended: each at the first token that completes a stop string, at a stop token or at its
    budget, and the host parses it into what the rollout did."""
    ends: Counter[str] = Counter()
    for t in trajectories:
        called = [turn for turn in t.turns if turn.n_sampled]
        for (first, end), turn in zip(turns_of(t), called, strict=True):
            assert end - first == turn.n_sampled
            ids, text, complete, stop = t.ids[first:end].tolist(), b"", None, ""
            for place, i in enumerate(ids):
                piece = tokenizer.token_bytes[i]
                text = b"" if piece is None else text + piece  # a control token breaks a string
                found = [name for name in dialect.stops if name.encode() in text]
                if found:
                    complete, stop = place, found[0]
                    break
            ended = ids[-1] in tokenizer.stop_ids
            if complete is None:
                assert not set(ids[:-1]) & tokenizer.stop_ids
                assert ended or len(ids) == turn_tokens or t.status == "truncated"
                assert dialect.ends_calls or turn.action == "none"
                ends["stop token" if ended else "budget"] += 1
            else:
                kind = dialect.stops[stop]
                assert len(ids) - 1 - complete <= (TOKENS_AFTER_ANSWER if kind == "answer" else 0)
                ends[kind] += 1
            last = turn is t.turns[-1] and t.status in ("out_of_turns", "truncated")
            action = dialect.parse(turn.text, ended=ended)
            assert last or (action.kind, action.queries, action.tools) == (turn.action, turn.queries, turn.tools)
    return ends
