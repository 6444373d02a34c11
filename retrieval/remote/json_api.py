"""A search service with JSON answers (web search, a company's search) as a `Retriever`.

A settings file defines the request and the paths of the results in the answer:

    {"url": "https://api.example.com/search?q={query}&count={k}",
     "headers": {"X-Api-Key": "${SEARCH_KEY}"},
     "results": "web.results", "id": "url", "title": "title", "text": ["description", "extra.0"]}

`${NAME}` is an environment variable, so that keys need not be in the file; its value is hidden in errors and logs.
Optional: `body`, an object that is posted as JSON, whose strings may contain `{query}` and `{k}` (the string `"{k}"`
becomes a number), and the numbers of `Settings`. In a path, names are fields of objects and numbers indices of lists.
"""

from __future__ import annotations

import html
import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from cachetools import TTLCache

from retrieval.protocol import CorpusError, Passage, RetrievalError, as_utf8, read_object, text_sha256
from retrieval.remote.client import FIRST_WAIT_S, LONGEST_WAIT_S, QUERY_CHARS, RETRIED_STATUS
from retrieval.remote.wire import NO_DESCRIPTION, Wire, line

log = logging.getLogger("retrieval")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_MARKUP = re.compile(r"<[^<>]{0,200}>")
HIDDEN = "***"
OF_THE_QUERY = (400, 413, 414, 422)  # if a service answered other queries, these status codes refuse only this query


@dataclass(frozen=True)
class Settings:
    """The fields of a settings file."""

    url: str  # with {query}, and with {k} if the service accepts a number of results
    results: str  # path of the list of results; "": the answer is the list
    text: str | list[str]  # path in a result, or several paths whose texts are joined
    title: str = ""
    id: str = ""  # "": a digest of title and text
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 10.0  # for a complete answer
    retry_deadline_s: float = 60.0  # how long a failing query is retried
    at_once: int = 8  # concurrent queries
    per_second: float = 0.0  # limit on queries per second; 0: none
    keep_s: float = 3600.0  # how long an answer is cached
    keep: int = 65_536  # cached answers
    text_chars: int = 4000  # longer texts are cut


def read_settings(path: str | os.PathLike[str]) -> tuple[Settings, tuple[str, ...]]:
    """The settings of a file with its variables substituted, and the variables' values, which must not be shown.

    Raises:
      CorpusError: a field is missing, unknown or of another type, or a variable is not set; names it.
    """
    path = Path(path)
    raw = read_object(path)
    known = {one.name: one for one in fields(Settings)}
    for name, value in raw.items():
        if name not in known:
            raise CorpusError(f"{path}: unknown field {name}, accepted: {', '.join(known)}")
        if not _fits(name, value):
            raise CorpusError(f"{path}: field {name} is {json.dumps(value)[:80]}, accepted: {known[name].type}")
    for name in ("url", "results", "text"):
        if name not in raw:
            raise CorpusError(f"{path}: field {name} is missing")
    secrets: dict[str, None] = {}

    def filled(match: re.Match[str]) -> str:
        value = os.environ.get(match[1], "").strip()  # a mounted secret ends with a line break
        if not value:
            raise CorpusError(f"{path}: the environment variable {match[1]} is not set")
        secrets[value] = None
        return value

    settings = Settings(**_mapped(raw, lambda text: _VARIABLE.sub(filled, text)))
    request = settings.url + json.dumps(settings.body)
    if urlsplit(settings.url).scheme not in ("http", "https") or "{query}" not in request:
        raise CorpusError(f"{path}: url is {raw['url']}, accepted: http(s)://..., with {{query}} in it or in the body")
    return settings, tuple(secrets)


class LiveSearch:
    """Implements `Retriever` by one request to the service per query. Any number of threads may use one.

    The service's answers change over time, so a run with it cannot be reproduced bit for bit.
    """

    def __init__(self, settings: Settings, secrets: Sequence[str] = ()):
        """`secrets`: texts that are hidden in errors and logs."""
        self._settings, self._secrets = settings, secrets
        self._host = urlsplit(settings.url).netloc.rpartition("@")[2]
        self._wire = Wire(1, settings.timeout_s, None, settings.headers)
        self._kept: TTLCache[tuple[str, int], list[Passage]] = TTLCache(settings.keep, settings.keep_s)
        self._lock = threading.Lock()  # guards the cache and the next turn
        self._answers = False  # whether the service ever answered
        self._found: bool | None = None  # whether an answer ever had a list of results; None: no answer yet
        self._next_turn = 0.0  # monotonic clock
        self._pool = ThreadPoolExecutor(settings.at_once, "live")

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """At most `k` passages per query in the service's order; an empty query is not sent.

        If the service refuses a query (one that is too long, for example) but answered others, it gets no passages.

        Raises:
          RetrievalError: the service refused, or gave no valid answer for `retry_deadline_s`. Earlier answers stay
            cached.
        """
        cleaned = [" ".join(as_utf8(query).split())[:QUERY_CHARS] for query in queries]
        wanted = list(dict.fromkeys(filter(None, cleaned)))
        with self._lock:
            passages = {query: self._kept[query, k] for query in wanted if (query, k) in self._kept}
        asked = [query for query in wanted if query not in passages]
        given_up = threading.Event()
        try:
            answers = list(self._pool.map(lambda query: self._patiently(query, k, given_up), asked))
        finally:
            given_up.set()  # when one query failed for good, do not wait for the others
        refused = [answer for answer in answers if isinstance(answer, str)]
        if refused and not self._answers:
            raise RetrievalError(refused[0])
        for reason in refused:
            log.warning("%s: this query gets no passages", reason)
        passages |= {
            query: answer for query, answer in zip(asked, answers, strict=True) if not isinstance(answer, str)
        }
        return [list(passages.get(query, ())) for query in cleaned]

    def describe(self) -> dict[str, Any]:
        """See `Retriever.describe`: only the service's host is known."""
        return {**NO_DESCRIPTION, "corpus": self._host}

    def _patiently(self, query: str, k: int, given_up: threading.Event) -> list[Passage] | str:
        """Ask with retries. Returns the passages and caches them, or the reason why the service refuses the query."""
        until, wait = time.monotonic() + self._settings.retry_deadline_s, FIRST_WAIT_S
        while True:
            self._take_turn(given_up)
            if given_up.is_set():
                raise RetrievalError(f"{self._host}: given up, as another query failed")
            try:
                answer = self._ask(query, k)
                if not isinstance(answer, str):
                    with self._lock:
                        self._answers, self._kept[query, k] = True, answer
                return answer
            except (OSError, ValueError) as error:
                failure = self._hidden(str(error))
            if time.monotonic() + wait > until:
                raise RetrievalError(f"{self._host}: no answer: {failure}")
            log.warning("%s: %s; asked again in %.1f s", self._host, failure, wait)
            given_up.wait(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    def _take_turn(self, given_up: threading.Event) -> None:
        """Wait until `per_second` allows another query."""
        if self._settings.per_second > 0:
            with self._lock:
                now = time.monotonic()
                turn = max(now, self._next_turn)
                self._next_turn = turn + 1 / self._settings.per_second
            given_up.wait(turn - now)

    def _ask(self, query: str, k: int) -> list[Passage] | str:
        """The passages for a query, or the reason why the service refuses it.

        Raises `OSError` or `ValueError` if a retry may help, `RetrievalError` if not.
        """
        s = self._settings
        url = s.url.replace("{query}", quote(query, safe="")).replace("{k}", str(k))
        body = json.dumps(_mapped(s.body, lambda text: _in_body(text, query, k))).encode() if s.body else None
        status, data = self._wire.request("POST" if body else "GET", url, body)
        if status in RETRIED_STATUS:
            raise OSError(f"status {status}")
        if status != 200:
            reason = f"{self._host}: status {status}: {self._hidden(data[:4000].decode(errors='replace'))}"
            if status in OF_THE_QUERY:
                return reason
            raise RetrievalError(reason)
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            raise ValueError("the answer is not JSON") from None
        results = _at(answer, s.results) if s.results else answer
        if results is None:  # services omit empty results, but the path may also be wrong
            if self._found is None:
                self._found, fields = False, self._hidden(_fields_of(answer))
                log.warning(
                    "%s: nothing at results=%s, taken for no results; found: %s", self._host, s.results, fields
                )
            return []
        if not isinstance(results, list):
            kind = type(results).__name__
            raise RetrievalError(f"{self._host}: results={s.results} is a {kind}, accepted: the path of a list")
        self._found = True
        passages = [passage for passage in map(self._passage, results) if passage is not None]
        if results and not passages:
            raise RetrievalError(
                f"{self._host}: no result has a text at text={s.text}, or a title at title={s.title!r}; the fields of "
                f"the first: {self._hidden(_fields_of(results[0]))}"
            )
        return passages[:k]

    def _passage(self, result: Any) -> Passage | None:
        s = self._settings
        title = _plain(_at(result, s.title)) if s.title else ""
        parts = [_plain(_at(result, path)) for path in ([s.text] if isinstance(s.text, str) else s.text)]
        text = " ".join(filter(None, parts))[: s.text_chars]
        if not (title or text):
            return None
        own = _at(result, s.id) if s.id else None
        digest = text_sha256(f"{title}\n{text}")[:16]
        return Passage(as_utf8(str(own)[:500]) if own is not None else digest, title[: s.text_chars], text)

    def _hidden(self, text: str) -> str:
        """`text` on one line, with secrets hidden before it is cut (a cut could leave part of one)."""
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN).replace(quote(secret, safe=""), HIDDEN)
        return line(text)


def _fields_of(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__


def _fits(name: str, value: Any) -> bool:
    """Whether a value is valid for a field of `Settings`."""
    if name in ("headers", "body"):
        return isinstance(value, dict) and (name == "body" or all(isinstance(v, str) for v in value.values()))
    if name == "text" and isinstance(value, list):
        return bool(value) and all(isinstance(path, str) for path in value)
    if name in ("url", "results", "text", "title", "id"):
        return isinstance(value, str)
    integer = name in ("at_once", "keep", "text_chars")
    number = isinstance(value, int if integer else int | float) and not isinstance(value, bool)
    return number and (value > 0 or (name == "per_second" and value == 0))


def _mapped(value: Any, change: Any) -> Any:
    """The value with `change` applied to every string in it."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(one, change) for name, one in value.items()}
    return [_mapped(one, change) for one in value] if isinstance(value, list) else value


def _in_body(text: str, query: str, k: int) -> str | int:
    return k if text == "{k}" else text.replace("{k}", str(k)).replace("{query}", query)


def _at(value: Any, path: str) -> Any:
    """The value at a path, or None."""
    for step in path.split("."):
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and step.isdigit():
            value = value[int(step)] if int(step) < len(value) else None
        else:
            return None
    return value


def _plain(value: Any) -> str:
    """A text or number as one line without markup; "" for anything else."""
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        return ""
    return " ".join(html.unescape(_MARKUP.sub("", as_utf8(str(value)))).split())
