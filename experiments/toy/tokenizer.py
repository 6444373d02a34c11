"""The toy policies' tokenizers: one token for each word, tag, year and syllable of the closed world.

They are byte-level BPEs without merges, in the standard format of the tokenizers library; other text becomes single
bytes. A token includes the space before it, so after a space a name always has the same three tokens. With tool calls,
the schema of each tool is also a single token, and so is the text before, between and after the arguments of calls.
"""

from __future__ import annotations

import json
import os
import re
from itertools import product
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from experiments.toy.scripted import SCRIPT_WORDS
from psearch_jax.closed_world.encyclopedia import ATTRIBUTES, HAPPENED, YEARS
from psearch_jax.closed_world.names import HEADS, MIDDLES, TAILS
from psearch_jax.closed_world.question_forms import MOST_YEARS
from psearch_jax.closed_world.wordings import words_of_wordings
from psearch_jax.rollout.calculator import CALCULATOR
from psearch_jax.rollout.tools import SEARCH_SCHEMA
from psearch_jax.runtime.paths import write_atomically
from psearch_jax.text.tags import escape_tags
from psearch_jax.text.tool_calls import write_json_calls

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
)
_BLOCKS = ("\n<information>\n", "</information>\n")
_MARKS = ("'s", " ##", " ;", ".\n", ":\n", ",", "?", ".", ":", "\n", " ")
_SCHEMAS = (SEARCH_SCHEMA, CALCULATOR.schema)


def language(dialect: str) -> list[str]:
    """Every word of the closed world's questions, passages and scripts, without names and years."""
    calls = dialect == "tool_calls"
    words = words_of_wordings(calls) | set(SCRIPT_WORDS) | {*ATTRIBUTES, *HAPPENED.values(), "The"}
    words |= {"user", "assistant", *(("tool", "system", "error") if calls else ())}
    words |= {word for attributes in ATTRIBUTES.values() for name in attributes for word in name.split()}
    return sorted(words - {"s"})


def _blocks(dialect: str) -> list[str]:
    """Texts of several words that are one token, longer ones first."""
    if dialect == "tags":
        return list(_BLOCKS)
    schemas = [escape_tags(json.dumps(schema, ensure_ascii=False)) for schema in _SCHEMAS]
    functions = [schema["function"] for schema in _SCHEMAS]
    calls = [(f["name"], json.dumps(dict.fromkeys(f["parameters"]["properties"], "|"))) for f in functions]
    # Also the end of a call and the beginning of the next one: whether there is a next one is then decided after the
    # last word of the argument, as by ` ##`. A token later, reinforcement learning did not tell questions apart.
    texts = [write_json_calls(pair) for pair in product(calls, repeat=2)]
    return [*schemas, *sorted({piece for text in texts for piece in text.split("|")}, key=len, reverse=True)]


def write_tokenizer(out_dir: str | os.PathLike[str], dialect: str = "tags") -> int:
    """Writes a dialect's tokenizer as a directory that AutoTokenizer loads; returns the vocabulary size."""
    characters = bytes_to_unicode()

    def token(text: str) -> str:
        return "".join(characters[byte] for byte in text.encode())

    tags = [f"<{close}{tag}>" for tag in ("think", "search", "answer", "information") for close in ("", "/")]
    texts = [*_blocks(dialect), *(space + tag for tag in tags for space in ("", " "))]
    texts += [space + word for word in language(dialect) for space in ("", " ")]
    texts += [f" {head}" for head in HEADS] + list(MIDDLES) + list(TAILS)
    texts += [f" {year}" for year in YEARS] + list(_MARKS)
    if dialect == "tool_calls":
        texts += [text for number in range(2, MOST_YEARS + 1) for text in (f" {number}", str(number))]
        texts += [*map(str, YEARS), " +", " -", ' "', '"']
    vocabulary = [*SPECIAL_TOKENS, *(characters[byte] for byte in range(256)), *map(token, texts)]
    ids = {piece: i for i, piece in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pieces(dialect)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": (TOOLS_TEMPLATE if dialect == "tool_calls" else "") + CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    files = {"tokenizer.json": tokenizer.to_str(pretty=True), "tokenizer_config.json": json.dumps(settings, indent=2)}
    for name, text in files.items():
        write_atomically(Path(out_dir) / name, text + "\n")
    return len(ids)


def _pieces(dialect: str) -> str:
    """The regex that splits text into possible tokens: blocks, tags, words, syllables, years, marks."""
    words = "|".join(sorted(map(re.escape, language(dialect)), key=len, reverse=True))
    blocks = "|".join(map(re.escape, _blocks(dialect)) if dialect == "tool_calls" else _BLOCKS)
    syllables = r" [A-Z][aeiou](?=[a-z])|[a-z][aeiou][a-z](?![a-z])|[a-z][aeiou](?=[a-z])"
    marks = r" ?\d{4}(?!\d)|'s| ##| ;|\.\n|:\n|[,?.:\n]"
    marks = rf" ?\d{{1,2}}(?!\d)| [+\-]|{marks}" if dialect == "tool_calls" else marks
    return rf"{blocks}| ?</?[a-z]+>| ?(?:{words})(?![A-Za-z])|{syllables}|{marks}|\s+|."
