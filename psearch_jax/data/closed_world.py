"""A seeded fictional encyclopedia: one-sentence passages, and questions whose answers stand only there.

A world holds people, films and cities. Every name is two words drawn from pools that all worlds share, so names of
different entities look alike (retrieval returns real distractors) while no name tells anything about its facts.
One entity in five is held out: training questions never touch it, and evaluation questions touch nothing else. All
passages are in the one corpus. Worlds of other seeds give a cold start names that it can only copy.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from psearch_jax.data.themes import ENCYCLOPEDIA, THEMES, Pools, Theme
from psearch_jax.types import KINDS, Kind, Question, UserError
from retrieval.protocol import Passage

SOURCE = "closed_world"
Split = Literal["train", "eval"]

HELD_OUT_SHARE = 0.2
# The share of comparisons between two entities; the others compare three.
TWO_ENTITIES_SHARE = 0.7


@dataclass(frozen=True)
class Entity:
    """One subject of the world. `link` is a maker's place or a work's maker (an entity's id)."""

    id: str
    kind: str  # one of the theme's three
    name: str
    year: int
    held_out: bool
    link: str | None = None


ROLES = ("first", "second", "third", "fourth")
# What a scripted teacher writes in its thoughts, beside roles and years.
SCRIPT_WORDS = ("split", "look", "up", "next", "again", "found", "guess", "vs", "so")


@dataclass(frozen=True)
class ClosedWorld:
    """All entities of one world, in the order of their passages."""

    seed: int
    entities: tuple[Entity, ...]
    theme: Theme = ENCYCLOPEDIA

    @classmethod
    def make(
        cls,
        seed: int = 0,
        makers: int = 1600,
        works: int = 1200,
        places: int = 500,
        reserved_names: frozenset[str] = frozenset(),
        theme: str = ENCYCLOPEDIA.name,
    ) -> ClosedWorld:
        """Draw a world. Equal arguments give an equal world on every machine; `reserved_names` are not used.

        Raises UserError when there is no such theme, or when its names do not suffice.
        """
        if theme not in THEMES:
            raise UserError(f"closed world: theme {theme!r} found, accepted: {', '.join(THEMES)}")
        t = THEMES[theme]
        rng = np.random.default_rng([seed, 0x01])
        counts = {t.place: places, t.maker: makers, t.work: works}
        links = {t.maker: t.place, t.work: t.maker}
        made: dict[str, list[Entity]] = {}
        for kind, count in counts.items():
            names = _draw_names(t.pools[kind], kind, count, reserved_names, rng)
            years = t.first_year[kind] + rng.integers(0, 100, count)
            held_out = np.arange(count) >= round((1 - HELD_OUT_SHARE) * count)
            # A held-out entity leads to held-out ones only, and the others to the others.
            targets = {side: [e.id for e in made.get(links.get(kind), ()) if e.held_out == side] for side in (0, 1)}
            made[kind] = []
            for i in range(count):
                side = targets[held_out[i]]
                link = side[rng.integers(len(side))] if side else None
                entity = Entity(f"{kind}-{i}", kind, names[i], int(years[i]), bool(held_out[i]), link)
                made[kind].append(entity)
        return cls(seed, tuple(entity for group in made.values() for entity in group), t)

    @cached_property
    def by_id(self) -> dict[str, Entity]:
        """The entities by id."""
        return {entity.id: entity for entity in self.entities}

    @cached_property
    def passages(self) -> list[Passage]:
        """One passage of one sentence (at most 16 words) per entity, held-out ones included."""
        return [Passage(entity.id, entity.name, self._sentence(entity)) for entity in self.entities]

    @property
    def held_out_names(self) -> frozenset[str]:
        """Names of the evaluation entities, for `reserved_names` of worlds to train on."""
        return frozenset(entity.name for entity in self.entities if entity.held_out)

    def _sentence(self, entity: Entity) -> str:
        link = self.by_id[entity.link].name if entity.link else ""
        return self.theme.sentences[entity.kind].format(name=entity.name, link=link, year=entity.year)

    def _members(self, split: Split, kind: str) -> list[Entity]:
        return [e for e in self.entities if e.kind == kind and e.held_out == (split == "eval")]

    def questions(
        self, split: Split, kind: Kind, count: int, seed: int, entities: int | None = None
    ) -> list[Question]:
        """`count` different questions in a seeded order, equal for equal arguments.

        `entities` sets how many a `parallel` question compares; by default 70% compare two and 30% three. `mixed`
        questions and comparisons of four exist for evaluation only.
        `metadata` holds what a scripted teacher needs: `form`; for comparisons `names`, `years` and `queries` in the
        order of the question; for the others `hops`, pairs of a query and the name or year it finds.
        Raises UserError when the arguments are not accepted or the world has fewer such questions.
        """
        if split not in ("train", "eval") or kind not in KINDS:
            raise UserError(f"closed world: no questions of split {split!r}, kind {kind!r} (train|eval; {KINDS})")
        if split == "train" and (kind == "mixed" or entities == 4):
            raise UserError("closed world: mixed questions and comparisons of four are for split 'eval' only")
        if entities is not None and (kind != "parallel" or entities not in (2, 3, 4)):
            raise UserError(
                f"closed world: entities={entities} with kind {kind!r} (accepted: 2, 3, 4 with 'parallel')"
            )
        rng = np.random.default_rng([self.seed, seed, 0x02, KINDS.index(kind), split == "eval"])
        if kind in ("parallel", "mixed"):
            return self._compare(split, kind, count, entities, rng)
        forms = self.theme.bridges if kind == "sequential" else self.theme.singles
        choices = [(form, e) for form, (subject, *_) in forms.items() for e in self._members(split, subject)]
        if count > len(choices):
            raise UserError(f"closed world: {count} {split} questions of kind {kind!r} asked, {len(choices)} exist")
        return [self._chain(split, kind, *choices[i]) for i in rng.permutation(len(choices))[:count]]

    def _chain(self, split: Split, kind: Kind, form: str, subject: Entity) -> Question:
        """A question answered by following links: one hop (single) or two (sequential)."""
        linked = self.by_id[subject.link] if subject.link else None
        if kind == "sequential":
            _, template, first, second, asked = self.theme.bridges[form]
            last = self.by_id[linked.link].name if asked == "link" else str(linked.year)
            hops = [[f"{subject.name} {first}", linked.name], [f"{linked.name} {second}", last]]
        else:
            _, template, wanted, asked = self.theme.singles[form]
            hops = [[f"{subject.name} {wanted}", linked.name if asked == "link" else str(subject.year)]]
        text = template.format(subject.name)
        identifier = f"{split}-{form}-{subject.id}"
        return Question(SOURCE, identifier, text, (hops[-1][1],), kind, {"form": form, "hops": hops})

    def _compare(
        self, split: Split, kind: Kind, count: int, entities: int | None, rng: np.random.Generator
    ) -> list[Question]:
        """Comparisons of entities, or of the makers of works (mixed), whose years all differ."""
        comparisons = {self.theme.mixed[0]: (self.theme.work,)} if kind == "mixed" else self.theme.comparisons
        forms = list(comparisons)
        pools = {form: self._members(split, comparisons[form][0]) for form in forms}
        made: dict[str, Question] = {}
        for _ in range(100 * count + 100):
            if len(made) >= count:
                break
            form = forms[rng.integers(len(forms))]
            size = 2 if kind == "mixed" else entities or (2 if rng.random() < TWO_ENTITIES_SHARE else 3)
            pool = pools[form]
            chosen = [pool[i] for i in rng.choice(len(pool), size, replace=False)]
            judged = [self.by_id[e.link] for e in chosen] if kind == "mixed" else chosen
            years = [e.year for e in judged]
            identifier = f"{split}-{form}-" + "-".join(str(e.id.split("-")[1]) for e in chosen)
            words = {word for e in chosen for word in e.name.split()}  # names that share a word are hard to tell apart
            if len(set(years)) == size and len(words) == 2 * size and identifier not in made:
                made[identifier] = self._comparison(identifier, kind, form, chosen, judged)
        if len(made) < count:
            raise UserError(f"closed world: {count} {split} questions of kind {kind!r} asked, {len(made)} exist")
        return list(made.values())

    def _comparison(
        self, identifier: str, kind: Kind, form: str, chosen: list[Entity], judged: list[Entity]
    ) -> Question:
        names = [e.name for e in chosen]
        years = [e.year for e in judged]
        if kind == "mixed":
            _, template, first, second = self.theme.mixed
            text = template.format(" and ".join(names))
            extra = {"queries": [f"{name} {first}" for name in names], "links": [f"{e.name} {second}" for e in judged]}
        else:
            _, predicate, wanted = self.theme.comparisons[form]
            text = f"Which of {' and '.join(names)} {predicate}?"
            extra = {"queries": [f"{name} {wanted}" for name in names]}
        answer = names[int(np.argmin(years))]
        return Question(
            SOURCE, identifier, text, (answer,), kind, {"form": form, "names": names, "years": years} | extra
        )


def _draw_names(pools: Pools, kind: str, count: int, reserved: frozenset[str], rng: np.random.Generator) -> list[str]:
    """`count` different two-word names of one kind, none of them reserved."""
    first, second = pools
    order = rng.permutation(len(first) * len(second))
    names = (f"{first[i // len(second)]} {second[i % len(second)]}" for i in order.tolist())
    drawn = [name for name in names if name not in reserved][:count]
    if len(drawn) < count:
        raise UserError(f"closed world: {count} names of kind {kind!r} asked, {len(drawn)} exist")
    return drawn


# ---------------------------------------------------------------------------------------------- tokenizer
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A word carries the space after it, not before it: a name is the same tokens at the start of a passage, in a question
# and in an answer, which is what a small model needs to copy it. The year 1943 is `194` `3`.
_PIECES = r"</?[a-z]+>[ \n]?|[A-Za-z]+ ?|\d{3}(?=\d)|\d{1,3} ?|[^\sA-Za-z\d<]+[ \n]?|<|\s+"


def train_tokenizer(world: ClosedWorld, out_dir: str | os.PathLike[str], vocab_size: int = 2048) -> None:
    """Train a byte-level BPE on a world and write it as a directory that AutoTokenizer loads.

    The texts show each word of the pools equally often, so every name costs two tokens; the result depends on the
    pools only. Tags are ordinary text that the merges happen to cover.
    """
    tokenizer = FastTokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_texts(world), trainer)
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
    }
    files = {"tokenizer.json": tokenizer.to_str(pretty=True), "tokenizer_config.json": json.dumps(settings, indent=2)}
    for name, text in files.items():
        part = out / f"{name}.part"
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, out / name)


def _tokenizer_texts(world: ClosedWorld) -> list[str]:
    """Texts whose counts order the merges: words of the language first, then all names alike, then years."""
    tags = [f"<{slash}{tag}>" for tag in ("think", "search", "answer", "information") for slash in ("", "/")]
    spaced = ["<think> ", "</think> ", "<search> ", "<answer> ", "\n<information>\n", "</information>\n"]
    script = [" ".join((*SCRIPT_WORDS, *ROLES, "born director film founded ## user\n assistant\n :\n"))]
    samples = [q.text for kind in KINDS for q in world.questions("eval", kind, 50, seed=0)]
    words = [f"{word} " for pools in world.theme.pools.values() for pool in pools for word in pool]
    years = [
        f"{first + year}{end}"
        for first in world.theme.first_year.values()
        for year in range(100)
        for end in (" ", ".\n")
    ]
    passages = [p.text + "\n" for p in world.passages[:: len(world.passages) // 100]]
    return 200 * (tags + spaced + script) + 20 * (samples + passages) + 40 * words + 4 * years
