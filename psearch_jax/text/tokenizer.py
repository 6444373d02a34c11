"""The HF tokenizer, with the exact bytes of every id; foreign text is encoded so that it yields no control id."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from psearch_jax.paths import read_json
from psearch_jax.text.tags import TAG, THINK_CLOSE, THINK_OPEN
from psearch_jax.types import UserError, first_line
from retrieval.protocol import as_utf8

STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")
# What templates of models that think put before the reply, or in place of its thought.
_BEGUN = re.compile(rf"{THINK_OPEN}\s*(?:{THINK_CLOSE}\s*)?\Z")
MAX_IDS = 2**22  # far above the largest vocabulary; a table of every id is held
FILES = "tokenizer.json (or vocab.json and merges.txt) and tokenizer_config.json"


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's map from the printable characters of a byte-level vocabulary to the 256 bytes they stand for.

    Printable bytes of Latin-1 stand for themselves; the others, in order, for the characters from U+0100 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class Tokenizer:
    """A byte-level BPE tokenizer in Hugging Face format (`tokenizer.json`, or `vocab.json` with `merges.txt`).

    Attributes:
      token_bytes: [size] exact bytes of every id; None for control tokens and for ids without a token.
      size: number of ids (the largest id + 1); embedding rows from `size` on have no token.
      stop_ids: ids that end a message.
    """

    def __init__(self, hf: PreTrainedTokenizerBase, name: str, extra_stop_ids: Iterable[int] = ()):
        self.hf, self.name = hf, name
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise UserError(f"tokenizer {name}: {type(hf).__name__} found, a byte-level BPE with {FILES} needed")
        self.token_bytes = _token_bytes(hf, name)
        self.size = len(self.token_bytes)
        # Copies: calls of `hf` itself change the state of its backend.
        state = backend.to_str()
        self._trusted = _copy(state, added_tokens=True)
        self._foreign = _copy(state, added_tokens=False)
        self._tags = {t.content: i for i, t in hf.added_tokens_decoder.items() if TAG.fullmatch(t.content)}
        vocabulary = hf.get_vocab()
        named = [vocabulary.get(token) for token in STOP_TOKENS]
        self.stop_ids = frozenset(i for i in [hf.eos_token_id, *named, *extra_stop_ids] if i is not None)
        if not self.stop_ids or not all(0 <= i < self.size for i in self.stop_ids):
            raise UserError(
                f"tokenizer {name}: stop ids {sorted(self.stop_ids)}, needed: one or more below {self.size}"
            )

    @classmethod
    def load(cls, source: str | Path, extra_stop_ids: Iterable[int] = ()) -> Tokenizer:
        """Load from a directory or a hub id; stop ids of a `generation_config.json` in that directory are added.

        Raises `UserError` when there is no such directory, or no usable tokenizer in it.
        """
        name, path = str(source), Path(source)
        looks_local = path.is_absolute() or name.startswith(".") or name.count("/") != 1
        if looks_local and not path.is_dir():
            raise UserError(f"tokenizer {name}: no such directory")
        try:
            hf = _loader(path).from_pretrained(name, trust_remote_code=False)  # None would ask at the terminal
        except Exception as error:  # for a damaged file the tokenizers library raises a bare Exception
            raise UserError(f"tokenizer {name}: cannot be loaded, {FILES} needed ({first_line(error)})") from error
        return cls(hf, name, [*extra_stop_ids, *_generation_stop_ids(path)])

    def encode_trusted(self, text: str) -> list[int]:
        """Ids of our own text: control tokens written in it become control ids."""
        return self._trusted.encode(text, add_special_tokens=False).ids

    def encode_foreign(self, text: str) -> list[int]:
        """Ids of text from elsewhere (questions, passages): names of control tokens are split into ordinary ids."""
        return self._foreign.encode(as_utf8(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], control: bool = False) -> str:
        """Text of ids: their bytes joined, read as UTF-8 with replacement; control tokens are left out or named.

        Ids without a token are left out.
        """
        pieces = []
        for i in map(int, ids):
            piece = self.token_bytes[i] if 0 <= i < self.size else b""
            if piece is None:
                piece = (self.hf.convert_ids_to_tokens(i) or "").encode() if control else b""
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a chat by the tokenizer's own template; every message's content is foreign text, but for our tags.

        The template is rendered around placeholders and the contents' ids are put in their place, so no content can
        produce a control id. A tag that is one id of the vocabulary (Qwen3's `<think>`) is that id, as all that the
        model has read of it. The chat ends where the model has to begin its thought, whatever the template begins of
        it. Raises `UserError` without a template, or when the template leaves out a message.
        """
        marks = [f"CONTENT{i}PLACEHOLDER" for i in range(len(messages))]
        marked = [{**message, "content": mark} for message, mark in zip(messages, marks, strict=True)]
        rendered = self._render(marked, add_generation_prompt)
        missing = [i for i, mark in enumerate(marks) if mark not in rendered]
        if missing:
            raise UserError(f"tokenizer {self.name}: chat_template leaves out message {missing[0]}")
        ids: list[int] = []
        for k, piece in enumerate(re.split(r"CONTENT(\d+)PLACEHOLDER", rendered)):
            ids += self._encode_content(messages[int(piece)]["content"]) if k % 2 else self.encode_trusted(piece)
        return ids

    def next_user_message(self, text: str, max_tokens: int) -> list[int]:
        """Token ids that follow a reply's stop token when the user answers it: `text` and the next reply's header.

        They come from the tokenizer's own chat template. `text` is cut so that there are at most `max_tokens` ids,
        as long as the template's own fit. Raises `UserError` as `chat`.
        """
        marks = ["CONTENT0PLACEHOLDER", "CONTENT1PLACEHOLDER", "CONTENT2PLACEHOLDER"]
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        rendered = self._render(messages, add_generation_prompt=True)
        if marks[1] not in rendered or marks[2] not in rendered:
            raise UserError(f"tokenizer {self.name}: chat_template leaves out message 1 or 2 of user, assistant, user")
        header, footer = map(self.encode_trusted, rendered.split(marks[1])[1].split(marks[2]))
        header = header[1:] if header and header[0] in self.stop_ids else header  # the model sampled that one itself
        return header + self.encode_foreign(text)[: max(0, max_tokens - len(header) - len(footer))] + footer

    def _render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """The chat as text, without the thought that some templates begin for the model."""
        if not getattr(self.hf, "chat_template", None):
            raise UserError(f"tokenizer {self.name}: no chat_template found, one is needed to write prompts")
        rendered = self.hf.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
        return _BEGUN.sub("", rendered) if add_generation_prompt else rendered

    def _encode_content(self, text: str) -> list[int]:
        if not self._tags:
            return self.encode_foreign(text)
        pieces = re.split(f"({'|'.join(map(re.escape, self._tags))})", text)
        return [i for p in pieces for i in ([self._tags[p]] if p in self._tags else self.encode_foreign(p))]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the bytes of every id in order: equal exactly when `token_bytes` is."""
        digest = hashlib.sha256()
        for piece in self.token_bytes:
            digest.update(b"control;" if piece is None else b"%d:%s" % (len(piece), piece))
        return digest.hexdigest()


def _token_bytes(hf: PreTrainedTokenizerBase, name: str) -> list[bytes | None]:
    """[size] bytes of every id; added tokens hold plain text, all others the byte-level alphabet.

    A tag of ours is text, also where the vocabulary calls it special: as a control token it would never be read.
    """
    alphabet, added = byte_level_alphabet(), hf.added_tokens_decoder
    control = set(hf.all_special_ids) | {i for i, token in added.items() if token.special}
    control -= {i for i, token in added.items() if TAG.fullmatch(token.content)}
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
    """A tokenizer from its JSON that neither truncates, pads nor adds ids. Without its added tokens, their names are
    ordinary text to it and their ids out of its reach."""
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

    A directory that asks for the plain class gets it: beside a Qwen-2 config.json, transformers 5's AutoTokenizer puts
    Qwen's own word splitting in place of the one in tokenizer.json, and every id comes out another.
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
    found = read_json(file).get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) for i in ids):
        raise UserError(f"{file}: eos_token_id is {found!r}, an id or a list of ids is accepted")
    return ids
