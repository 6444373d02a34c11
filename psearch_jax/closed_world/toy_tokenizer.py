"""The toy policy's tokenizer: one token for each word, tag, year and syllable of the closed world.

It is a byte-level BPE without merges, in the standard format of the tokenizers library; other text becomes single
bytes. A token includes the space before it, so after a space a name always has the same three tokens.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from psearch_jax.closed_world.encyclopedia import ATTRIBUTES, HAPPENED, YEARS
from psearch_jax.closed_world.names import HEADS, MIDDLES, TAILS
from psearch_jax.closed_world.scripted import SCRIPT_WORDS
from psearch_jax.closed_world.wordings import words_of_wordings

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BLOCKS = ("\n<information>\n", "</information>\n")
_MARKS = ("'s", " ##", " ;", ".\n", ":\n", ",", "?", ".", ":", "\n", " ")


def language() -> list[str]:
    """Every word of the closed world's questions, passages and scripts, without names and years."""
    words = words_of_wordings() | set(SCRIPT_WORDS) | {*ATTRIBUTES, *HAPPENED.values(), "The", "user", "assistant"}
    words |= {word for attributes in ATTRIBUTES.values() for name in attributes for word in name.split()}
    return sorted(words - {"s"})


def write_tokenizer(out_dir: str | os.PathLike[str]) -> int:
    """Writes the tokenizer as a directory that AutoTokenizer loads; returns the vocabulary size."""
    characters = bytes_to_unicode()

    def token(text: str) -> str:
        return "".join(characters[byte] for byte in text.encode())

    tags = [f"<{close}{tag}>" for tag in ("think", "search", "answer", "information") for close in ("", "/")]
    texts = [*_BLOCKS, *(space + tag for tag in tags for space in ("", " "))]
    texts += [space + word for word in language() for space in ("", " ")]
    texts += [f" {head}" for head in HEADS] + list(MIDDLES) + list(TAILS)
    texts += [f" {year}" for year in YEARS] + list(_MARKS)
    vocabulary = [*SPECIAL_TOKENS, *(characters[byte] for byte in range(256)), *map(token, texts)]
    ids = {piece: i for i, piece in enumerate(dict.fromkeys(vocabulary))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pieces()), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    files = {"tokenizer.json": tokenizer.to_str(pretty=True), "tokenizer_config.json": json.dumps(settings, indent=2)}
    for name, text in files.items():
        part = out / f"{name}.part"
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, out / name)
    return len(ids)


def _pieces() -> str:
    """The regex that splits text into possible tokens: blocks, tags, words, syllables, years, marks."""
    words = "|".join(sorted(map(re.escape, language()), key=len, reverse=True))
    blocks = "|".join(_BLOCKS)
    syllables = r" [A-Z][aeiou](?=[a-z])|[a-z][aeiou][a-z](?![a-z])|[a-z][aeiou](?=[a-z])"
    marks = r" ?\d{4}(?!\d)|'s| ##| ;|\.\n|:\n|[,?.:\n]"
    return rf"{blocks}| ?</?[a-z]+>| ?(?:{words})(?![A-Za-z])|{syllables}|{marks}|\s+|."
