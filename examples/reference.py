"""ParallelSearch (arXiv 2508.09303) in one file, with numpy, jax and the standard library.

    python examples/reference.py --seed=0 --steps=150      # about two minutes on two CPU cores

A policy answers questions with the help of a search engine. It writes turns in a fixed grammar:

    <think> look </think> <search> colour of ann ## colour of bob </search>
        <information> ann is red ; bob is blue </information>      (appended by the program and never trained on)
    <think> done </think> <answer> red blue </answer>

`##` separates sub-queries that run at the same time. Independent facts can be searched together. If the second query
needs the result of the first, the two searches must follow one another. Reinforcement learning (GRPO) teaches the
difference. Each step

    1. samples several rollouts of every question and runs the searches in them,
    2. rewards each: right answer, valid grammar, split exactly if the facts are independent, number of searches,
    3. compares the rewards of each question's rollouts, which gives their advantages,
    4. makes tokens of rollouts with positive advantage more likely, and others less, by a clipped loss with a KL term.

Random weights do not produce the grammar, so a short supervised warm-up comes first. It imitates scripts that split at
random, and whose answers are right in one case of four and random otherwise. GRPO has to learn the rest from rewards.
Each question has facts of its own, so an answer cannot be memorised and must be read from the passages. The library,
psearch_jax/, uses the same names; tests/programs/test_reference_example.py compares the two.

Letters in shapes: B rows, T query positions, S key positions, D width, N heads, K kv heads, G = N/K, H head dim,
F mlp, V vocabulary, L layers, Q questions, R rollouts of each.
"""

import argparse
import functools
import string
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# ---- the world: questions with their facts ----

NAMES = "ann bob cal dan eve fay gil hal".split()
COLOURS = "red blue green black white pink".split()
TAGS = "<think> </think> <search> </search> <information> </information> <answer> </answer>".split()
VOCABULARY = ["<pad>", *TAGS, *"## ; colour of and the friend is look done nothing found".split(), *NAMES, *COLOURS]
TOKEN = {word: i for i, word in enumerate(VOCABULARY)}


def encode(text: str) -> list[int]:
    return [TOKEN[word] for word in text.split()]


class Question(NamedTuple):
    text: str
    answer: str
    kind: str  # parallel, sequential or single
    passages: dict[str, str]  # by query; the first two are the ones that the answer needs, in order


def random_question(rng: np.random.Generator) -> Question:
    """A parallel or a sequential question about new facts."""
    a, b = rng.choice(NAMES, 2, replace=False)
    of_a, of_b = rng.choice(COLOURS, 2)
    colours = {f"colour of {b}": f"{b} is {of_b}", f"colour of {a}": f"{a} is {of_a}"}
    if rng.random() < 0.5:
        return Question(f"colour of {b} and {a}", f"{of_b} {of_a}", "parallel", colours)
    passages = {f"friend of {a}": f"friend is {b}", **colours}
    return Question(f"colour of the friend of {a}", of_b, "sequential", passages)


# ---- rollouts: what the policy writes, and how the program responds ----

CONTEXT = 48  # tokens of a rollout; at this length it ends without an answer
MAX_TURNS, MAX_SUB_QUERIES = 5, 8  # a search in the last turn is not run


class Turn(NamedTuple):
    """What the policy wrote up to the end of a search or an answer."""

    queries: tuple[str, ...]  # the sub-queries that were run
    answer: str | None
    well_formed: bool  # a thought, then one search or answer, nothing else


def parse_turn(words: Sequence[str]) -> Turn:
    """Parses a turn, which ends with </search> or </answer>. Without the opening tag, or a query, it has no action."""
    kind = words[-1].strip("</>")
    if f"<{kind}>" not in words:
        return Turn((), None, False)
    start = len(words) - 1 - words[::-1].index(f"<{kind}>")
    content = " ".join(words[start + 1 : -1])
    tags = [word for word in words if word in TAGS]
    well_formed = tags == ["<think>", "</think>", f"<{kind}>", f"</{kind}>"]
    well_formed &= words[0] == "<think>" and words[start - 1] == "</think>"
    if kind == "answer":
        return Turn((), content, well_formed)
    queries = dict.fromkeys(part.strip() for part in content.split("##") if part.strip())  # without repetitions
    return Turn(tuple(queries)[:MAX_SUB_QUERIES], None, well_formed and bool(queries))


class Rollout:
    """A question and what follows it: token ids, which of them were sampled, and the turns parsed from them."""

    def __init__(self, question: Question):
        self.question, self.turns, self.ended = question, list[Turn](), False
        self.ids = encode(question.text)
        self.sampled = [False] * len(self.ids)
        self._turn_start = len(self.ids)

    def append(self, token: int) -> None:
        """Adds a sampled token and, if it completes a search, the passages."""
        self.ids.append(token)
        self.sampled.append(True)
        if VOCABULARY[token] in ("</search>", "</answer>"):
            turn = parse_turn([VOCABULARY[i] for i in self.ids[self._turn_start :]])
            is_last = len(self.turns) == MAX_TURNS - 1
            self.turns.append(Turn((), turn.answer, turn.well_formed) if is_last else turn)
            self.ended = is_last or turn.answer is not None
            if not self.ended:
                self._observe(turn.queries)
        self.ended |= len(self.ids) >= CONTEXT

    def _observe(self, queries: Sequence[str]) -> None:
        """Searches, and appends the passages; they are not sampled, so the loss leaves them out."""
        passages = [self.question.passages.get(query, "nothing found") for query in queries]
        observation = f"<information> {' ; '.join(passages)} </information>" if queries else "nothing found"
        self.ids = (self.ids + encode(observation))[:CONTEXT]
        self.sampled += [False] * (len(self.ids) - len(self.sampled))
        self._turn_start = len(self.ids)

    @property
    def answer(self) -> str | None:
        return self.turns[-1].answer if self.turns else None

    @property
    def searches(self) -> list[tuple[str, ...]]:
        """The sub-queries of each search that was run."""
        return [turn.queries for turn in self.turns if turn.queries]

    @property
    def split(self) -> bool:
        """Whether the first search has several sub-queries."""
        return bool(self.searches) and len(self.searches[0]) > 1


# ---- rewards and advantages ----


def normalise(text: str) -> str:
    """SQuAD's normalisation: lower case, without punctuation, articles and extra blanks."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(word for word in bare.split() if word not in ("a", "an", "the"))


def exact_match(rollout: Rollout) -> bool:
    return rollout.answer is not None and normalise(rollout.answer) == normalise(rollout.question.answer)


def reward_parts(rollout: Rollout) -> tuple[float, float, float, float]:
    """Outcome, format, decomposition and search count, with the published weights. The reward is their sum."""
    kind, n, right = rollout.question.kind, len(rollout.searches), exact_match(rollout)
    valid = rollout.answer is not None and all(turn.well_formed for turn in rollout.turns)
    form = (0.0 if valid else -0.1) if right else (0.1 if valid else 0.0)
    bonus = 3 * 0.15 if kind == "parallel" else 0.15
    decomposition = bonus if rollout.split == (kind == "parallel") else 0.0
    distance = max(0, 2 - n) if kind == "sequential" else abs(n - 1)
    return float(right), form, decomposition, 0.35 * (1 - distance)


def group_advantages(rewards: np.ndarray) -> np.ndarray:
    """(reward - mean) / standard deviation of each question, 0 if all are equal. [Q, R] (arXiv 2402.03300 sec. 4.1)"""
    mean, deviation = rewards.mean(axis=1, keepdims=True), rewards.std(axis=1, ddof=1, keepdims=True)
    return np.where(np.ptp(rewards, axis=1, keepdims=True) < 1e-9, 0.0, (rewards - mean) / (deviation + 1e-6))


# ---- the policy: a decoder with the architecture of Qwen2.5 ----

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 2, 4, 2, 16, 128
ROPE_THETA, RMS_EPS = 10_000.0, 1e-6
Params = dict  # of arrays; "layers" is a list of such dicts


def init_params(rng: np.random.Generator) -> Params:
    """Random kernels of standard deviation 1/sqrt(D) and embedding of 0.4, zero biases, norms of one. float32."""
    D, N, K, H, F = WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP

    def kernel(*shape: int, deviation: float = D**-0.5) -> jax.Array:
        return jnp.asarray(rng.normal(0, deviation, shape), jnp.float32)

    shapes = dict(q=(D, N, H), k=(D, K, H), v=(D, K, H), o=(N, H, D), gate=(D, F), up=(D, F), down=(F, D))

    def layer() -> Params:
        kernels = {f"{name}_kernel": kernel(*shape) for name, shape in shapes.items()}
        biases = {f"{name}_bias": jnp.zeros(shapes[name][1:]) for name in "qkv"}
        return {"attention_norm": jnp.ones(D), "mlp_norm": jnp.ones(D), **kernels, **biases}

    embedding, layers = kernel(len(VOCABULARY), D, deviation=0.4), [layer() for _ in range(LAYERS)]
    return {"embedding": embedding, "layers": layers, "final_norm": jnp.ones(D)}


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + RMS_EPS)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary positions: each pair (i, i + H/2) of x [B, T, heads, H] is rotated in proportion to its position [T]."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * ROPE_THETA ** (-jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], axis=-1)


def logits(params: Params, ids: jax.Array, cache: jax.Array | None = None, start: jax.Array | int = 0) -> tuple:
    """The logits [B, T, V] of each next token, and the cache with the keys and values of these positions.

    ids: [B, T], at positions start to start + T - 1. cache: [L, 2, B, S, K, H]; None if start is 0 and none is needed.
    """
    positions = start + jnp.arange(ids.shape[1])
    x, stored = params["embedding"][ids], []
    for layer, w in enumerate(params["layers"]):
        y = rms_norm(x, w["attention_norm"])
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, w[f"{name}_kernel"]) + w[f"{name}_bias"] for name in "qkv")
        q, new = rotate(q, positions), jnp.stack([rotate(k, positions), v])
        stored.append(new if cache is None else jax.lax.dynamic_update_slice_in_dim(cache[layer], new, start, axis=2))
        k, v = stored[-1]  # [B, S, K, H]
        B, T, N, H = q.shape
        q = q.reshape(B, T, k.shape[2], -1, H)  # [B, T, K, G, H]: G query heads share a key and value head
        scores = jnp.einsum("btkgh,bskh->bkgts", q, k) / H**0.5
        visible = jnp.arange(k.shape[1]) <= positions[:, None]  # [T, S]
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
        attended = jnp.einsum("bkgts,bskh->btkgh", weights, v).reshape(B, T, N, H)
        x += jnp.einsum("btnh,nhd->btd", attended, w["o_kernel"])
        y = rms_norm(x, w["mlp_norm"])
        x += (jax.nn.silu(y @ w["gate_kernel"]) * (y @ w["up_kernel"])) @ w["down_kernel"]
    return rms_norm(x, params["final_norm"]) @ params["embedding"].T, jnp.stack(stored)


@functools.partial(jax.jit, donate_argnames="cache")
def next_tokens(params: Params, cache: jax.Array, ids: jax.Array, position: int, key: jax.Array) -> tuple:
    """Samples the tokens [B] that follow `ids` [B] at `position`; also returns the cache."""
    scores, cache = logits(params, ids[:, None], cache, position)
    return jax.random.categorical(jax.random.fold_in(key, position), scores[:, 0]), cache


def sample(params: Params, questions: Sequence[Question], key: jax.Array) -> list[Rollout]:
    """One rollout for each question, all at the same position. A token that is known already is not sampled."""
    rollouts = [Rollout(question) for question in questions]
    cache = jnp.zeros((LAYERS, 2, len(rollouts), CONTEXT, KV_HEADS, HEAD_DIM))
    for position in range(CONTEXT - 1):
        ids = np.array([r.ids[position] if position < len(r.ids) else TOKEN["<pad>"] for r in rollouts])
        sampled, cache = next_tokens(params, cache, ids, position, key)
        for rollout, token in zip(rollouts, np.asarray(sampled).tolist(), strict=True):
            if not rollout.ended and len(rollout.ids) == position + 1:
                rollout.append(token)
    return rollouts


# ---- losses and updates ----

CLIP, KL_COEFFICIENT = 0.2, 0.001
BETA1, BETA2, ADAM_EPS, WEIGHT_DECAY, MAX_NORM = 0.9, 0.999, 1e-8, 0.01, 1.0


def padded(rollouts: Sequence[Rollout]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [B, S] int32, padded on the right, and 1.0 where a token was sampled, else 0.0 [B, S]."""
    ids, mask = np.zeros((len(rollouts), CONTEXT), np.int32), np.zeros((len(rollouts), CONTEXT), np.float32)
    for row, rollout in enumerate(rollouts):
        ids[row, : len(rollout.ids)], mask[row, : len(rollout.ids)] = rollout.ids, rollout.sampled
    return ids, mask


@jax.jit
def token_logprobs(params: Params, ids: jax.Array) -> jax.Array:
    """Log-probability of each token given those before it [B, S]; 0 for the first of a row."""
    table = jax.nn.log_softmax(logits(params, ids[:, :-1])[0])
    return jnp.pad(jnp.take_along_axis(table, ids[:, 1:, None], axis=-1)[..., 0], ((0, 0), (1, 0)))


def imitation_loss(params: Params, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean negative log-likelihood of the tokens in the mask."""
    return -jnp.sum(mask * token_logprobs(params, ids)) / jnp.sum(mask)


def policy_loss(
    params: Params, ids: jax.Array, mask: jax.Array, advantages: jax.Array, old: jax.Array, reference: jax.Array
) -> jax.Array:
    """Clipped surrogate and KL to the reference, averaged over sampled tokens (GRPO, arXiv 2402.03300 eq. 3).

    advantages: [B]. old, reference: [B, S], log-probs under the policy that sampled, and under the reference.
    """
    logprobs = token_logprobs(params, ids)
    ratio = jnp.exp(logprobs - old)
    gain = ratio * advantages[:, None]
    clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages[:, None]
    d = reference - logprobs
    kl = jnp.exp(d) - d - 1  # the k3 estimator: never negative, and its mean is the KL divergence
    return jnp.sum(mask * (KL_COEFFICIENT * kl - jnp.minimum(gain, clipped))) / jnp.sum(mask)


def init_optimizer(params: Params) -> tuple[Params, Params, float]:
    """Means of gradients and of their squares, and the number of updates."""
    return jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params), 0.0


@functools.partial(jax.jit, static_argnames="loss")
def update(params: Params, optimizer: tuple, rate: float, loss: Callable[..., jax.Array], *batch: jax.Array):
    """One step of AdamW (arXiv 1711.05101), with the global norm of the gradient clipped. (params, optimizer)"""
    grads = jax.grad(loss)(params, *batch)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * MAX_NORM / jnp.maximum(norm, MAX_NORM), grads)
    mean, square, updates = optimizer
    updates += 1
    mean = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, mean, grads)
    square = jax.tree.map(lambda s, g: BETA2 * s + (1 - BETA2) * g**2, square, grads)

    def step(p: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        direction = (m / (1 - BETA1**updates)) / (jnp.sqrt(s / (1 - BETA2**updates)) + ADAM_EPS)
        return p - rate * (direction + WEIGHT_DECAY * p)

    return jax.tree.map(step, params, mean, square), (mean, square, updates)


# ---- warm-up and reinforcement learning ----

WARM_UP_STEPS, WARM_UP_ROWS, WARM_UP_RATE = 200, 32, 0.003
QUESTIONS, SAMPLES, MINI_BATCHES, RATE = 16, 8, 2, 0.001  # per step: questions, rollouts of each, updates


def scripted(question: Question, split: bool, accuracy: float, rng: np.random.Generator) -> Rollout:
    """A rollout that searches for both facts, in one search or in two; its answer is right, or else random."""
    rollout = Rollout(question)
    searches = list(question.passages)[:2]
    if split and question.kind == "parallel":
        searches = [" ## ".join(searches)]
    elif split:  # the friend is not known yet, so half of the first search is in vain
        searches[0] += " ## colour of friend"
    is_random = rng.random() >= accuracy
    answer = " ".join(rng.choice(COLOURS, len(question.answer.split()))) if is_random else question.answer
    turns = [f"<think> look </think> <search> {search} </search>" for search in searches]
    for token in encode(" ".join([*turns, f"<think> done </think> <answer> {answer} </answer>"])):
        rollout.append(token)
    return rollout


def warm_up(params: Params, rng: np.random.Generator) -> Params:
    """Imitates scripts that split half of the questions, of either kind, and look up a quarter of the answers."""
    optimizer = init_optimizer(params)
    for _ in range(WARM_UP_STEPS):
        questions = [random_question(rng) for _ in range(WARM_UP_ROWS)]
        rollouts = [scripted(question, rng.random() < 0.5, 1 / 4, rng) for question in questions]
        params, optimizer = update(params, optimizer, WARM_UP_RATE, imitation_loss, *padded(rollouts))
    return params


def figures(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over rollouts: reward, exact match, turns, and how often the questions of each kind were split."""
    split = {kind: [r.split for r in rollouts if r.question.kind == kind] for kind in ("parallel", "sequential")}
    return {
        "reward": float(np.mean([sum(reward_parts(r)) for r in rollouts])),
        "EM": float(np.mean([exact_match(r) for r in rollouts])),
        "turns": float(np.mean([len(r.turns) for r in rollouts])),
        **{f"{kind} split": float(np.mean(values)) for kind, values in split.items()},
    }


def line(name: str, values: dict[str, float]) -> str:
    return f"{name:<24}" + "  ".join(f"{name} {value:5.2f}" for name, value in values.items())


def train(seed: int, steps: int) -> dict[str, dict[str, float]]:
    """Prints the progress and returns the figures of the policy, before and after, and of two scripts."""
    rng, key = np.random.default_rng(seed), jax.random.key(seed)
    test = [random_question(rng) for _ in range(400)]
    chance = [scripted(question, rng.random() < 0.5, 0.0, rng) for question in test]
    best = [scripted(question, question.kind == "parallel", 1.0, rng) for question in test]
    params = reference = warm_up(init_params(rng), rng)
    before = sample(params, test, jax.random.fold_in(key, steps))
    optimizer = init_optimizer(params)
    for step in range(steps):
        questions = [random_question(rng) for _ in range(QUESTIONS)]
        rollouts = sample(params, [q for q in questions for _ in range(SAMPLES)], jax.random.fold_in(key, step))
        rewards = np.array([sum(reward_parts(rollout)) for rollout in rollouts])
        advantages = group_advantages(rewards.reshape(QUESTIONS, SAMPLES)).reshape(-1)
        ids, mask = padded(rollouts)
        batch = ids, mask, advantages, token_logprobs(params, ids), token_logprobs(reference, ids)
        for rows in np.split(np.arange(len(rollouts)), MINI_BATCHES):
            params, optimizer = update(params, optimizer, RATE, policy_loss, *(x[rows] for x in batch))
        if (step + 1) % 10 == 0:
            print(line(f"step {step + 1}", figures(rollouts)), flush=True)
    after = sample(params, test, jax.random.fold_in(key, steps))
    results = {"chance": chance, "after the warm-up": before, "after GRPO": after, "best possible": best}
    return {name: figures(rollouts) for name, rollouts in results.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learns to search in parallel, in a small closed world.")
    parser.add_argument("--seed", type=int, default=0, help="of questions, weights and samples")
    parser.add_argument("--steps", type=int, default=150, help="steps of GRPO after the warm-up")
    for name, values in train(**vars(parser.parse_args())).items():
        print(line(name, values))
