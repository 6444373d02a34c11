"""The HF tokenizer with the exact bytes of every token. Untrusted text cannot produce control tokens."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from psearch_jax.config import FAMILIES
from psearch_jax.runtime import hub
from psearch_jax.runtime.paths import read_json
from psearch_jax.text.tags import ANY_TAG, THINK_CLOSE, THINK_OPEN, escape_tags
from psearch_jax.types import UserError, first_line
from retrieval.protocol import as_utf8

STOP_TOKENS = {token for family in FAMILIES.values() for chat in family.chats for token in chat.stops}
_DATE = "26 Jul 2024"  # Llama 3's template writes the date of today if none is given; prompts must not depend on it
# Templates of reasoning models begin or pre-fill the reply's thought with this.
_BEGUN = re.compile(rf"{THINK_OPEN}\s*(?:{THINK_CLOSE}\s*)?\Z")
_PLACEHOLDER = re.compile(r"CONTENT(\d+)PLACEHOLDER")
_MARKED_TOOL = re.compile(r'\{\s*"type": "(CONTENT\d+PLACEHOLDER)"\s*\}')
MAX_IDS = 2**22  # far above the largest vocabulary; bounds the table of all ids
FILES = "tokenizer.json (or vocab.json and merges.txt) and tokenizer_config.json"


class Tokenizer:
    """A byte-level BPE tokenizer in Hugging Face format (`tokenizer.json`, or `vocab.json` with `merges.txt`).

    Attributes:
      token_bytes: [size] exact bytes of every token; None for control tokens and for ids without a token.
      size: number of token ids (the largest id + 1); embedding rows from `size` on have no token.
      stop_ids: token ids that end a message.
      directory: where its files are; "" if it was not loaded from files.
    """

    def __init__(
        self, hf: PreTrainedTokenizerBase, name: str, extra_stop_ids: Iterable[int] = (), directory: str = ""
    ):
        self.hf, self.name, self.directory = hf, name, directory
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise UserError(f"tokenizer {name}: {type(hf).__name__} found, a byte-level BPE with {FILES} needed")
        self.token_bytes = _token_bytes(hf, name)
        self.size = len(self.token_bytes)
        # Copies, because calls of `hf` change the state of its backend.
        state = backend.to_str()
        self._trusted = _copy(state, added_tokens=True)
        self._foreign = _copy(state, added_tokens=False)
        self._tags = {t.content: i for i, t in hf.added_tokens_decoder.items() if ANY_TAG.fullmatch(t.content)}
        vocabulary = hf.get_vocab()
        stops = [vocabulary.get(token) for token in STOP_TOKENS]
        self.stop_ids = frozenset(i for i in [hf.eos_token_id, *stops, *extra_stop_ids] if i is not None)
        if not self.stop_ids or not all(0 <= i < self.size for i in self.stop_ids):
            raise UserError(
                f"tokenizer {name}: stop ids {sorted(self.stop_ids)}, needed: one or more below {self.size}"
            )

    @classmethod
    def load(cls, source: str | Path, extra_stop_ids: Iterable[int] = ()) -> Tokenizer:
        """Load from a directory or a hub id, with the stop ids of the directory's `generation_config.json` added.

        Raises `UserError` when there is no such directory, or no usable tokenizer in it.
        """
        name, path = str(source), Path(source)
        looks_local = path.is_absolute() or name.startswith(".") or name.count("/") != 1
        if looks_local and not path.is_dir():
            raise UserError(f"tokenizer {name}: no such directory")
        # Of a hub id, too, the files decide which class loads them.
        directory = path if path.is_dir() else Path(hub.snapshot(name, ["*.json", "*.txt", "*.jinja"], "tokenizer"))
        try:
            # None, the default of trust_remote_code, would ask at the terminal.
            hf = _loader(directory).from_pretrained(directory, trust_remote_code=False)
        except Exception as error:  # for a damaged file the tokenizers library raises a bare Exception
            raise UserError(f"tokenizer {name}: cannot be loaded, {FILES} needed ({first_line(error)})") from error
        return cls(hf, name, [*extra_stop_ids, *_generation_stop_ids(directory)], str(directory.resolve()))

    def encode_trusted(self, text: str) -> list[int]:
        """Token ids of our own text, in which control tokens may be written by name."""
        return self._trusted.encode(text, add_special_tokens=False).ids

    def encode_foreign(self, text: str) -> list[int]:
        """Token ids of untrusted text (questions, passages): names of control tokens become ordinary tokens."""
        return self._foreign.encode(as_utf8(text), add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], control: bool = False) -> str:
        """The text of token ids: their joined bytes as UTF-8, invalid bytes replaced.

        Control tokens and ids without a token are skipped. `control`: instead, these are written by name and those as
        U+FFFD.
        """
        pieces = []
        for i in map(int, ids):
            piece = self.token_bytes[i] if 0 <= i < self.size else None
            if piece is None and control:
                name = self.hf.convert_ids_to_tokens([i])[0] if 0 <= i < self.size else None
                piece = (name or "\ufffd").encode()
            pieces.append(piece or b"")
        return b"".join(pieces).decode("utf-8", errors="replace")

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Token ids of a chat by the tokenizer's own template. Message contents are untrusted text, except our tags.

        So are `tools`, JSON schemas of functions, which the template must write as JSON.

        The template is rendered with placeholders, which are then replaced by the contents' tokens, so no content can
        produce a control token. A tag that is a single token of the vocabulary (Qwen3's `<think>`) is encoded as that
        token, as in the model's training data. The chat ends where the model begins its thought: a thought that the
        template opens is removed. Raises `UserError` without a template, or if the template leaves out a message or a
        tool.
        """
        rendered = self._render_marked(messages, add_generation_prompt, len(tools))
        texts = [message["content"] for message in messages]
        texts += [escape_tags(json.dumps(tool, ensure_ascii=False)) for tool in tools]
        ids: list[int] = []
        for k, piece in enumerate(_PLACEHOLDER.split(rendered)):
            ids += self.encode_reply(texts[int(piece)]) if k % 2 else self.encode_trusted(piece)
        return ids

    def next_user_message(self, text: str, max_tokens: int) -> list[int]:
        """Token ids that follow a reply's stop token when the user answers it: `text` and the next reply's header.

        They come from the tokenizer's own chat template. `text` is cut so that there are at most `max_tokens` tokens,
        provided that the template's own tokens fit. Raises `UserError` like `chat`.
        """
        header, footer = self.after_reply("user")
        return header + self.encode_foreign(text)[: max(0, max_tokens - len(header) - len(footer))] + footer

    def after_reply(self, *roles: str) -> list[list[int]]:
        """The template's tokens before, between and after the contents of the messages that follow a reply.

        They begin after the reply's stop token, which the model samples, and end with the header of the next reply.
        Raises `UserError` like `chat`.
        """
        messages = [{"role": role, "content": ""} for role in ("user", "assistant", *roles)]
        rendered = self._render_marked(messages, add_generation_prompt=True)
        first, *rest = map(self.encode_trusted, _PLACEHOLDER.split(rendered)[4::2])
        return [first[1:] if first and first[0] in self.stop_ids else first, *rest]

    @cached_property
    def reply_stop(self) -> int:
        """The stop token that ends a reply in the chat template.

        Raises:
          UserError: the template ends a reply with none of the stop tokens, or as `chat`.
        """
        messages = [{"role": role, "content": ""} for role in ("user", "assistant")]
        after_reply = self._render_marked(messages, add_generation_prompt=False).partition("CONTENT1PLACEHOLDER")[2]
        ids = self.encode_trusted(after_reply)
        if not ids or ids[0] not in self.stop_ids:
            stops = ", ".join(self.hf.convert_ids_to_tokens(sorted(self.stop_ids)))
            found = f"chat_template writes {after_reply[:40]!r} after a reply"
            raise UserError(f"tokenizer {self.name}: {found}, accepted: a stop token ({stops})")
        return ids[0]

    def _render_marked(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool, tools: int = 0
    ) -> str:
        """The chat as text, with CONTENT{i}PLACEHOLDER for the content of message i, and then of each of the tools.

        Without the thought that some templates open for the model. Raises `UserError` like `chat`.
        """
        if not getattr(self.hf, "chat_template", None):
            raise UserError(f"tokenizer {self.name}: no chat_template found, one is needed to write prompts")
        # Other keys of a message would be untrusted text that the template may write.
        marked = [{"role": m["role"], "content": f"CONTENT{i}PLACEHOLDER"} for i, m in enumerate(messages)]
        n = len(messages)
        functions: list[Any] = [{"type": f"CONTENT{i}PLACEHOLDER"} for i in range(n, n + tools)]
        try:
            rendered = self.hf.apply_chat_template(
                marked,
                functions or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                date_string=_DATE,
            )
        except Exception as error:  # jinja's, or whatever the template's expressions raise
            raise UserError(
                f"tokenizer {self.name}: chat_template cannot be rendered ({first_line(error)}), accepted: one for "
                "messages with role and content"
            ) from error
        assert isinstance(rendered, str)  # because of tokenize=False
        missing = [i for i in range(n) if f"CONTENT{i}PLACEHOLDER" not in rendered]
        if missing:
            raise UserError(f"tokenizer {self.name}: chat_template leaves out message {missing[0]}")
        rendered, written = _MARKED_TOOL.subn(r"\1", rendered)
        if written != tools:
            raise UserError(
                f"tokenizer {self.name}: chat_template writes {written} of {tools} tools as JSON, accepted with "
                "rollout.dialect=tool_calls: all of them, as Qwen's does"
            )
        return _BEGUN.sub("", rendered) if add_generation_prompt else rendered

    def encode_reply(self, text: str) -> list[int]:
        """As `encode_foreign`, but one of our tags that is a single token of the vocabulary becomes that token."""
        if not self._tags:
            return self.encode_foreign(text)
        pieces = re.split(f"({'|'.join(map(re.escape, self._tags))})", text)
        return [i for p in pieces for i in ([self._tags[p]] if p in self._tags else self.encode_foreign(p))]

    @cached_property
    def identity(self) -> tuple[str, str, str]:
        """What prompts and rollouts depend on: the fingerprint, the stop ids, and a short prompt."""
        prompt = self.chat([{"role": "user", "content": "?"}])
        return self.fingerprint, str(sorted(self.stop_ids)), str(prompt)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the bytes of all tokens in order: equal exactly if `token_bytes` is equal."""
        digest = hashlib.sha256()
        for piece in self.token_bytes:
            digest.update(b"control;" if piece is None else b"%d:%s" % (len(piece), piece))
        return digest.hexdigest()


def _token_bytes(hf: PreTrainedTokenizerBase, name: str) -> list[bytes | None]:
    """[size] bytes of every token. Added tokens are stored as plain text, all others in the byte-level alphabet.

    Our tags count as text even if the vocabulary marks them special: `decode` would skip a control token.
    """
    alphabet, added = {character: byte for byte, character in bytes_to_unicode().items()}, hf.added_tokens_decoder
    control = set(hf.all_special_ids) | {i for i, token in added.items() if token.special}
    control -= {i for i, token in added.items() if ANY_TAG.fullmatch(token.content)}
    vocabulary = hf.get_vocab()
    size = 1 + max(vocabulary.values(), default=-1)
    if not 0 < size <= MAX_IDS:
        raise UserError(f"tokenizer {name}: the largest id found is {size - 1}, accepted: 0 to {MAX_IDS - 1}")
    table: list[bytes | None] = [None] * size
    for token, i in vocabulary.items():
        if i in control:
            continue
        if i in added:
            table[i] = added[i].content.encode()
            continue
        try:
            table[i] = bytes(alphabet[c] for c in token)
        except KeyError:
            raise UserError(f"tokenizer {name}: token {i} ({token!r}) found, a byte-level BPE is needed") from None
    return table


def _copy(serialised: str, added_tokens: bool) -> tokenizers.Tokenizer:
    """A tokenizer from its JSON that neither truncates, pads nor adds tokens.

    Without `added_tokens`, their names are ordinary text and it can never emit their ids.
    """
    state = json.loads(serialised)
    state["truncation"] = state["padding"] = state["post_processor"] = None
    if not added_tokens:
        names = {token["content"] for token in state["added_tokens"]}
        model = state["model"]
        model["vocab"] = {token: i for token, i in model["vocab"].items() if token not in names}
        model["unk_token"] = None if model.get("unk_token") in names else model.get("unk_token")
        state["added_tokens"] = []
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _loader(directory: Path) -> type:
    """The class that loads a tokenizer.

    A directory whose config names the plain class gets that class. If there is also a Qwen-2 config.json,
    transformers 5's AutoTokenizer would replace tokenizer.json's pre-tokenizer by Qwen's, which changes the token ids.
    """
    file = directory / "tokenizer_config.json"
    if file.is_file() and (directory / "tokenizer.json").is_file():
        if read_json(file).get("tokenizer_class") == "PreTrainedTokenizerFast":
            return PreTrainedTokenizerFast
    return AutoTokenizer


def _generation_stop_ids(directory: Path) -> list[int]:
    """`eos_token_id` of the directory's generation_config.json, as a list; [] without the file or the field."""
    file = directory / "generation_config.json"
    if not file.is_file():
        return []
    eos = read_json(file).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(i, int) for i in ids):
        raise UserError(f"{file}: eos_token_id is {eos!r}, an id or a list of ids is accepted")
    return ids
