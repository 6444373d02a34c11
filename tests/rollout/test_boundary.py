"""Compares the boundary tables with plain string search, over every tokenisation of a closing tag."""

from collections import defaultdict
from itertools import combinations

import numpy as np
import pytest

from psearch_jax.rollout.boundary import HIT_ANSWER, HIT_NONE, HIT_SEARCH, ROOT, build_tables, byte_automaton

TAGS = {b"</search>": HIT_SEARCH, b"</answer>": HIT_ANSWER}
MAX_TOKENS = 6


@pytest.fixture(scope="module", params=["tiny", "real"])
def tokenizer(request):
    return request.getfixturevalue(f"{request.param}_tokenizer")


@pytest.fixture(scope="module")
def tables(tokenizer):
    return build_tables(tokenizer.token_bytes)


def all_tokenisations(token_bytes, tag):
    """[N, MAX_TOKENS] token ids, padded with -1: every sequence of up to 6 that completes `tag` at its last token.

    The first token may hold bytes before the tag and the last one bytes after it; those in between are exact.

    """
    exact, ending, starting, single = defaultdict(list), defaultdict(list), defaultdict(list), []
    for i, piece in enumerate(token_bytes):
        if piece is None:
            continue
        if tag in piece:
            single.append(i)
        if piece in tag:
            exact[piece].append(i)
        for n in range(1, len(tag)):
            if piece.endswith(tag[:n]):
                ending[n].append(i)
            if piece.startswith(tag[n:]):
                starting[n].append(i)
    cases = [np.array(single, int)[:, None]]
    for k in range(2, MAX_TOKENS + 1):
        for cuts in combinations(range(1, len(tag)), k - 1):
            middle = [exact[tag[a:b]] for a, b in zip(cuts, cuts[1:], strict=False)]
            grid = np.meshgrid(ending[cuts[0]], *middle, starting[cuts[-1]], indexing="ij")
            cases.append(np.stack([g.ravel() for g in grid], axis=1).astype(int))
    return np.concatenate([np.pad(c, ((0, 0), (0, MAX_TOKENS - c.shape[1])), constant_values=-1) for c in cases])


def walk(tables, ids):
    """(first completing position or T, the hit there) of rows of token ids [N, T]; -1 pads."""
    state = np.zeros(len(ids), np.uint8)
    at, hit = np.full(len(ids), ids.shape[1]), np.zeros(len(ids), np.uint8)
    for t in range(ids.shape[1]):
        real = ids[:, t] >= 0
        hits = np.where(real, tables.hit[state, ids[:, t]], HIT_NONE)
        fresh = (hits > 0) & (hit == 0)
        at[fresh], hit[fresh] = t, hits[fresh]
        state = np.where(real, tables.next[state, ids[:, t]], state)
    return at, hit


def search(token_bytes, row):
    """(position of the token that completes the first closing tag, which tag) of one row, by string search."""
    pieces = [token_bytes[i] for i in row if i >= 0]
    text = b"".join(pieces)
    ends = [(at + len(tag), hit) for tag, hit in TAGS.items() if (at := text.find(tag)) >= 0]
    if not ends:
        return len(row), HIT_NONE
    end, hit = min(ends)
    for t, piece in enumerate(pieces):
        end -= len(piece)
        if end <= 0:
            return t, hit
    raise AssertionError("the tag ends beyond the text")


@pytest.mark.parametrize("tag", TAGS)
def test_every_tokenisation_stops_at_the_completing_token(tokenizer, tables, tag):
    """A tokenisation that the automaton misses would let a row continue past its search or answer."""
    cases = all_tokenisations(tokenizer.token_bytes, tag)
    at, hit = walk(tables, cases)
    expected = np.array([search(tokenizer.token_bytes, row) for row in cases.tolist()])
    np.testing.assert_array_equal(at, expected[:, 0])
    np.testing.assert_array_equal(hit, expected[:, 1])
    # The enumeration itself: every row completes the tag with its last token, or another tag earlier.
    last = (cases >= 0).sum(axis=1) - 1
    assert np.all(hit > 0) and np.all(at <= last) and np.mean((at == last) & (hit == TAGS[tag])) > 0.9
    print(f"{tag.decode()}: {len(cases)} tokenisations")
    assert len(cases) > (100_000 if tokenizer.size > 100_000 else 100)


def test_random_rows_of_ids(tokenizer, tables):
    """States left by other tokens (half tags, repeated `<`, mixed tags) would hide or forge a boundary."""
    rng = np.random.default_rng(0)
    near = [i for i, p in enumerate(tokenizer.token_bytes) if p and any(p in tag or tag[:2] in p for tag in TAGS)]
    rows = np.array(near)[rng.integers(len(near), size=(20_000, 24))]
    for row in rows[:4000]:  # a tag spelled byte by byte somewhere in the row
        tag = list(TAGS)[rng.integers(2)]
        start = rng.integers(24 - len(tag))
        row[start : start + len(tag)] = [tokenizer.token_bytes.index(bytes([b])) for b in tag]
    at, hit = walk(tables, rows)
    expected = np.array([search(tokenizer.token_bytes, row) for row in rows.tolist()])
    np.testing.assert_array_equal(np.stack([at, hit], 1), expected)
    assert set(hit.tolist()) == {HIT_NONE, HIT_SEARCH, HIT_ANSWER}


def test_control_tokens_and_rows_without_an_id_lead_to_the_root(tokenizer):
    """A control token inside a tag would not break it, or padding rows of the embedding would change the state."""
    rows = tokenizer.size + 11
    tables = build_tables(tokenizer.token_bytes, rows)
    assert tables.next.shape == tables.hit.shape == (len(byte_automaton()[0]), rows)
    assert tables.next.dtype == tables.hit.dtype == np.uint8
    inert = [i for i, piece in enumerate(tokenizer.token_bytes) if piece is None] + list(range(rows - 11, rows))
    assert len(inert) > 11
    assert not tables.next[:, inert].any() and not tables.hit[:, inert].any()
    assert np.all(tables.next[tables.hit > 0] == ROOT)


def test_first_of_two_tags_in_one_token():
    """With both tags in one token, the later one would become the action; an empty token would change the state."""
    tables = build_tables([b"</answer></search>", b"</search></answer>", b"", b"x</sea", b"rch></answer>", b"<"])
    assert tables.hit[ROOT, :2].tolist() == [HIT_ANSWER, HIT_SEARCH]
    half = tables.next[ROOT, 3]
    assert half != ROOT and tables.next[half, 2] == half and tables.hit[half, 4] == HIT_SEARCH
    assert tables.next[half, 5] == tables.next[ROOT, 5] != ROOT
