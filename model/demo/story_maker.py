"""Stories, poems and small texts: a cast is chosen, a plot is expanded, and what was wished for is made sure of."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random

from text_grammar import Context, Grammar, mend_articles, tidy

PRONOUNS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}
PERSONS = {"girl": "girl", "princess": "girl", "queen": "girl", "boy": "boy", "prince": "boy", "king": "boy"}
PLURALS = {"mouse": "mice", "goose": "geese", "wolf": "wolves", "sheep": "sheep", "deer": "deer", "fish": "fish"}
ELDERS = (
    ("old {name}", None),
    ("wise old {name}", None),
    ("the old {kind}", None),
    ("{name} the old {kind}", None),
    ("Grandmother {name}", "she"),
    ("Grandfather {name}", "he"),
    ("Aunt {name}", "she"),
    ("Uncle {name}", "he"),
)
# Answers that hold for one episode only; a second adventure chooses them anew.
EPISODE_NAMES = ("s1", "s2", "s3", "c1", "food", "food2", "food3", "noise", "skill", "place2")
SHARE_OF_MADE_UP_WORDS = 0.15
WANTED_MENTIONS = {"thing": 3, "kind": 2, "place": 2}
MAX_TRIES = 400


@dataclass(frozen=True)
class Wish:
    """What a story must be about. `phrase` says it in the words of a request; empty fields are free."""

    phrase: str
    fixed: dict[str, str] = field(default_factory=dict)
    plots: tuple[str, ...] = ()


@dataclass(frozen=True)
class Story:
    text: str
    context: Context


class StoryMaker:
    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.plots = [name.removeprefix("plot.") for name in grammar.names("plot.")]
        self.fixed_pronouns = dict(grammar.table("pronoun"))

    def made_up_word(self, rng: Random) -> str:
        return self.grammar.expand("made.word", {}, rng)

    def pick(self, section: str, rng: Random) -> str:
        """A word of a section, and now and then one that nobody has heard before."""
        if section in ("kind", "thing") and rng.random() < SHARE_OF_MADE_UP_WORDS:
            return self.made_up_word(rng)
        return self.grammar.expand(section, {}, rng)

    def free_context(self, rng: Random) -> Context:
        """The names that small texts and talk use outside a story."""
        return {
            "user": rng.choice(self.grammar.lines[rng.choice(("girl", "boy"))]),
            "thing": rng.choice(self.grammar.lines["thing"]),
            "place": rng.choice(self.grammar.lines["place"]),
        }

    def name_for(self, kind: str, pronoun: str, rng: Random) -> str:
        if rng.random() < 0.25:
            return self.made_up_word(rng).capitalize()
        section = PERSONS.get(kind) or ("pet" if rng.random() < 0.6 else {"he": "boy", "she": "girl"}[pronoun])
        return rng.choice(self.grammar.lines[section])

    def pronoun_of(self, kind: str, rng: Random) -> str:
        return self.fixed_pronouns.get(kind) or rng.choice(("he", "she"))

    def cast(self, fixed: dict[str, str], rng: Random) -> Context:
        """The context of one story: two friends, an elder, a thing and a place, all different."""
        kinds = [fixed.get("kind"), fixed.get("fkind"), None]
        for index, section in enumerate(("kind", "kind", "elder.kind")):
            while kinds[index] is None:
                kind = self.pick(section, rng)
                kinds[index] = None if kind in kinds else kind
        context: Context = {"kind": kinds[0], "fkind": kinds[1]}
        names: list[str] = []
        for index, prefix in enumerate(("", "f", "e")):
            pronoun = self.pronoun_of(kinds[index], rng)
            pattern, elder_pronoun = rng.choice(ELDERS) if prefix == "e" else ("", None)
            pronoun = elder_pronoun or pronoun
            name = fixed.get("name") if index == 0 else None
            while name is None or name in names:
                name = self.name_for({"she": "girl", "he": "boy", None: kinds[index]}[elder_pronoun], pronoun, rng)
            names.append(name)
            if prefix == "e":
                context["elder"] = pattern.format(name=name, kind=kinds[2])
            for word, form in zip(("he", "him", "his", "himself"), PRONOUNS[pronoun], strict=True):
                context[prefix + word] = form
        context |= {"name": names[0], "fname": names[1]}
        context |= self._referring(context, fixed, rng)
        return context

    def _referring(self, context: Context, fixed: dict[str, str], rng: Random) -> Context:
        """How the story speaks of its people, its thing and its place."""
        adjective, friend_adjective = (self.pick("hero.adj", rng) for _ in range(2))
        adjective = fixed.get("heroadj", adjective)
        hero, friend = (context["name"],), (context["fname"],)
        if context["kind"] != context["fkind"]:
            hero = (context["name"], context["name"], f"the {context['kind']}", f"the {adjective} {context['kind']}")
            friend = (context["fname"], context["fname"], f"the {context['fkind']}")
        thing = fixed.get("thing") or self.pick("thing", rng)
        plain = rng.random() < 0.15
        adjective_thing = thing if plain else f"{self.pick('thing.adj', rng)} {thing}"
        return {
            "hero": hero,
            "friend": friend,
            "heroadj": adjective,
            "fadj": friend_adjective,
            "thing": thing,
            "adjthing": fixed.get("adjthing", adjective_thing),
            "place": fixed.get("place") or self.pick("place", rng),
        }

    def story(self, wish: Wish, rng: Random, num_more_adventures: int = 0) -> Story:
        """A story in which everything that the wish fixes does appear. Raises ValueError if none comes out."""
        for _ in range(MAX_TRIES):
            context = self.cast(wish.fixed, rng)
            plot = "plot." + rng.choice(wish.plots or self.plots)
            gap = rng.choice((" ", " ", "\n\n"))
            text = join(self.grammar.parts(plot, context, rng), gap, rng)
            for _ in range(num_more_adventures):
                text = text.removesuffix(" The end.") + "\n\n" + self._adventure(context, gap, rng)
            if all(
                len(re.findall(rf"\b{re.escape(value)}", text)) >= WANTED_MENTIONS.get(name, 1)
                for name, value in wish.fixed.items()
            ):
                return Story(text, context)
        raise ValueError(f"no story came out for {wish}")

    def _adventure(self, context: Context, gap: str, rng: Random) -> str:
        for name in EPISODE_NAMES:
            context.pop(name, None)
        thing = self.pick("thing", rng)
        context |= {"thing": thing, "adjthing": f"{self.pick('thing.adj', rng)} {thing}"}
        parts = [
            self.grammar.expand("again", context, rng),
            *self.grammar.parts("chain", context, rng),
            self.grammar.expand("happy.end", context, rng),
        ]
        return join(parts, gap, rng)

    def wish(self, rng: Random) -> Wish:
        """A random wish, as somebody would put it into words."""
        kind, thing = self.pick("kind", rng), self.pick("thing", rng)
        return rng.choice(WISHES)(self, kind, thing, rng)

    def poem(self, rng: Random, about: dict[str, str] | None = None) -> str:
        rule = "poem.free" if about is None else "poem" if "thing" in about else "poem.kind"
        return self.grammar.text(rule, self.free_context(rng) | (about or {}), rng)


def join(parts: list[str], gap: str, rng: Random) -> str:
    """Sentences to one text: a paragraph, or several where `gap` is a blank line."""
    out = parts[0]
    for part in parts[1:]:
        out += (gap if rng.random() < 0.5 else " ") + part
    return tidy(out)


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
    return Wish(mend_articles(f"a {kind} {rng.choice(('and', 'near'))} {place}"), {"kind": kind, "place": place})


def _named(maker: StoryMaker, kind: str, thing: str, rng: Random) -> Wish:
    name = maker.name_for(kind, rng.choice(("he", "she")), rng)
    more = rng.choice(("", f" and a {thing}"))
    phrase = f"a {kind} {rng.choice(('named', 'called'))} {name}{more}"
    return Wish(mend_articles(phrase), {"kind": kind, "name": name} | ({"thing": thing} if more else {}))


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
    _theme,
    _theme,
    _place,
)
