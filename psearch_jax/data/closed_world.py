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
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from psearch_jax.types import KINDS, Kind, Question, UserError
from retrieval.protocol import Passage

SOURCE = "closed_world"
Split = Literal["train", "eval"]
EntityKind = Literal["person", "film", "city"]

HELD_OUT_SHARE = 0.2
# The share of comparisons between two entities; the others compare three.
TWO_ENTITIES_SHARE = 0.7

# First year of each kind of entity; years are drawn from a hundred on, so that they share ten leading `194` tokens.
FIRST_YEAR = {"person": 1880, "film": 1920, "city": 1500}

_FILM_FIRST = (
    "Red Blue Green Golden Silver Crimson Amber Violet Ivory Scarlet Pale Dark Bright Silent Hidden Broken Frozen "
    "Burning Wandering Sleeping Lonely Gentle Savage Hollow Distant Ancient Secret Sacred Wild Quiet Restless Endless "
    "Fallen Rising Shattered Velvet Iron Copper Marble Paper Glass Wooden Stone Crystal Winter Summer Autumn Midnight "
    "Morning Evening Northern Southern Eastern Western Royal Common Final Crooked Narrow Bitter Rusty Tender Tall"
).split()
_FILM_SECOND = (
    "Harbor River Mountain Garden Forest Island Desert Valley Ocean Meadow Bridge Tower Castle Window Mirror Lantern "
    "Candle Shadow Whisper Promise Letter Journey Voyage Return Escape Reunion Dream Memory Song Dance Heart Crown "
    "Sword Arrow Feather Sparrow Raven Falcon Tiger Wolf Horse Serpent Rose Orchard Lily Thorn Storm Thunder Rain "
    "Snow Flame Ember Star Moon Sun Comet Road Train Carriage Market Station Palace Cabin Cathedral"
).split()
_CITY_SECOND = "Bay Falls Ford Hill Cross Gate Haven Mill Point Wells".split()


_RUDE = ("Porn", "Fuck", "Dick", "Suck", "Piss", "Puss", "Lick")


def _syllable_words(stream: int, parts: tuple[str, ...], count: int) -> tuple[str, ...]:
    """`count` different capitalised words, one letter group of each part in turn, in a fixed pseudo-random order."""
    words = ["".join(letters).capitalize() for letters in product(*(part.split() for part in parts))]
    words = [word for word in words if word not in _RUDE]
    order = np.random.default_rng([stream, 0x77]).permutation(len(words))
    return tuple(words[i] for i in order[:count])


_CONSONANTS, _VOWELS = "b d f g h j k l m n p r s t v z", "a e i o u"
# The shapes (Baro, Vond, Koren) keep the pools apart. `_NAME_POOLS[kind]` = first words, second words.
_NAME_POOLS: dict[EntityKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "person": (
        _syllable_words(1, (_CONSONANTS, _VOWELS, "r l n t s v", "a e i o"), 120),
        _syllable_words(2, (_CONSONANTS, _VOWELS, "nd rk lt ss mp rn ck th"), 120),
    ),
    "film": (tuple(_FILM_FIRST), tuple(_FILM_SECOND)),
    "city": (_syllable_words(3, (_CONSONANTS, _VOWELS, "r l n d", "e i o", "n m l r x"), 100), tuple(_CITY_SECOND)),
}


@dataclass(frozen=True)
class Entity:
    """One subject of the encyclopedia. `link` is a person's birthplace or a film's director (an entity's id)."""

    id: str
    kind: EntityKind
    name: str
    year: int
    held_out: bool
    link: str | None = None


# Two wordings never help a tiny model, so each form of question has one.
_COMPARISONS: dict[str, tuple[EntityKind, str, str]] = {  # form -> kind, predicate, what a search asks for
    "born-first": ("person", "was born first", "born"),
    "released-first": ("film", "came out first", "film"),
    "founded-first": ("city", "was founded first", "founded"),
}
_BRIDGES: dict[str, tuple[EntityKind, str]] = {
    "director-birthplace": ("film", "Where was the director of {} born?"),
    "director-birth-year": ("film", "In what year was the director of {} born?"),
    "birthplace-founded": ("person", "In what year was the birthplace of {} founded?"),
}
_SINGLES: dict[str, tuple[EntityKind, str]] = {
    "birthplace": ("person", "Where was {} born?"),
    "birth-year": ("person", "In what year was {} born?"),
    "director": ("film", "By whom was {} directed?"),
    "release-year": ("film", "In what year was {} released?"),
    "founding-year": ("city", "In what year was {} founded?"),
}
ROLES = ("first", "second", "third", "fourth")
# What a scripted teacher writes in its thoughts, beside roles and years.
SCRIPT_WORDS = ("split", "look", "up", "next", "again", "found", "guess", "vs", "so")
_MIXED = "Which of {} has the director born first?"


@dataclass(frozen=True)
class ClosedWorld:
    """All entities of one world, in the order of their passages."""

    seed: int
    entities: tuple[Entity, ...]

    @classmethod
    def make(
        cls,
        seed: int = 0,
        people: int = 1600,
        films: int = 1200,
        cities: int = 500,
        reserved_names: frozenset[str] = frozenset(),
    ) -> ClosedWorld:
        """Draw a world. Equal arguments give an equal world on every machine; `reserved_names` are not used."""
        rng = np.random.default_rng([seed, 0x01])
        counts: dict[EntityKind, int] = {"city": cities, "person": people, "film": films}
        links: dict[EntityKind, EntityKind] = {"person": "city", "film": "person"}
        made: dict[EntityKind, list[Entity]] = {}
        for kind, count in counts.items():
            names = _draw_names(kind, count, reserved_names, rng)
            years = FIRST_YEAR[kind] + rng.integers(0, 100, count)
            held_out = np.arange(count) >= round((1 - HELD_OUT_SHARE) * count)
            # A held-out entity leads to held-out ones only, and the others to the others.
            targets = {side: [e.id for e in made.get(links.get(kind), ()) if e.held_out == side] for side in (0, 1)}
            made[kind] = []
            for i in range(count):
                side = targets[held_out[i]]
                link = side[rng.integers(len(side))] if side else None
                entity = Entity(f"{kind}-{i}", kind, names[i], int(years[i]), bool(held_out[i]), link)
                made[kind].append(entity)
        return cls(seed, tuple(entity for group in made.values() for entity in group))

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
        if entity.kind == "person":
            return f"{entity.name} was born in {self.by_id[entity.link].name} in {entity.year}."
        if entity.kind == "film":
            return f"{entity.name} was directed by {self.by_id[entity.link].name} in {entity.year}."
        return f"{entity.name} was founded in {entity.year}."

    def _members(self, split: Split, kind: EntityKind) -> list[Entity]:
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
        forms = _BRIDGES if kind == "sequential" else _SINGLES
        choices = [(form, e) for form, (subject, _) in forms.items() for e in self._members(split, subject)]
        if count > len(choices):
            raise UserError(f"closed world: {count} {split} questions of kind {kind!r} asked, {len(choices)} exist")
        return [self._chain(split, kind, *choices[i]) for i in rng.permutation(len(choices))[:count]]

    def _chain(self, split: Split, kind: Kind, form: str, subject: Entity) -> Question:
        """A question answered by following links: one hop (single) or two (sequential)."""
        template = (_BRIDGES if kind == "sequential" else _SINGLES)[form][1]
        linked = self.by_id[subject.link] if subject.link else None
        if form.startswith("director-"):
            last = self.by_id[linked.link].name if form.endswith("birthplace") else str(linked.year)
            hops = [[f"{subject.name} director", linked.name], [f"{linked.name} born", last]]
        elif form == "birthplace-founded":
            hops = [[f"{subject.name} born", linked.name], [f"{linked.name} founded", str(linked.year)]]
        else:
            wanted = {"person": "born", "film": "director" if form == "director" else "film", "city": "founded"}
            found = linked.name if form in ("birthplace", "director") else str(subject.year)
            hops = [[f"{subject.name} {wanted[subject.kind]}", found]]
        text = template.format(subject.name)
        identifier = f"{split}-{form}-{subject.id}"
        return Question(SOURCE, identifier, text, (hops[-1][1],), kind, {"form": form, "hops": hops})

    def _compare(
        self, split: Split, kind: Kind, count: int, entities: int | None, rng: np.random.Generator
    ) -> list[Question]:
        """Comparisons of entities, or of the directors of films (mixed), whose years all differ."""
        forms = ["director-born-first"] if kind == "mixed" else list(_COMPARISONS)
        pools = {form: self._members(split, _COMPARISONS.get(form, ("film",))[0]) for form in forms}
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
            text = _MIXED.format(" and ".join(names))
            extra = {"queries": [f"{name} director" for name in names], "links": [f"{e.name} born" for e in judged]}
        else:
            _, predicate, wanted = _COMPARISONS[form]
            text = f"Which of {' and '.join(names)} {predicate}?"
            extra = {"queries": [f"{name} {wanted}" for name in names]}
        answer = names[int(np.argmin(years))]
        return Question(
            SOURCE, identifier, text, (answer,), kind, {"form": form, "names": names, "years": years} | extra
        )


def _draw_names(kind: EntityKind, count: int, reserved: frozenset[str], rng: np.random.Generator) -> list[str]:
    """`count` different two-word names of one kind, none of them reserved."""
    first, second = _NAME_POOLS[kind]
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
    words = [f"{word} " for pools in _NAME_POOLS.values() for pool in pools for word in pool]
    years = [f"{first + year}{end}" for first in FIRST_YEAR.values() for year in range(100) for end in (" ", ".\n")]
    passages = [p.text + "\n" for p in world.passages[:: len(world.passages) // 100]]
    return 200 * (tags + spaced + script) + 20 * (samples + passages) + 40 * words + 4 * years
