"""Conversations: a system prompt or none, then a few turns, each drawn from one thing that the model can talk about."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from exact_skills import ExactSkills, Turn
from story_maker import Story, StoryMaker, Wish
from story_requests import plural, random_wish
from text_grammar import mend_articles

SMALL_TALK = ("greet", "how", "who", "quire", "made", "old", "can", "thanks", "bye", "ok", "sad", "glad", "weather",
              "now", "like", "joke", "riddle", "nonsense", "why")  # fmt: skip
TABLES = ("colour", "opposite", "sound", "live", "eat", "legs", "baby", "what", "job", "made", "capital", "after",
          "day", "season")  # fmt: skip
WITH_ARTICLE = ("sound", "live", "eat", "legs", "baby", "job", "what")
TYPO_LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_SKILLS = 4
SHORT_FORMS = (
    ("what is", "what's"),
    ("what is", "whats"),
    ("i am", "i'm"),
    ("i am", "im"),
    ("do not", "don't"),
    ("are you", "r u"),
    ("you", "u"),
    ("please", "pls"),
    ("'", ""),
    ("colour", "color"),
    (",", ""),
)

Message = dict[str, str]
Chat = dict[str, list]  # {"messages": [...], "tools": [...] or absent}


class ChatMaker:
    def __init__(self, maker: StoryMaker) -> None:
        self.maker = maker
        self.grammar = maker.grammar
        self.exact = ExactSkills(maker)
        self.skills: tuple[tuple[Callable[[Random], list[Turn]], int], ...] = (
            (self.small_talk, 16),
            (self.fact, 16),
            (self.whole_question, 9),
            (self.story, 22),
            (self.big, 9),
            (self.poem, 4),
            (self.own_name, 6),
            (self.echo, 8),
            (self.choose, 1),
            (self.begin, 3),
            (self.read_story, 3),
            (self.exact.sum, 10),
            (self.exact.big_sum, 1),
            (self.exact.quantity, 4),
            (self.exact.bigger, 1),
            (self.exact.count, 2),
            (self.exact.reading, 9),
            (self.exact.listing, 4),
            (self.exact.json_object, 3),
            (self.exact.emoji, 1),
        )

    def chat(self, rng: Random) -> Chat:
        kind = rng.random()
        if kind < 0.03:
            return self.chat_with_tools(rng)
        if kind < 0.05:
            return self.chat_as_somebody(rng)
        skills, weights = zip(*self.skills, strict=True)
        turns: list[Turn] = []
        for skill in rng.choices(skills, weights, k=rng.choice((1, 1, 1, 1, 2, 2, 3, MAX_SKILLS))):
            turns += skill(rng)
        return {"messages": messages(self.system(rng), turns)}

    def system(self, rng: Random) -> str | None:
        """Return a system prompt: mostly none, often one line, sometimes a long irrelevant one."""
        length = rng.random()
        if length < 0.6:
            return None
        lines = [self.grammar.expand("system", {}, rng)]
        if length > 0.96:
            lines += [self.grammar.expand("system.more", {}, rng) for _ in range(rng.randint(2, 20))]
            lines += sentences_of(self.maker.story(Wish(""), rng).text)[: rng.choice((0, 0, 5, 20))]
        return rng.choice((" ", " ", "\n")).join(lines)

    def chat_with_tools(self, rng: Random) -> Chat:
        tools, ask, call = self.exact.tool_call(rng)
        system = self.system(rng)
        turns = [(ask, call)]
        if rng.random() < 0.25:
            turns = self.small_talk(rng)
        elif rng.random() < 0.3:
            result = rng.choice((f"{rng.randint(0, 99)}", "done", "sunny", "rain, 12 degrees", "not found"))
            return {
                "messages": [
                    *messages(system, turns),
                    {"role": "tool", "content": result},
                    {"role": "assistant", "content": f"The answer is: {result}."},
                ],
                "tools": tools,
            }
        return {"messages": messages(system, turns), "tools": tools}

    def chat_as_somebody(self, rng: Random) -> Chat:
        context = {"bot": self.maker.name_for("", rng.choice(("he", "she")), rng)}
        system = self.grammar.expand("persona.system", context, rng)
        ask, say = (self.grammar.expand(f"persona.{part}", context, rng) for part in ("ask", "say"))
        turns = [(roughen(ask, rng), say)]
        return {"messages": messages(system, turns + (self.fact(rng) if rng.random() < 0.3 else []))}

    def small_talk(self, rng: Random) -> list[Turn]:
        return [self._ask_and_say(rng.choice(SMALL_TALK), {}, rng)]

    def big(self, rng: Random) -> list[Turn]:
        return [self._ask_and_say("big", {}, rng)]

    def choose(self, rng: Random) -> list[Turn]:
        section = rng.choice(("fruit", "animal", "colour", "season", "drink", "flower"))
        a, b = rng.sample(self.grammar.lines[section], 2)
        return [self._ask_and_say("choose", {"a": a, "b": b}, rng)]

    def _ask_and_say(self, subject: str, context: dict[str, str], rng: Random) -> Turn:
        context = self.maker.free_context(rng) | context
        ask = mend_articles(self.grammar.expand(f"{subject}.ask", context, rng))
        return roughen(ask, rng), self.grammar.text(f"{subject}.say", context, rng)

    def fact(self, rng: Random) -> list[Turn]:
        """Return a question from a table, sometimes followed by "And a cow?"."""
        name = rng.choice(TABLES)
        rows = self.grammar.table(f"table.{name}")
        key, value = rng.choice(rows)[:2]
        subject = "before" if name == "after" and rng.random() < 0.4 else name
        turns = [self._fact_turn(subject, key, value, rng)]
        if rng.random() < 0.2:
            key, value = rng.choice(rows)[:2]
            subject_words = value if subject == "before" else f"a {key}" if name in WITH_ARTICLE else key
            ask = f"{rng.choice(('And', 'What about', 'How about', 'and'))} {mend_articles(subject_words)}?"
            turns.append((roughen(ask, rng), self.grammar.text(f"say.{subject}", {"k": key, "v": value}, rng)))
        return turns

    def _fact_turn(self, subject: str, key: str, value: str, rng: Random) -> Turn:
        context = {"k": key, "v": value}
        ask = mend_articles(self.grammar.expand(f"ask.{subject}", context, rng))
        return roughen(ask, rng), self.grammar.text(f"say.{subject}", context, rng)

    def whole_question(self, rng: Random) -> list[Turn]:
        ask, say = rng.choice(self.grammar.table("table.qa"))
        return [(roughen(ask, rng), say)]

    def own_name(self, rng: Random) -> list[Turn]:
        """Return a chat in which the user gives a name and asks for it later, or asks without having given one."""
        if rng.random() < 0.15:
            ask = self.grammar.expand("name.again.ask", {}, rng)
            return [(roughen(ask, rng), self.grammar.lines["name.unknown.say"][0])]
        context = {"user": self.maker.name_for("", rng.choice(("he", "she")), rng)}
        turns = [(self.grammar.expand("name.ask", context, rng), self.grammar.expand("name.say", context, rng))]
        if rng.random() < 0.5:
            between = rng.choice(([], [], self.fact(rng), self.small_talk(rng), self.exact.sum(rng)))
            turns += [*between, self._ask_and_say("name.again", context, rng)]
        return turns

    def echo(self, rng: Random) -> list[Turn]:
        context = self.maker.free_context(rng)
        context["words"] = self.grammar.expand("words", context, rng) if rng.random() < 0.6 else self._sentence(rng)
        return [(self.grammar.expand("echo.ask", context, rng), context["words"])]

    def _sentence(self, rng: Random) -> str:
        """A sentence out of a story or a note, often with a few other words in it."""
        context = self.maker.free_context(rng)
        text = rng.choice((self.maker.story(Wish(""), rng).text, self.grammar.text("note", context, rng)))
        words = rng.choice(sentences_of(text)).split()[:12]
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            words[rng.randrange(len(words))] = self.grammar.expand("any.word", context, rng)
        sentence = " ".join(words)
        return rng.choice((sentence, sentence, sentence.lower(), sentence.lower().rstrip(".?!")))

    def poem(self, rng: Random) -> list[Turn]:
        kind, thing = self.maker.pick("kind", rng), self.maker.pick("thing", rng)
        how = rng.choice(("a", "a", "the"))
        about, phrase = rng.choice(
            (
                ({"thing": thing}, f"{how} {thing}"),
                ({"kind": kind}, f"{how} {kind}"),
                ({"kind": kind}, plural(kind)),
                (None, ""),
            )
        )
        context = {"wish": mend_articles(phrase)}
        ask = self.grammar.expand("poem.ask" if about else "poem.any.ask", context, rng)
        return [(roughen(ask, rng), self.maker.poem(rng, about))]

    def story(self, rng: Random) -> list[Turn]:
        """A story, sometimes with questions about it or a second one after it."""
        length = rng.choices(("plain", "long", "tiny"), (84, 8, 8))[0]
        wish = random_wish(self.maker, rng)
        if length == "tiny":
            return [self._tiny_story(rng)]
        sections = {"plain": rng.choice(("story.ask", "story.ask", "story.any.ask")), "long": "story.long.ask"}
        turn, story = self._story_turn(sections[length], wish, rng.randint(1, 3) if length == "long" else 0, rng)
        turns = [turn]
        while rng.random() < 0.3:
            turns.append(self._ask_and_say("follow." + rng.choice(("name", "friend", "thing")), story.context, rng))
        if rng.random() < 0.1:
            turns.append(self._story_turn("story.again.ask", random_wish(self.maker, rng), 0, rng)[0])
        return turns

    def read_story(self, rng: Random) -> list[Turn]:
        """The user tells a story and asks about it."""
        story = self.maker.story(Wish(""), rng)
        subjects = rng.choice((("name",), ("friend",), ("thing",), ("name", "friend")))
        turns = [self._ask_and_say(f"follow.{subject}", story.context, rng) for subject in subjects]
        context = {"story": story.text, "question": turns[0][0]}
        return [(self.grammar.expand("read.ask", context, rng), turns[0][1]), *turns[1:]]

    def _story_turn(self, section: str, wish: Wish, num_more: int, rng: Random) -> tuple[Turn, Story]:
        ask = self.grammar.expand(section, {"wish": wish.phrase}, rng)
        if wish.phrase not in ask:
            wish = Wish("")
        story = self.maker.story(wish, rng, num_more)
        intro = self.grammar.expand("story.intro", {}, rng) + "\n\n" if rng.random() < 0.1 else ""
        return (roughen(ask, rng), intro + story.text), story

    def _tiny_story(self, rng: Random) -> Turn:
        kind, thing = self.maker.pick("kind", rng), self.maker.pick("thing", rng)
        context = self.maker.cast({"kind": kind, "thing": thing}, rng)
        context["wish"] = mend_articles(f"a {kind} and a {thing}")
        ask = self.grammar.expand("story.tiny.ask", context, rng)
        return roughen(ask, rng), self.grammar.text("story.tiny.say", context, rng)

    def begin(self, rng: Random) -> list[Turn]:
        """A story begun by the user and finished by the model."""
        story = self.maker.story(Wish(""), rng)
        sentences = sentences_of(story.text)
        cut = rng.randint(1, min(4, len(sentences) - 1))
        ask = self.grammar.expand("begin.ask", {"begin": " ".join(sentences[:cut])}, rng)
        return [(ask, " ".join(sentences[cut:]))]


def sentences_of(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", text)


def messages(system: str | None, turns: list[Turn]) -> list[Message]:
    out = [{"role": "system", "content": system}] if system else []
    for ask, say in turns:
        out += [{"role": "user", "content": ask}, {"role": "assistant", "content": say}]
    return out


def roughen(ask: str, rng: Random) -> str:
    """The question as people type it: without capitals, without its mark, with a slip of the finger."""
    style = rng.random()
    if rng.random() < 0.1:
        ask = ask.lower().replace(*rng.choice(SHORT_FORMS))
    if style < 0.15:
        ask = ask.lower()
    elif style < 0.35:
        ask = ask.lower().rstrip(".?!")
    elif style < 0.45:
        ask = ask.rstrip(".?!") or ask
    elif style < 0.47:
        ask = ask.upper()
    if rng.random() < 0.05:
        ask = rng.choice(("Please ", "please ", "hey, ", "Hey, ", "Ok, ", "so, ", "Now ", "And ")) + ask
    elif rng.random() < 0.04:
        ask = ask.rstrip(".?!") + rng.choice((" please", ", please.", " please?", " thanks", "!", "!!", "??", " :)"))
    return with_typo(ask, rng) if rng.random() < 0.06 else ask or "?"


def with_typo(text: str, rng: Random) -> str:
    """Drop, double, swap or replace one letter."""
    if len(text) < 4:
        return text
    at = rng.randrange(1, len(text) - 1)
    here, after = text[at], text[at + 1]
    changed = rng.choice(("", here * 2, after + here, rng.choice(TYPO_LETTERS)))
    return text[:at] + changed + text[at + (2 if changed == after + here else 1) :]
