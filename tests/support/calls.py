"""Tool calls for tests: a chat template that writes them, and a collector whose policy writes what a test says."""

from helpers import retriever, rollout_section, scripted_sampler
from transformers import AutoTokenizer
from written import CONFIG, say

from psearch_jax.config import RetrievalSection
from psearch_jax.rollout.collect import Collector
from psearch_jax.rollout.tools import SEARCH_SCHEMA
from psearch_jax.text.dialects import ToolCalls
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.types import Call

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
