"""The device programs: where a row stops, what is recorded, and that rows never affect each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import ScriptedSampler, admit, extend, make_learner, make_sampler, random_params, started, tiny_config

from psearch_jax.models import decoder
from psearch_jax.rollout.sampler_programs import SamplingWeights, Status
from psearch_jax.types import TrainBatch

B, S, C = 8, 64, 8  # slots, positions, forced tokens of one call
TURN = 14
CONFIG = tiny_config()
KEYS = np.stack([np.arange(B), np.arange(B) + 100], axis=1).astype(np.uint32)


@pytest.fixture(scope="module")
def weights():
    return SamplingWeights(random_params(CONFIG, seed=1), None)


@pytest.fixture(scope="module")
def scripted(tiny_tokenizer):
    return make_sampler(tiny_tokenizer, CONFIG, cls=ScriptedSampler)


@pytest.fixture(scope="module")
def sampler(tiny_tokenizer):
    return make_sampler(tiny_tokenizer, CONFIG)


def fetch(state):
    """The state as NumPy arrays, with the data of its keys."""
    return jax.tree.map(np.asarray, dataclasses.replace(state, key=jax.random.key_data(state.key)))


def on_device(state):
    """The inverse of `fetch`."""
    key = jax.random.wrap_key_data(jnp.asarray(state.key))
    return dataclasses.replace(jax.tree.map(jnp.asarray, state), key=key)


def prompts(rows: int = B) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, 390, n).tolist() for n in rng.integers(3, 12, rows)]


def spell(tokenizer, text: str) -> list[int]:
    """One token per byte: the longest encoding of a text, with tokens of every byte-level vocabulary."""
    single = {piece: i for i, piece in enumerate(tokenizer.token_bytes) if piece and len(piece) == 1}
    return [single[bytes([b])] for b in text.encode()]


def run_scripts(sampler, weights, scripts, turn_tokens=TURN, positions=S):
    sampler.scripts = {tuple(k): s for k, s in zip(KEYS.tolist(), scripts, strict=False)}
    rows = [p if i < len(scripts) else None for i, p in enumerate(prompts())]
    state = started(sampler, weights, rows, KEYS, positions, turn_tokens)
    before = fetch(state)
    return before, fetch(sampler.generate(weights, state, 1.0))


def test_each_end_stops_a_row_at_its_own_id(tiny_tokenizer, scripted, weights):
    """A row that samples past its boundary is trained on tokens that no host read; one that stops early is cut."""
    encode, stop = tiny_tokenizer.encode_foreign, sorted(tiny_tokenizer.stop_ids)
    im_end = tiny_tokenizer.hf.convert_tokens_to_ids("<|im_end|>")
    search, answer = spell(tiny_tokenizer, "</search>"), spell(tiny_tokenizer, "</answer>")
    word = encode("a")[0]
    tail = [word] * 9
    cases = [  # scripted tokens, number of sampled tokens, status
        ([word, *search, *tail], 10, Status.SEARCH),
        ([word, *answer, im_end, *tail], 11, Status.ANSWER),
        ([word, *answer, *tail], 14, Status.ANSWER),  # four more tokens, then it ends
        ([*answer, word, *search], 13, Status.ANSWER),  # a search after the answer does not count
        ([word, stop[0], *search], 2, Status.EOS),
        ([*search[:-1], stop[-1], *search], 9, Status.EOS),  # a control token breaks a tag
        ([word] * 40, TURN, Status.TURN_FULL),
        ([*[word] * 5, *answer, *tail], 18, Status.ANSWER),  # the answer's tail may pass the turn's budget
    ]
    before, after = run_scripts(scripted, weights, [ids for ids, _, _ in cases])
    for b, (ids, sampled, status) in enumerate(cases):
        start = before.length[b]
        assert (after.length[b] - start, Status(after.status[b])) == (sampled, status), b
        assert after.ids[b, start : start + sampled].tolist() == ids[:sampled]
        np.testing.assert_array_equal(after.ids[b, :start], before.ids[b, :start])
        assert not after.ids[b, start + sampled :].any()
        expected = np.zeros(S, bool)
        expected[start : start + sampled] = True
        np.testing.assert_array_equal(after.mask[b], expected)
        assert np.all((after.logprobs[b] != 0) == expected)


def test_a_full_context_ends_a_row_and_a_tag_at_its_last_id_still_counts(tiny_tokenizer, scripted, weights):
    """Writes past S would be dropped silently while the length keeps growing."""
    search, answer = spell(tiny_tokenizer, "</search>"), spell(tiny_tokenizer, "</answer>")
    lengths = [len(p) for p in prompts()]
    end = 24
    fill = [[5] * (end - n) for n in lengths]
    fill[1][-9:], fill[2][-9:] = search, answer
    fill[3][-11:] = [*answer, 5, 5]
    before, after = run_scripts(scripted, weights, fill, turn_tokens=50, positions=end)
    assert np.all(after.length == end)
    status = [Status.CONTEXT_FULL, Status.SEARCH, Status.ANSWER, Status.ANSWER]
    assert after.status[:4].tolist() == status and set(after.status[4:]) == {Status.CONTEXT_FULL}
    assert np.all(after.mask.sum(1) == end - before.length)


def test_a_prompt_that_fills_the_context_never_runs(sampler, weights):
    """Without room for a single token, the row must end before it samples."""
    rows = [list(range(3, 3 + n)) for n in (12, 11, 5)] + [None] * 5
    state = started(sampler, weights, rows, KEYS, 12, TURN)
    assert np.asarray(state.status)[:4].tolist() == [Status.CONTEXT_FULL, Status.RUNNING, Status.RUNNING, Status.EMPTY]
    after = fetch(sampler.generate(weights, state, 1.0))
    assert np.all(after.length[:3] == [12, 12, after.length[2]]) and np.all(after.length <= 12)
    assert after.mask.sum(1)[0] == 0 and after.ids[0].tolist() == rows[0]


def rollout(sampler, weights, rows, keys, chunks, temperature=1.0, positions=S, width=0):
    """Three turns: generate, extend by `chunks[turn][row]` tokens, generate, ..."""
    return follow(
        sampler, weights, started(sampler, weights, rows, keys, positions, TURN, width=width), chunks, temperature
    )


def follow(sampler, weights, state, chunks, temperature=1.0):
    """The turns of `rollout` from a state whose slots are filled."""
    for chunk in chunks:
        state = sampler.generate(weights, state, temperature)
        state = extend(sampler, weights, state, *padded(chunk, C), TURN)
    return fetch(sampler.generate(weights, state, temperature))


def padded(lists, width=0) -> tuple[np.ndarray, np.ndarray]:
    """Ragged lists of tokens as [rows, width], and their lengths."""
    n = np.array([len(x) for x in lists], np.int32)
    ids = np.zeros((len(lists), max(width, *n)), np.int32)
    for row, x in zip(ids, lists, strict=True):
        row[: len(x)] = x
    return ids, n


def ragged_chunks(seed: int = 3, rows: int = B) -> list[list[list[int]]]:
    rng = np.random.default_rng(seed)
    return [[rng.integers(3, 390, n).tolist() for n in rng.integers(1, C + 1, rows)] for _ in range(2)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_the_trainers(tiny_tokenizer, sampler, weights, temperature):
    """PPO's ratio is 1 before the first update only if sampler and trainer compute the same log-probs."""
    rows = prompts()
    rows[3] = None
    state = rollout(sampler, weights, rows, KEYS, ragged_chunks(), temperature)
    assert state.mask.sum() > 60 and np.all(state.mask.sum(1)[[0, 1, 2, 4]] > 10)
    zeros = np.zeros((B, S), np.float32)
    mask = state.mask.astype(np.float32)
    batch = TrainBatch(state.ids, state.length, mask, zeros, zeros, zeros, state.logprobs, zeros, zeros)
    learner, _ = make_learner(tiny_tokenizer, CONFIG, S, temperature=temperature)
    trainer = learner.score(weights.params, batch)
    gap = np.abs(trainer - state.logprobs)[state.mask]
    assert gap.max() <= 1e-4
    assert np.all(state.logprobs[~state.mask] == 0)


def test_rows_with_nothing_to_add_are_untouched_bit_for_bit(tiny_tokenizer, scripted, weights):
    """A parked row that changes while others are extended, admitted or sampled would be corrupted silently."""
    search = spell(tiny_tokenizer, "</search>")
    _, parked = run_scripts(scripted, weights, [search[: 9 - (b % 3)] if b % 2 else search for b in range(6)])
    state = on_device(parked)
    n = np.array([3, 0, 0, 8, 0, 0, 0, 0], np.int32)
    ids = np.full((B, C), 9, np.int32)
    extended = extend(scripted, weights, state, ids, n, TURN)
    check_rows(parked, fetch(extended), n == 0)
    pool = scripted.prefill(weights, np.full((2, 16), 7, np.int32), np.array([16, 0], np.int32))
    source = np.array([-1, 0, -1, -1, -1, -1, -1, -1], np.int32)
    before = fetch(extended)
    admitted = admit(scripted, extended, pool, source, KEYS + 7, TURN)
    check_rows(before, fetch(admitted), source == -1)
    before = fetch(admitted)
    after = fetch(scripted.generate(weights, admitted, 1.0))
    still = before.status != Status.RUNNING
    assert 3 <= still.sum() < B and np.all(after.length[~still] > before.length[~still])
    check_rows(before, after, still)


def check_rows(a, b, rows, rounding: float = 0.0) -> None:
    """Checks that rows are equal; keys, values and log-probs up to `rounding`."""
    for name in ("ids", "mask", "length", "turn_left", "automaton", "status", "key"):
        np.testing.assert_array_equal(getattr(a, name)[rows], getattr(b, name)[rows], err_msg=name)
    np.testing.assert_allclose(a.logprobs[rows], b.logprobs[rows], rtol=0, atol=rounding)
    for mine, theirs in ((a.cache.k, b.cache.k), (a.cache.v, b.cache.v)):
        np.testing.assert_allclose(mine[:, rows], theirs[:, rows], rtol=0, atol=rounding)


def test_an_extension_forgets_half_a_tag(tiny_tokenizer, scripted, weights):
    """Half a tag before an observation and half after it are not a tag: the host parses each turn separately."""
    search = spell(tiny_tokenizer, "</search>")
    half = [5] * (TURN - 8) + search[:-1]
    _, state = run_scripts(scripted, weights, [[*half, search[-1], *[5] * 20]])
    assert state.status[0] == Status.TURN_FULL
    state = on_device(state)
    n = np.array([1] + [0] * (B - 1), np.int32)
    state = extend(scripted, weights, state, np.full((B, C), 9, np.int32), n, TURN)
    state = fetch(scripted.generate(weights, state, 1.0))
    assert state.status[0] == Status.TURN_FULL and state.mask[0].sum() == 2 * TURN


def test_an_extension_past_the_end_is_dropped_and_overwrites_nothing(scripted, weights):
    """A clamped write would overwrite the last tokens and keys with the overflow."""
    prompt = list(range(10, 22))  # 12 tokens, then S = 16: room for 4
    keys = KEYS[:3]
    state = started(scripted, weights, [prompt, prompt, prompt], keys, 16, TURN)
    before = fetch(state)
    ids = np.arange(100, 100 + 3 * C, dtype=np.int32).reshape(3, C)
    after = extend(scripted, weights, state, ids, np.array([8, 4, 3], np.int32), TURN)
    again = fetch(extend(scripted, weights, after, ids, np.array([8, 0, 0], np.int32), TURN))
    for b, added in enumerate((4, 4, 3)):
        assert again.ids[b, :12].tolist() == prompt and again.length[b] == 12 + added
        assert again.ids[b, 12 : 12 + added].tolist() == ids[b, :added].tolist()
        assert not again.ids[b, 12 + added :].any() and not again.mask[b].any()
    assert again.status.tolist() == [Status.CONTEXT_FULL, Status.CONTEXT_FULL, Status.RUNNING]
    new, old = ((c.v, c.k) for c in (again.cache, before.cache))
    for x, y in zip(new, old, strict=True):
        np.testing.assert_array_equal(x[:, :, :, :11], y[:, :, :, :11])
        assert np.abs(x[:, 0, :, 11:15]).min() > 0 and np.all(x[:, 0, :, 15] == 0)


def test_a_refilled_slot_is_like_a_fresh_one(sampler, weights):
    """The next rollout in a slot must never attend to keys that the last one left there."""
    rows, chunks = prompts(), ragged_chunks()
    fresh = rollout(sampler, weights, rows, KEYS, chunks)
    used = on_device(rollout(sampler, weights, rows[::-1], KEYS + 50, ragged_chunks(9)))
    pool = sampler.prefill(weights, *padded(rows))
    state = admit(sampler, used, pool, np.arange(B, dtype=np.int32), KEYS, TURN)
    state = follow(sampler, weights, state, chunks)
    np.testing.assert_array_equal(state.ids, fresh.ids)
    np.testing.assert_array_equal(state.logprobs, fresh.logprobs)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_finite_ends_its_own_row_and_leaves_with_it(sampler, weights, poison):
    """A masked position contributes 0 times its value: a NaN would end every later rollout of the slot, and no metric
    would show it."""

    def of(x):  # an integer is always finite, so its scale is poisoned instead
        return jnp.asarray(poison if jnp.issubdtype(x.dtype, jnp.floating) else 1, x.dtype)

    rows, chunks = prompts(), ragged_chunks()
    fresh = rollout(sampler, weights, rows, KEYS, chunks)
    state = started(sampler, weights, rows, KEYS, S, TURN)
    broken = jax.tree.map(lambda x: x.at[:, [1, 4]].set(of(x)), state.cache)
    used = sampler.generate(weights, dataclasses.replace(state, cache=broken), 1.0)
    ended = fetch(used)
    assert ended.status[[1, 4]].tolist() == [Status.NOT_FINITE] * 2 and not ended.mask[[1, 4]].any()
    assert ended.length[[1, 4]].tolist() == [len(rows[1]), len(rows[4])] and np.isfinite(ended.logprobs).all()
    others = np.setdiff1d(np.arange(B), [1, 4])
    assert np.all(ended.status[others] != Status.NOT_FINITE) and ended.mask[others].any(axis=1).all()

    emptied = jax.tree.map(lambda x: jnp.full_like(x, of(x)), used.cache)  # as if all rows had ended with such values
    pool = sampler.prefill(weights, *padded(rows))
    state = admit(sampler, dataclasses.replace(used, cache=emptied), pool, np.arange(B, dtype=np.int32), KEYS, TURN)
    refilled = follow(sampler, weights, state, chunks)
    check_rows(fresh, refilled, np.arange(B))


def test_greedy_takes_the_likeliest_id(tiny_tokenizer, sampler, weights):
    """Evaluation at temperature 0 must be the argmax of a plain forward pass, with log-probs at temperature 1."""
    state = rollout(sampler, weights, prompts(), KEYS, [], temperature=0.0)
    model = nnx.merge(decoder.graphdef(CONFIG, jnp.float32), weights.params)
    logits = np.asarray(model.logits(model.hidden(jnp.asarray(state.ids))[0], 1.0, tiny_tokenizer.size))
    table = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    rows, at = np.nonzero(state.mask)
    np.testing.assert_array_equal(state.ids[rows, at], logits[rows, at - 1].argmax(-1))
    np.testing.assert_allclose(state.logprobs[rows, at], table[rows, at - 1].max(-1), atol=1e-5)


def test_rows_picked_out_of_order_are_extended_as_in_place(sampler, weights):
    """Passages appended to another row than the one that searched, or a padding row that overwrites a real one."""
    chunk = ragged_chunks()[0]
    state = sampler.generate(weights, started(sampler, weights, prompts(), KEYS, S, TURN), 1.0)
    before = fetch(state)
    ids, n = padded([c if b in (1, 4, 6) else [] for b, c in enumerate(chunk)], C)
    wanted = fetch(extend(sampler, weights, on_device(before), ids, n, TURN))
    rows = np.array([6, -1, 1, 4], np.int32)
    counts = np.where(rows < 0, 3, n[rows]).astype(np.int32)
    picked = sampler.extend(weights, on_device(before), rows, ids[rows], counts, np.full(len(rows), TURN, np.int32))
    # With another number of rows, some processors add in another order.
    check_rows(fetch(picked), wanted, np.arange(B), rounding=1e-5)


def test_a_shorter_span_of_the_cache_changes_no_rollout(sampler, weights):
    """No row may need positions past the span; one position too few and rows forget their own tokens."""
    spans = []
    for span in (None, 28):  # prompts of up to 11 tokens, turns of 14 and an answer's tail
        state = started(sampler, weights, prompts(), KEYS, S, TURN)
        spans.append(fetch(sampler.generate(weights, state, 1.0, span)))
    np.testing.assert_array_equal(spans[0].ids, spans[1].ids)
    np.testing.assert_allclose(spans[0].logprobs, spans[1].logprobs, atol=1e-5)
    assert spans[0].length.max() > 20


@pytest.mark.parametrize("unstack", ["per_call", "once"])
def test_unstacked_layers_change_no_rollout(tiny_tokenizer, sampler, weights, unstack):
    """Decoding from each layer's own arrays, as on a GPU and on a CPU, samples the tokens that the stacks give."""
    unstacking = make_sampler(tiny_tokenizer, CONFIG, unstack=unstack)
    unstacked = unstacking.weights(weights.params)
    assert (unstacked.unstacked is None) == (unstack == "per_call")
    states = [
        fetch(each.generate(w, started(each, weights, prompts(), KEYS, S, TURN), 1.0))
        for each, w in ((sampler, weights), (unstacking, unstacked))
    ]
    np.testing.assert_array_equal(states[0].ids, states[1].ids)
    np.testing.assert_allclose(states[0].logprobs, states[1].logprobs, atol=1e-5)
    assert states[0].mask.sum() > 50
