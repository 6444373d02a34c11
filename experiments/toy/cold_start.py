"""The cold starts of the toy policies: supervised fine-tuning on exercises and scripted trajectories.

Every batch trains one skill. Exercises dominate early and trajectories later, but no skill ever stops, because skills
that are no longer trained are forgotten. Each row is renamed when it is drawn (names.py), so names do not repeat and
the policy must copy them from the context.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial

import jax
import numpy as np
import optax
from flax import nnx

from experiments.toy import exercises
from experiments.toy.scripted import OBSERVATION_TOKENS, Mixture, plan, recall, write_all
from psearch_jax.closed_world.encyclopedia import ClosedWorld
from psearch_jax.closed_world.names import SYLLABLES, change_syllable, draw_renaming
from psearch_jax.closed_world.question_forms import calculated_forms, kind_counts, known_questions, questions
from psearch_jax.config import (
    PRESETS,
    Config,
    DecoderConfig,
    LearningSection,
    MeshSection,
    ModelSection,
    RolloutSection,
)
from psearch_jax.config.sections import DIALECTS
from psearch_jax.config.setting import SEED, one_of, setting
from psearch_jax.data.transcripts import Row
from psearch_jax.limits import check_fields
from psearch_jax.models import decoder, hf
from psearch_jax.rollout.calculator import CALCULATOR
from psearch_jax.rollout.tools import SEARCH_SCHEMA, Toolbox
from psearch_jax.runtime.paths import TOYS
from psearch_jax.sft.learner import SupervisedTrainer
from psearch_jax.sft.trainer import SupervisedRun
from psearch_jax.sharding import make_mesh
from psearch_jax.text.dialects import Dialect, Tags, ToolCalls
from psearch_jax.text.tokenizer import Tokenizer
from psearch_jax.train.checkpointing.checkpoint import model_record
from psearch_jax.train.state import init_state
from psearch_jax.types import KINDS, Kind, MicroBatch, Question
from retrieval.protocol import Passage, Retriever

SKILLS = ("copying", "looking_up", "judging", "recalling", "reading", "trajectories")

# The curriculum: of each phase, its share of the steps and the sampling weights of SKILLS.
PHASES = (
    (0.03, (0.60, 0.40, 0.00, 0.00, 0.00, 0.00)),
    (0.20, (0.08, 0.21, 0.28, 0.03, 0.20, 0.20)),
    (0.77, (0.03, 0.06, 0.15, 0.03, 0.20, 0.53)),
)
# Initial values (see `starting_params`).
LOOKING_BACK = (1, 2, 3)  # offset, in tokens, that each of the first heads of layer 0 attends back to
SHARPNESS = 5.0  # scale of the query and key biases of these heads: higher means sharper attention
MATCHING = 8.0  # scale of the induction head's keys: how strongly equal tokens attract each other
COPYING = 2.0  # scale of the induction head's output: how strongly the attended token is repeated
QUIET = 0.2  # scale of all other attention and MLP output kernels
_FAST_PAIRS = 6  # rotary dimension pairs whose angles differ clearly between neighbouring positions
# The recipe of the shipped policy.
FIRST_WORLD = 1000  # seed of the first of the worlds, with consecutive seeds, that trajectories are about
SHARES: dict[Kind, float] = {"parallel": 0.42, "sequential": 0.32, "mixed": 0.06}  # of trajectories; the rest: single
SIZES = {2: 0.36, 3: 0.22, 4: 0.14, 5: 0.08, 6: 0.07, 7: 0.07, 8: 0.06}  # shares of comparisons, by their entities
TOPK, TURNS = 2, 4  # passages per sub-query; turns in which a trajectory may search
BUCKETS = (48, 80, 128, 192, 256, 416)  # row lengths in tokens; longer rows are dropped
PEAK_RATE, FINAL_RATE_SHARE, WARMUP_STEPS = 2e-3, 0.05, 100  # the warm-up takes at most a tenth of all steps
BETA2, WEIGHT_DECAY, GRADIENT_CLIP = 0.98, 0.1, 1.0


@dataclass(frozen=True)
class ToySFTConfig:
    """The config of a cold-start run."""

    seed: int = setting(0, "Seed of rows, batches and, with tags, initial weights.", accepted=SEED)
    dialect: str = setting(
        "tags",
        "`tags`, or `tool_calls` with a calculator, which starts from the shipped policy for tags.",
        accepted=one_of(DIALECTS),
    )
    steps: int = setting(10_000, "Training steps; each trains one skill.", at_least=1)
    worlds: int = setting(4, "Number of worlds for trajectories.", at_least=1)
    trajectories_per_world: int = setting(4000, "Scripted trajectories of each world.", at_least=1)
    exercise_rows: int = setting(6000, "Rows of each exercise, before renaming.", at_least=1)
    tokens_per_batch: int = setting(
        2048, "Tokens of a batch, including padding. With small batches copying is learned earlier.", at_least=1
    )
    log_every_steps: int = setting(100, "Steps between lines of metrics.", at_least=1)
    checkpoint_every_steps: int = setting(500, "Steps between checkpoints.", at_least=1)

    def __post_init__(self) -> None:
        check_fields(self)


def make_dialects(
    config: ToySFTConfig, tokenizer: Tokenizer, encode: Callable[[str], list[int]]
) -> tuple[Dialect, Dialect | None]:
    """The dialect of the rows, and with tool calls the same one with the calculator."""
    if config.dialect == "tags":
        return Tags(tokenizer, OBSERVATION_TOKENS, encode=encode), None
    search = ToolCalls(tokenizer, OBSERVATION_TOKENS, encode=encode, schemas=[SEARCH_SCHEMA])
    return search, replace(search, schemas=[SEARCH_SCHEMA, CALCULATOR.schema])


def make_rows(
    config: ToySFTConfig, tokenizer: Tokenizer, make_retriever: Callable[[Sequence[Passage]], Retriever]
) -> dict[str, list[Row]]:
    """The rows of every skill, before renaming; deterministic in the arguments."""
    encode = lru_cache(maxsize=1 << 16)(tokenizer.encode_foreign)
    dialect, calculating = make_dialects(config, tokenizer, encode)
    rng = np.random.default_rng([config.seed, 0x0C])
    rows: dict[str, list[Row]] = {
        name: [make(rng, encode) for _ in range(config.exercise_rows)]
        for name, make in (
            ("copying", exercises.copying),
            ("looking_up", exercises.looking_up),
            ("judging", exercises.judging),
        )
    }
    stated = known_questions(ClosedWorld.make(0))
    rows["recalling"] = write_all(stated, [recall(q) for q in stated], None, dialect)
    # Names that differ in one syllable must be searched for; else any name that starts like a known one is answered
    # from memory.
    rng = np.random.default_rng([config.seed, 0x0D])
    others = [_of_another(question, rng) for question in stated for _ in range(2)]
    first_turns = [plan(question, rng, Mixture(), TURNS)[:1] for question in others]
    rows["recalling"] += write_all(others, first_turns, None, dialect)
    rows["reading"], rows["trajectories"] = [], []
    counts = kind_counts(config.trajectories_per_world, SHARES)
    for seed in range(FIRST_WORLD, FIRST_WORLD + config.worlds):
        world = ClosedWorld.make(seed)
        toolbox = Toolbox(make_retriever(world.passages), TOPK, [CALCULATOR])
        rng = np.random.default_rng([config.seed, seed, 0x0A])
        # With tool calls, every second world has a calculator, and further questions that need it.
        with_calculator = calculating is not None and not (seed - FIRST_WORLD) % 2
        written = calculating if calculating is not None and with_calculator else dialect
        for skill, draw in (("reading", 1), ("trajectories", 2)):
            for calculated in (False, True)[: 1 + with_calculator]:
                forms = {kind: calculated_forms(kind) if calculated else [] for kind in KINDS}
                selected = [
                    q
                    for kind in KINDS
                    if forms[kind] or not calculated
                    for q in questions(
                        world, "train", kind, counts[kind], draw + 2 * config.seed, forms[kind], sizes=SIZES
                    )
                ]
                plans = [plan(q, rng, Mixture(), TURNS) for q in selected]
                if skill == "reading":
                    plans = [steps[:1] for steps in plans]
                rows[skill] += write_all(selected, plans, toolbox, written)
    return rows


def _of_another(question: Question, rng: np.random.Generator) -> Question:
    """The same question about a name that differs in one syllable."""
    ((attribute, name, value),) = question.metadata["rounds"][0]
    other = change_syllable(rng, name)
    facts = question.metadata | {"rounds": [[[attribute, other, value]]]}
    return replace(question, text=question.text.replace(name, other), metadata=facts)


class Batches:
    """The batch of every step. Seed and step determine its skill, its rows and their renaming."""

    def __init__(self, config: ToySFTConfig, tokenizer: Tokenizer, rows: Mapping[str, Sequence[Row]]):
        self.config, self.size = config, tokenizer.size
        self.syllables = syllable_ids(tokenizer)
        # By skill, then bucket: token ids [n, bucket] int32 and masks [n, bucket] bool.
        self.pools: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for skill, members in rows.items():
            pools = []
            for low, bucket in zip((0, *BUCKETS), BUCKETS):  # noqa: B905
                chosen = [row for row in members if low < len(row[0]) <= bucket]
                if not chosen:
                    continue
                ids = np.zeros((len(chosen), bucket), np.int32)
                mask = np.zeros((len(chosen), bucket), bool)
                for i, (row, taught) in enumerate(chosen):
                    ids[i, : len(row)], mask[i, : len(row)] = row, taught
                pools.append((ids, mask))
            self.pools[skill] = pools

    def __getitem__(self, step: int) -> tuple[str, list[MicroBatch]]:
        """The skill of a step and one unpacked micro-batch [B, T], where B * T is about `tokens_per_batch`."""
        rng = np.random.default_rng([self.config.seed, step, 0x0B])
        skill = SKILLS[rng.choice(len(SKILLS), p=self._weights(step))]
        pools = self.pools[skill]
        sizes = np.asarray([ids.size for ids, _ in pools])
        ids, mask = pools[rng.choice(len(pools), p=sizes / sizes.sum())]
        rows = rng.integers(len(ids), size=max(1, self.config.tokens_per_batch // ids.shape[1]))
        chosen = ids[rows]
        if skill != "recalling":  # recalled facts belong to their names
            chosen = np.stack([draw_renaming(rng, self.syllables, self.size)[row] for row in chosen])
        return skill, [_one_row_each(chosen, mask[rows])]

    def _weights(self, step: int) -> np.ndarray:
        ends = np.cumsum([share for share, _ in PHASES])
        phase = min(int(np.searchsorted(ends, step / self.config.steps, side="right")), len(PHASES) - 1)
        weights = np.asarray(PHASES[phase][1])
        return weights / weights.sum()


def _one_row_each(ids: np.ndarray, mask: np.ndarray) -> MicroBatch:
    """A micro-batch of unpacked rows. Padding has token id 0 and mask 0, and is on the right."""
    zeros = np.zeros(ids.shape, np.float32)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    segments = np.ones_like(ids)
    return MicroBatch(ids, segments, positions, mask.astype(np.float32), zeros, zeros, zeros, zeros, zeros, zeros)


def syllable_ids(tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of HEADS, MIDDLES and TAILS, each in its order."""
    out = []
    first = [syllables[0] for syllables in SYLLABLES]
    for i, group in enumerate(SYLLABLES):
        names = ["".join([*first[:i], syllable, *first[i + 1 :]]) for syllable in group]
        out.append([tokenizer.encode_foreign(f" {name}")[i] for name in names])
    return out


def make_optimizer(steps: int) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay and global-norm clipping.

    Weight decay applies to arrays of more than two dimensions: the layers' kernels, and their biases, whose first two
    dimensions are layer and head. Norms and the embedding do not decay.
    """
    decays = partial(jax.tree.map, lambda x: x.ndim > 2)
    adamw = optax.adamw(_schedule(steps), b2=BETA2, weight_decay=WEIGHT_DECAY, mask=decays)
    return optax.chain(optax.clip_by_global_norm(GRADIENT_CLIP), adamw)


def _schedule(steps: int) -> optax.Schedule:
    warmup = min(WARMUP_STEPS, max(1, steps // 10), steps - 1)
    return optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, warmup, steps, FINAL_RATE_SHARE * PEAK_RATE)


def make_run(config: ToySFTConfig, tokenizer: Tokenizer, rows: Mapping[str, Sequence[Row]]) -> SupervisedRun:
    """A run that trains a policy of `policy_shape`, on one device: batches are small and vary in their rows."""
    shape, optimizer = policy_shape(tokenizer), make_optimizer(config.steps)
    mesh = make_mesh(MeshSection(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    params = starting_params(shape, config.seed)
    if config.dialect == "tool_calls":
        params = with_tags_policy(params, tokenizer)
    trainer_config = Config(
        learning=LearningSection(micro_batch_rows=1, learning_rate=PEAK_RATE),
        rollout=RolloutSection(context_tokens=BUCKETS[-1]),
        model=ModelSection(dtype="float32", remat="none"),
    )
    trainer = SupervisedTrainer(
        trainer_config, shape, optimizer, mesh, schedule=_schedule(config.steps), vocabulary=tokenizer.size
    )
    return SupervisedRun(
        config=config,
        trainer=trainer,
        batches=Batches(config, tokenizer, rows),
        initial_state=partial(init_state, params, optimizer, mesh),
        steps=config.steps,
        steps_per_epoch=config.steps,
        record={"model": model_record(shape), "tokenizer": tokenizer.directory, "settings": asdict(config)},
        checkpoint_every_steps=config.checkpoint_every_steps,
        keep_checkpoints=1,
        log_every_steps=config.log_every_steps,
    )


def policy_shape(tokenizer: Tokenizer) -> DecoderConfig:
    """The preset `toy` with the tokenizer's vocabulary, rounded up to a multiple of 64 rows, and its stop tokens."""
    rows = -(-tokenizer.size // 64) * 64
    return replace(PRESETS["toy"], vocab_rows=rows, eos_ids=tuple(sorted(tokenizer.stop_ids)))


def with_tags_policy(params: nnx.State, tokenizer: Tokenizer) -> nnx.State:
    """The parameters of the policy for tags that ships; `params` for the embeddings of tokens that it lacks."""
    _, known = hf.load_hf(TOYS["toy"])
    vocabularies = [t.hf.get_vocab() for t in (tokenizer, Tokenizer.load(TOYS["toy"]))]
    shared = [(i, vocabularies[1][token]) for token, i in vocabularies[0].items() if token in vocabularies[1]]
    new, old = np.asarray(shared).T
    trained = dict(nnx.to_flat_state(known))
    flat = []
    for path, value in nnx.to_flat_state(params):
        taken = trained[path].get_value()
        if taken.shape != value.get_value().shape:  # the embedding
            taken = value.get_value().at[new].set(taken[old])
        flat.append((path, value.replace(taken)))
    return nnx.from_flat_state(flat)


def starting_params(shape: DecoderConfig, seed: int) -> nnx.State:
    """Random parameters for a narrow model.

    The published std of 0.02 suits widths in the thousands. At a width of 128 it leaves attention nearly uniform, and
    the policy learns to copy much later. The embedding, and kernels whose input is the residual stream, therefore
    start with std 1 / sqrt(width). The output kernels keep 0.02 (times `QUIET`), so that the embedding dominates.

    Copying takes two layers (induction heads, arXiv 2209.11895). The first writes the previous token into every
    position. The second looks for an earlier position whose previous token is the current one, and repeats the token
    there. From random weights this is learned early or, with some seeds, not within the run, so the initialisation
    contains it. The first heads of layer 0 attend a fixed number of tokens back by their biases only: rotary positions
    turn a constant query and key into a score that peaks at that offset. The first head of layer 1 queries, by the
    current token, what head 0 of layer 0 wrote, and adds the value that it attends to.
    """
    readers = {"q_kernel", "k_kernel", "v_kernel", "gate_kernel", "up_kernel", "embedding"}
    factor = shape.width**-0.5 / 0.02
    flat = dict(nnx.to_flat_state(decoder.init_params(shape, seed)))
    values = {path[-1]: v.get_value() * (factor if path[-1] in readers else 1.0) for path, v in flat.items()}
    value, output = values["v_kernel"][0, :, 0], values["o_kernel"][0, 0]  # [D, H], [H, D] of the previous-token head
    for name in ("o_kernel", "down_kernel"):  # so that the previous-token head stands out
        values[name] = QUIET * values[name]
    values["o_kernel"] = values["o_kernel"].at[0, 0].set(output)
    values["k_bias"] = values["k_bias"].at[0].set(_rotation_of(shape, 0))
    for head, back in enumerate(LOOKING_BACK[: shape.heads]):
        values["q_bias"] = values["q_bias"].at[0, head].set(_rotation_of(shape, -back))
    values["q_kernel"] = values["q_kernel"].at[1, :, 0].set(value)
    values["k_kernel"] = values["k_kernel"].at[1, :, 0].set(MATCHING * output.T)
    values["o_kernel"] = values["o_kernel"].at[1, 0].set(COPYING * values["v_kernel"][1, :, 0].T)
    return nnx.from_flat_state([(path, v.replace(values[path[-1]])) for path, v in flat.items()])


def _rotation_of(shape: DecoderConfig, positions: int) -> np.ndarray:
    """[H] a vector of length SHARPNESS in each fast rotary pair, rotated by `positions`."""
    half = shape.head_dim // 2
    angles = positions / shape.rope_theta ** (np.arange(half) / half)
    length = SHARPNESS * (np.arange(half) < _FAST_PAIRS)
    return np.concatenate([length * np.cos(angles), length * np.sin(angles)])
