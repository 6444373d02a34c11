"""What a closed world is about: its names, relations, questions and style of document. Three themes.

`encyclopedia` is the one that the toy policy knows. `renamed` has other names and is otherwise the same; `register`
has other names, relations and documents. They show how much of a policy is the world that it was trained in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

Asked = Literal["link", "year"]
Pools = tuple[tuple[str, ...], tuple[str, ...]]  # first words and second words of names

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
_PERSONS: Pools = (
    _syllable_words(1, (_CONSONANTS, _VOWELS, "r l n t s v", "a e i o"), 120),
    _syllable_words(2, (_CONSONANTS, _VOWELS, "nd rk lt ss mp rn ck th"), 120),
)
_FILMS: Pools = (tuple(_FILM_FIRST), tuple(_FILM_SECOND))
_CITIES: Pools = (
    _syllable_words(3, (_CONSONANTS, _VOWELS, "r l n d", "e i o", "n m l r x"), 100),
    tuple(_CITY_SECOND),
)

_COMPOSERS: Pools = (
    _syllable_words(4, ("th sh qu w y", _VOWELS, "m b g k", "u y"), 120),
    _syllable_words(5, ("br cr dr fl gl pr tr", _VOWELS, "sk ft mm ll", "er on ic"), 120),
)
_OPERAS: Pools = (
    tuple(
        "Laughing Weeping Faithful Proud Drowned Enchanted Jealous Masked Borrowed Stolen Veiled Wounded Thirsty Idle "
        "Blessed Cunning Humble Stubborn Merry Grave Noble Reluctant Generous Clever Forgotten Patient Bold Timid "
        "Learned Vain Obedient Furious Sober Grateful Curious Wicked Honest Foolish Gallant Solemn".split()
    ),
    tuple(
        "Widow Miller Captain Shepherd Duchess Barber Pilgrim Sailor Merchant Notary Gardener Hunter Innkeeper Tailor "
        "Cobbler Baron Abbess Nephew Guardian Rival Suitor Weaver Physician Astronomer Cousin Prisoner Ambassador "
        "Beggar Orphan Sorcerer Bride Fisherman Monk Poet Scholar Knight Page Steward Courtier Stranger".split()
    ),
)
_ABBEYS: Pools = (
    _syllable_words(6, ("st sk sp sn", _VOWELS, "v w b g", "e o u", "th sh ck"), 100),
    tuple("Abbey Priory Minster Cloister Hermitage Charterhouse Chapel Friary Nunnery Basilica".split()),
)


@dataclass(frozen=True)
class Theme:
    """Places, makers (each linked to a place) and works (each linked to a maker), and all that is said of them.

    The three kinds are named `place`, `maker` and `work`; all tables but `mixed` are keyed by these names or by forms
    of question. Every form has one wording: two never helped a tiny model.
    """

    name: str
    place: str
    maker: str
    work: str
    pools: dict[str, Pools]  # by kind
    first_year: dict[str, int]  # by kind; years are drawn from a hundred on
    sentences: dict[str, str]  # by kind, of {name}, {link} and {year}
    comparisons: dict[str, tuple[str, str, str]]  # form -> kind, predicate, what a search asks for
    bridges: dict[str, tuple[str, str, str, str, Asked]]  # form -> kind, question, what two searches ask for, answer
    singles: dict[str, tuple[str, str, str, Asked]]  # form -> kind, question, what a search asks for, answer
    mixed: tuple[str, str, str, str]  # form, question, what two searches ask for


ENCYCLOPEDIA = Theme(
    name="encyclopedia",
    place="city",
    maker="person",
    work="film",
    # The shapes (Baro, Vond, Koren) keep the pools apart.
    pools={"person": _PERSONS, "film": _FILMS, "city": _CITIES},
    first_year={"person": 1880, "film": 1920, "city": 1500},  # a hundred years share ten leading `194` tokens
    sentences={
        "person": "{name} was born in {link} in {year}.",
        "film": "{name} was directed by {link} in {year}.",
        "city": "{name} was founded in {year}.",
    },
    comparisons={
        "born-first": ("person", "was born first", "born"),
        "released-first": ("film", "came out first", "film"),
        "founded-first": ("city", "was founded first", "founded"),
    },
    bridges={
        "director-birthplace": ("film", "Where was the director of {} born?", "director", "born", "link"),
        "director-birth-year": ("film", "In what year was the director of {} born?", "director", "born", "year"),
        "birthplace-founded": ("person", "In what year was the birthplace of {} founded?", "born", "founded", "year"),
    },
    singles={
        "birthplace": ("person", "Where was {} born?", "born", "link"),
        "birth-year": ("person", "In what year was {} born?", "born", "year"),
        "director": ("film", "By whom was {} directed?", "director", "link"),
        "release-year": ("film", "In what year was {} released?", "film", "year"),
        "founding-year": ("city", "In what year was {} founded?", "founded", "year"),
    },
    mixed=("director-born-first", "Which of {} has the director born first?", "director", "born"),
)

REGISTER = Theme(
    name="register",
    place="abbey",
    maker="composer",
    work="opera",
    pools={"composer": _COMPOSERS, "opera": _OPERAS, "abbey": _ABBEYS},
    first_year={"composer": 1700, "opera": 1650, "abbey": 1100},
    sentences={
        "composer": "{name} (d. {year}): composer; trained at {link}.",
        "opera": "{name}: opera by {link}; first staged {year}.",
        "abbey": "{name}: established {year}.",
    },
    comparisons={
        "died-first": ("composer", "died first", "died"),
        "staged-first": ("opera", "was staged first", "staged"),
        "established-first": ("abbey", "was established first", "established"),
    },
    bridges={
        "composer-school": ("opera", "Where did the composer of {} train?", "composer", "trained", "link"),
        "composer-death-year": ("opera", "In what year did the composer of {} die?", "composer", "died", "year"),
        "school-established": (
            "composer",
            "In what year was the school of {} established?",
            "trained",
            "established",
            "year",
        ),
    },
    singles={
        "school": ("composer", "Where did {} train?", "trained", "link"),
        "death-year": ("composer", "In what year did {} die?", "died", "year"),
        "composer": ("opera", "By whom was {} composed?", "composer", "link"),
        "staging-year": ("opera", "In what year was {} staged?", "staged", "year"),
        "establishing-year": ("abbey", "In what year was {} established?", "established", "year"),
    },
    mixed=("composer-died-first", "Which of {} has the composer who died first?", "composer", "died"),
)

RENAMED = replace(ENCYCLOPEDIA, name="renamed", pools={"person": _COMPOSERS, "film": _OPERAS, "city": _ABBEYS})

THEMES: dict[str, Theme] = {theme.name: theme for theme in (ENCYCLOPEDIA, RENAMED, REGISTER)}
