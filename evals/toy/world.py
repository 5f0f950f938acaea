"""The invented world: names, pools of values, entities, and the facts that hold, all from one seed."""

from dataclasses import dataclass
from itertools import product
from random import Random

from .subjects import SUBJECTS, WORDS, Relation, Subject

ENTITIES = 200
"""Entities of each subject in the committed exam: with 12 subjects of 6 relations this makes 14,400 facts."""

SEED = 20
"""The seed of the committed world, exam and held-out text."""


def _words(line: str) -> tuple[str, ...]:
    return tuple(line.split())


_ONSETS = _words("b br d dr f g gr h j k kr l m n p pr qu r s sk st t th tr v w y z")
_VOWELS = _words("a e i o u a e i o ai ea ou")
_CODAS = _words("l n r m s k th nd lm rk st x d v")
_ADJECTIVES = _words("Patient Silver Idle Northern Golden Gentle Hollow Crimson Early Distant Broken Merry Silent Winter Narrow")
_ANIMALS = _words("heron otter wolf swan badger falcon hare stag crane lynx raven salmon tortoise boar")
_BEARERS = _words("white black golden two-headed sleeping crowned red winged")
_OBJECTS = _words("Ladder Lantern Garden Compass Orchard Mirror Bridge Candle Harvest Window Anchor Feather Island Letter")
_FORMS = _words("Sonata Requiem March Lullaby Nocturne Overture Psalm Waltz Serenade Fugue")
_ENGINES = _words("engine loom press mill pump crane saw wheel lathe hoist")
_FEASTS = (
    "Lanterns,First Snow,Broken Plates,the Long Night,Seven Wells,New Boats,the Black Goat,Falling Leaves,Open Doors,"
    "the Lost King,Kites,Old Shoes,the Blue Moon,Bread,Silent Bells,Two Brothers,Masks,the Last Sheaf,Candles,the Plough"
)


@dataclass(frozen=True)
class Fact:
    """`entity` (an article and name, as it stands inside a sentence) has `value` for `relation` of `subject`."""

    subject: Subject
    relation: Relation
    entity: str
    value: str


@dataclass(frozen=True)
class World:
    """`facts` lists every fact, entity by entity; `pools` the values that each pool of a relation can take."""

    facts: tuple[Fact, ...]
    pools: dict[str, tuple[str, ...]]


class _Names:
    """Makes invented words, none of them twice and none the beginning of another."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def word(self, endings: tuple[str, ...] = ("",), syllables: int = 2) -> str:
        while True:
            pick = self._rng.choice
            parts = [pick(_ONSETS) + pick(_VOWELS) for _ in range(syllables)]
            ending = pick(endings)
            middle = pick(_CODAS) if not ending or ending[0] in "aeiou" else ""
            word = "".join(parts) + middle + ending
            if 5 <= len(word) <= 11 and word[:5] not in self._used:
                self._used.add(word[:5])
                return word

    def person(self) -> str:
        first = self.word(("a", "en", "is", "o", "el"), 1).capitalize()
        return f"{first} {self.word().capitalize()}"


def _pools(rng: Random, names: _Names) -> dict[str, tuple[str, ...]]:
    def invented(count: int, endings: tuple[str, ...], syllables: int = 2) -> list[str]:
        return [names.word(endings, syllables).capitalize() for _ in range(count)]

    def numbers(low: int, high: int, count: int, form: str) -> list[str]:
        return [form.format(n) for n in sorted(rng.sample(range(low, high), count))]

    pools = {name: [word.strip() for word in words.split(",")] for name, words in WORDS.items()}
    pools |= {
        "cities": invented(64, ("port", "ford", "holm", "burg", "mere")),
        "rivers": invented(48, ("a", "en", "ur"), 1),
        "coins": [name.lower() for name in invented(40, ("in", "ar", "et", "ol"), 1)],
        "planets": invented(24, ("us", "or", "is"), 2),
        "modes": invented(24, ("ian",), 1),
        "months": invented(24, ("ember", "uary", "il"), 1),
        "words": [name.lower() for name in invented(48, ("a", "u", "i"), 1)],
        "colleges": [f"{name} College" for name in invented(32, ("ton", "well", "by"))],
        "captains": invented(48, ("sen", "mann", "ovic", "ez")),
        "feasts": _FEASTS.split(","),
        "emblems": [f"a {a} {b}" for a, b in rng.sample(list(product(_BEARERS, _ANIMALS)), 60)],
        "books": [f"The {a} {b}" for a, b in rng.sample(list(product(_ADJECTIVES, _OBJECTS)), 80)],
        "pieces": [f"the {a} {b}" for a, b in rng.sample(list(product(_ADJECTIVES, _FORMS)), 60)],
        "years": numbers(301, 999, 80, "{}"),
        "decimals": [f"{n / 10}" for n in sorted(rng.sample(range(11, 99), 40))],
        "spans": numbers(3, 90, 30, "{} years"),
        "heights": numbers(2, 70, 30, "{} feet"),
        "weights": numbers(2, 90, 30, "{} tons"),
        "days": numbers(3, 99, 40, "{} days"),
        "letters": numbers(14, 68, 30, "{} letters"),
    }
    return {name: tuple(values) for name, values in pools.items()}


def _entities(subject: Subject, count: int, rng: Random, names: _Names) -> tuple[str, ...]:
    style = subject.style
    if style == "person":
        return tuple(names.person() for _ in range(count))
    if style == "the":
        return tuple(f"the {names.word(syllables=1 + index % 2)}" for index in range(count))
    if style == "battle":
        return tuple(f"the battle of {names.word(('feld', 'moor', 'gate', 'ness'), 1).capitalize()}" for _ in range(count))
    if style == "machine":
        return tuple(f"the {names.word().capitalize()} {rng.choice(_ENGINES)}" for _ in range(count))
    if style == "ship":
        return tuple(f"the {rng.choice(_ADJECTIVES)} {names.word().capitalize()}" for _ in range(count))
    if isinstance(style, str):
        raise ValueError(f"style must be endings or one of person, the, battle, machine, ship, got {style!r}")
    words = tuple(names.word(style, 2 if len(style[0]) < 4 else 1) for _ in range(count))
    proper = subject.name in ("geography", "astronomy", "linguistics")
    return tuple(word.capitalize() if proper else word for word in words)


def build(seed: int = SEED, entities: int = ENTITIES) -> World:
    """Return the world of `seed` with `entities` entities a subject; the same arguments give the same world."""
    rng = Random(f"world {seed}")
    names = _Names(rng)
    pools = _pools(rng, names)
    for subject in SUBJECTS:
        pools[subject.name] = _entities(subject, entities, rng, names)
    facts = [
        Fact(subject, relation, entity, rng.choice([v for v in pools[relation.pool][:80] if v != entity]))
        for subject in SUBJECTS
        for entity in pools[subject.name]
        for relation in subject.relations
    ]
    return World(tuple(facts), {name: values[:80] for name, values in pools.items()})
