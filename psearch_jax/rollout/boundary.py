"""The tag automaton: finds the token that completes `</search>` or `</answer>`, however the tag was tokenised. With
another dialect (text/dialects.py) it finds other strings.

An Aho-Corasick automaton over bytes is folded once over the bytes of every token into two tables, which the sampler
uses on device: `hit[state, id]` is the tag that the token completes, `next[state, id]` the state after it. A state is
the longest proper prefix of a closing tag that the sampled bytes end with; state 0 (the root) is the empty prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from psearch_jax.text.dialects import Tags

ROOT = 0
HIT_NONE, HIT_SEARCH, HIT_ANSWER = 0, 1, 2
TOKENS_AFTER_ANSWER = 4  # sampled at most after `</answer>` while waiting for a stop token


@dataclass(frozen=True)
class BoundaryTables:
    """Both [states, V] uint8. After a hit the next state is the root. Control tokens lead to the root."""

    next: np.ndarray
    hit: np.ndarray


def byte_automaton(stops: Mapping[str, str] = Tags.stops) -> tuple[np.ndarray, np.ndarray]:
    """The automaton over single bytes: (next, hit), both [states, 256] uint8; `stops` as in `Dialect`."""
    patterns = {stop.encode(): HIT_ANSWER if action == "answer" else HIT_SEARCH for stop, action in stops.items()}
    prefixes = sorted({p[:n] for p in patterns for n in range(len(p))}, key=lambda s: (len(s), s))
    number = {prefix: state for state, prefix in enumerate(prefixes)}
    step = np.zeros((len(prefixes), 256), np.uint8)
    hit = np.zeros_like(step)
    for prefix, state in number.items():
        for byte in range(256):
            seen = prefix + bytes([byte])
            hit[state, byte] = next((code for p, code in patterns.items() if seen.endswith(p)), HIT_NONE)
            if not hit[state, byte]:
                step[state, byte] = next(number[seen[i:]] for i in range(len(seen) + 1) if seen[i:] in number)
    return step, hit


def build_tables(
    token_bytes: Sequence[bytes | None], rows: int | None = None, stops: Mapping[str, str] = Tags.stops
) -> BoundaryTables:
    """Fold the byte automaton over the bytes of every token.

    Args:
      token_bytes: [V] bytes of every token, None for control tokens.
      rows: embedding rows, at least V; rows without a token complete no tag and lead to the root.
      stops: those of the dialect.

    If a token completes several tags, the first one counts. Takes less than a second for 150,000 tokens.
    """
    step, byte_hit = byte_automaton(stops)
    lengths = np.array([len(b or b"") for b in token_bytes], np.int64)
    state = np.zeros((len(step), len(token_bytes)), np.uint8)
    state[:, [b is not None for b in token_bytes]] = np.arange(len(step), dtype=np.uint8)[:, None]
    hit = np.zeros_like(state)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    flat = np.frombuffer(b"".join(b or b"" for b in token_bytes), np.uint8)
    for position in range(lengths.max(initial=0)):
        ids = np.flatnonzero(lengths > position)
        byte = flat[starts[ids] + position]
        before, done = state[:, ids], hit[:, ids]
        hit[:, ids] = np.where(done > 0, done, byte_hit[before, byte])
        state[:, ids] = step[before, byte]
    state[hit > 0] = ROOT
    pad = ((0, 0), (0, (rows or len(token_bytes)) - len(token_bytes)))
    return BoundaryTables(np.pad(state, pad), np.pad(hit, pad))
