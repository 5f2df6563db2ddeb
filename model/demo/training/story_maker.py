"""Stories, poems and small texts: choose a cast, expand a plot, ensure what was requested."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random

from text_grammar import Context, Grammar, tidy

PRONOUNS = {"he": ("he", "him", "his", "himself"), "she": ("she", "her", "her", "herself")}
PERSONS = {"girl": "girl", "princess": "girl", "queen": "girl", "boy": "boy", "prince": "boy", "king": "boy"}
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
# Answers within one episode; a second adventure chooses new ones.
EPISODE_NAMES = ("s1", "s2", "s3", "c1", "food", "food2", "food3", "noise", "skill", "place2")
# Without a wish some choices are likelier than others, and differ from role to role: so the likeliest story of all, the
# one told at temperature 0, has two friends of different names.
FAVOURITES = {
    "kind": ("fox", "hare", "mouse"),
    "fkind": ("hedgehog", "owl", "badger"),
    "name": ("Pip", "Bramble", "Mina"),
    "fname": ("Nutmeg", "Otto", "Clover"),
    "thing": ("lantern", "kite", "drum"),
    "place": ("the river", "the old mill", "the forest"),
}
SHARE_OF_FAVOURITES = 0.12
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
        """Return a word of a section, sometimes an invented one."""
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
        fixed = self._with_favourites(fixed, rng)
        kinds = [fixed.get("kind"), fixed.get("fkind"), None]
        for index, section in enumerate(("kind", "kind", "elder.kind")):
            while kinds[index] is None:
                kind = self.pick(section, rng)
                kinds[index] = None if kind in kinds else kind
        context: Context = {"kind": kinds[0], "fkind": kinds[1]}
        names: list[str] = []
        for index, prefix in enumerate(("", "f", "e")):
            pronoun = self.pronoun_of(kinds[index], rng)
            if index == 0:
                pronoun = fixed.get("pronoun", pronoun)
            pattern, elder_pronoun = rng.choice(ELDERS) if prefix == "e" else ("", None)
            pronoun = elder_pronoun or pronoun
            name = fixed.get(f"{prefix}name") if index < 2 else None
            while name is None or name in names:
                name = self.name_for({"she": "girl", "he": "boy", None: kinds[index]}[elder_pronoun], pronoun, rng)
            names.append(name)
            if prefix == "e":
                context["elder"] = pattern.format(name=name, kind=kinds[2])
            for word, form in zip(("he", "him", "his", "himself"), PRONOUNS[pronoun], strict=True):
                context[prefix + word] = form
        context |= {"name": names[0], "fname": names[1]}
        context |= self._referring(context, fixed, rng)
        return context | {name: fixed[name] for name in ("skill",) if name in fixed}

    def _with_favourites(self, fixed: dict[str, str], rng: Random) -> dict[str, str]:
        out = dict(fixed)
        for role, favourites in FAVOURITES.items():
            favourite = rng.choice((favourites[0], *favourites))
            if role not in out and favourite not in out.values() and rng.random() < SHARE_OF_FAVOURITES:
                out[role] = favourite
        return out

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
        """Return a story that contains everything requested. Raises ValueError if none comes out."""
        for _ in range(MAX_TRIES):
            context = self.cast(wish.fixed, rng)
            plot = "plot." + rng.choice(wish.plots or self.plots)
            gap = rng.choice((" ", " ", "\n\n"))
            text = join(self.grammar.parts(plot, context, rng), gap, rng)
            for _ in range(num_more_adventures):
                text = text.removesuffix(" The end.") + "\n\n" + self._adventure(context, gap, rng)
            if _grants(wish, text):
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

    def poem(self, rng: Random, about: dict[str, str] | None = None) -> str:
        rule = "poem.free" if about is None else "poem" if "thing" in about else "poem.kind"
        return self.grammar.text(rule, self.free_context(rng) | (about or {}), rng)


def _grants(wish: Wish, text: str) -> bool:
    """Return whether the text mentions everything requested, often enough to be about it."""
    mentions = {name: len(re.findall(rf"\b{re.escape(value)}", text)) for name, value in wish.fixed.items()}
    return all(mentions[name] >= WANTED_MENTIONS.get(name, 1) for name in mentions)


def join(parts: list[str], gap: str, rng: Random) -> str:
    """Sentences to one text: a paragraph, or several where `gap` is a blank line."""
    out = parts[0]
    for part in parts[1:]:
        out += (gap if rng.random() < 0.5 else " ") + part
    return tidy(out)
