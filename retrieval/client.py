"""A retriever behind Search-R1's `/retrieve`: pooled connections, a time-out, retries, one named error at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import urllib3

from retrieval.corpus import read_contents
from retrieval.protocol import Passage, RetrievalError

RETRIED_STATUS = (429, 500, 502, 503, 504)


class HttpRetriever:
    """Implements `Retriever` over HTTP; all queries of a call travel in one request.

    Args:
      url: of the endpoint, for instance http://127.0.0.1:8000/retrieve.
      timeout_s: for connecting, and again for the answer.
      retries: further tries after a failed one, with exponential back-off and jitter.
    """

    def __init__(self, url: str, timeout_s: float = 60.0, retries: int = 5):
        self._url = url
        policy = urllib3.Retry(
            total=retries,
            backoff_factor=0.2,
            backoff_jitter=0.2,
            status_forcelist=RETRIED_STATUS,
            allowed_methods=["POST"],
        )
        self._pool = urllib3.PoolManager(timeout=timeout_s, retries=policy)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """At most `k` passages per query, best first; an empty query gives an empty list and is not sent.

        Raises:
          RetrievalError: the server did not answer in time and in form, after all retries.
        """
        cleaned = [" ".join(query.split()) for query in queries]
        sent = list(dict.fromkeys(filter(None, cleaned)))
        if not sent:
            return [[] for _ in cleaned]
        body = json.dumps({"queries": sent, "topk": k, "return_scores": True})
        try:
            answer = self._pool.request("POST", self._url, body=body, headers={"Content-Type": "application/json"})
        except urllib3.exceptions.HTTPError as error:
            raise RetrievalError(f"{self._url}: no answer ({type(error).__name__}: {error})") from error
        if answer.status != 200:
            raise RetrievalError(f"{self._url}: status {answer.status}, expected 200 ({answer.data[:200]!r})")
        found = dict(zip(sent, self._read(answer.data, len(sent), k), strict=True))
        return [list(found.get(query, ())) for query in cleaned]

    def _read(self, data: bytes, expected: int, k: int) -> list[list[Passage]]:
        try:
            rankings = json.loads(data)["result"]
            passages = [[_passage(row) for row in ranking][:k] for ranking in rankings]
        except (ValueError, KeyError, TypeError) as error:
            raise RetrievalError(f"{self._url}: the answer is not of the /retrieve form ({error!r})") from error
        if len(passages) != expected:
            raise RetrievalError(f"{self._url}: {len(passages)} rankings for {expected} queries")
        return passages


def _passage(row: dict[str, Any]) -> Passage:
    document = row["document"]
    return read_contents(str(document["id"]), document["contents"], float(row["score"]))
