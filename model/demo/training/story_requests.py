"""Requests for stories: a random one, in a user's words."""

from __future__ import annotations

from random import Random

from story_maker import PRONOUNS, StoryMaker, Wish
from text_grammar import mend_articles

PLURALS = {"mouse": "mice", "goose": "geese", "wolf": "wolves", "sheep": "sheep", "deer": "deer", "fish": "fish"}


def random_wish(maker: StoryMaker, rng: Random) -> Wish:
    kind, thing = maker.pick("kind", rng), maker.pick("thing", rng)
    return rng.choice(WISHES)(maker, kind, thing, rng)


def plural(word: str) -> str:
    if word in PLURALS:
        return PLURALS[word]
    if word.endswith(("s", "x", "ch", "sh")):
        return word + "es"
    return word[:-1] + "ies" if word.endswith("y") and word[-2:-1] not in "aeiou" else word + "s"


def _kind_and_thing(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    link = rng.choice(("and", "and", "and", "with", "who has"))
    return Wish(mend_articles(f"a {kind} {link} a {thing}"), {"kind": kind, "thing": thing})


def _kind_and_thing_described(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    adjective, look = maker.pick("hero.adj", rng), maker.pick("thing.adj", rng)
    phrase = f"a {adjective} {kind} and a {look} {thing}"
    fixed = {"kind": kind, "heroadj": adjective, "thing": thing, "adjthing": f"{look} {thing}"}
    return Wish(mend_articles(phrase), fixed)


def _kind(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    phrase = rng.choice((f"a {kind}", f"a {kind}", plural(kind), f"the {kind}", kind))
    return Wish(mend_articles(phrase), {"kind": kind})


def _kind_described(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    adjective = maker.pick("hero.adj", rng)
    return Wish(mend_articles(f"a {adjective} {kind}"), {"kind": kind, "heroadj": adjective})


def _thing(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    phrase = rng.choice((f"a {thing}", f"a {thing}", f"the {thing}", thing))
    return Wish(mend_articles(phrase), {"thing": thing})


def _lost_or_found(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    lost = rng.random() < 0.5
    verbs = ("loses", "lost", "is looking for", "cannot find") if lost else ("finds", "found")
    phrase = f"a {kind} who {rng.choice(verbs)} a {thing}"
    return Wish(mend_articles(phrase), {"kind": kind, "thing": thing}, ("lost",) if lost else ("found", "treasure"))


def _two_kinds(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    friend = maker.pick("kind", rng)
    return Wish(mend_articles(f"a {kind} and a {friend}"), {"kind": kind, "fkind": friend})


def _kind_and_place(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    place = maker.pick("place", rng)
    return Wish(
        mend_articles(f"a {kind} {rng.choice(('and', 'near', 'at', 'in'))} {place}"), {"kind": kind, "place": place}
    )


def _named(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    name = maker.name_for(kind, rng.choice(("he", "she")), rng)
    more = rng.choice(("", f" and a {thing}"))
    phrase = f"a {kind} {rng.choice(('named', 'called'))} {name}{more}"
    return Wish(mend_articles(phrase), {"kind": kind, "name": name} | ({"thing": thing} if more else {}))


def _owner(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    pronoun = rng.choice(("he", "she"))
    name = maker.name_for("", pronoun, rng)
    kind = rng.choice((kind, {"he": "boy", "she": "girl"}[pronoun]))
    fixed = {"name": name, "kind": kind, "thing": thing}
    if rng.random() < 0.5:
        return Wish(f"{name} and {PRONOUNS[pronoun][2]} {thing}", {"name": name, "thing": thing, "pronoun": pronoun})
    return Wish(
        mend_articles(rng.choice((f"{name} the {kind} and a {thing}", f"a {kind}, {name}, and a {thing}"))), fixed
    )


def _two_names(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    name, friend = (maker.name_for("", rng.choice(("he", "she")), rng) for _ in range(2))
    if name == friend:
        return _name(maker, kind, thing, rng)
    return Wish(f"{name} and {friend}", {"name": name, "fname": friend})


def _three(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    friend = maker.pick("kind", rng)
    return Wish(mend_articles(f"a {kind}, a {friend} and a {thing}"), {"kind": kind, "fkind": friend, "thing": thing})


def _learner(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    skill = maker.grammar.expand("skill2", {}, rng)
    phrase = f"a {kind} who {rng.choice(('learns to', 'wants to', 'cannot', 'could not'))} {skill}"
    return Wish(mend_articles(phrase), {"kind": kind, "skill": skill}, ("learn",))


def _name(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    name = maker.name_for(kind, "he", rng)
    return Wish(rng.choice((name, f"somebody named {name}")), {"name": name})


def _theme(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    theme = rng.choice(maker.grammar.names("theme."))
    phrase = rng.choice(maker.grammar.lines[theme])
    plots = tuple(
        name.removeprefix("theme.") for name in maker.grammar.names("theme.") if phrase in maker.grammar.lines[name]
    )
    return Wish(phrase, {}, plots)


def _place(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    place = maker.pick("place", rng)
    return Wish(place, {"place": place})


WISHES = (
    *[_kind_and_thing] * 6,
    *[_kind] * 3,
    *[_thing] * 2,
    *[_two_kinds] * 2,
    _kind_and_thing_described,
    _kind_described,
    _lost_or_found,
    _kind_and_place,
    _named,
    _named,
    _name,
    _owner,
    _two_names,
    _three,
    _learner,
    _theme,
    _theme,
    _place,
)
