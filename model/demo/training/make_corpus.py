"""Writes the demo model's corpus: stories, small texts and conversations, all from the grammar files in `text/`.

    python make_corpus.py --seed 1 --documents 1000 --out corpus.jsonl

Each line is {"text": ...} or {"messages": [...], "tools": [...]?}. The same seed gives the same lines on any machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

from chat_maker import TABLES, Chat, ChatMaker, sentences_of
from story_maker import StoryMaker, Wish
from story_requests import random_wish
from text_grammar import Grammar

TEXT_FOLDER = Path(__file__).parent / "text"
SHARE_OF_CHATS = 0.55
PLAIN_KINDS = ("story", "note", "poem", "facts", "questions", "count")
PLAIN_WEIGHTS = (64, 16, 5, 6, 5, 4)


class Corpus:
    """An endless supply of documents."""

    def __init__(self) -> None:
        self.grammar = Grammar(sorted(TEXT_FOLDER.glob("*.txt")))
        self.maker = StoryMaker(self.grammar)
        self.chats = ChatMaker(self.maker)

    def documents(self, seed: int, num_documents: int) -> Iterator[Chat | dict[str, str]]:
        rng = Random(seed)
        for _ in range(num_documents):
            yield self.chats.chat(rng) if rng.random() < SHARE_OF_CHATS else {"text": self.plain_text(rng)}

    def plain_text(self, rng: Random) -> str:
        kind = rng.choices(PLAIN_KINDS, PLAIN_WEIGHTS)[0]
        return getattr(self, kind)(rng)

    def story(self, rng: Random) -> str:
        """A story; sometimes long, sometimes under a title, sometimes only from its middle on."""
        form = rng.choices(("whole", "long", "titled", "middle"), (70, 12, 8, 10))[0]
        wish = random_wish(self.maker, rng) if form == "titled" else Wish("")
        text = self.maker.story(wish, rng, rng.randint(1, 3) if form == "long" else 0).text
        if form == "titled":
            return f"{title(wish.phrase)}\n\n{text}"
        if form == "middle":
            sentences = sentences_of(text)
            return " ".join(sentences[rng.randint(1, len(sentences) // 2) :])
        return text

    def note(self, rng: Random) -> str:
        return self.grammar.text("note", self.maker.free_context(rng), rng)

    def poem(self, rng: Random) -> str:
        about = rng.choice(({"thing": self.maker.pick("thing", rng)}, {"kind": self.maker.pick("kind", rng)}, None))
        return self.maker.poem(rng, about)

    def facts(self, rng: Random) -> str:
        out = []
        for _ in range(rng.choice((1, 1, 2, 3, 4))):
            name = rng.choice(TABLES)
            key, value = rng.choice(self.grammar.table(f"table.{name}"))[:2]
            first_form = self.grammar.rules[f"say.{name}"][:1]
            out.append(self.grammar.tidied(first_form[0], {"k": key, "v": value}, rng))
        return " ".join(out)

    def questions(self, rng: Random) -> str:
        """Questions and answers as plain text, with or without Q and A before them."""
        labels = rng.choice((("Q: ", "A: "), ("Question: ", "Answer: "), ("User: ", "Assistant: "), ("", "")))
        out = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            skill = rng.choice((self.chats.fact, self.chats.whole_question, self.chats.exact.sum))
            out += [f"{labels[0]}{ask}\n{labels[1]}{say}" for ask, say in skill(rng)]
        return "\n\n".join(out)

    def count(self, rng: Random) -> str:
        if rng.random() < 0.25:
            return ", ".join(self.grammar.lines[rng.choice(("weekday", "season"))]) + "."
        if rng.random() < 0.6:
            sums = [(a, rng.randint(0, 20 - a)) for a in (rng.randint(0, 20) for _ in range(rng.choice((1, 1, 4))))]
            return "\n".join(f"{a} + {b} = {a + b}" for a, b in sums)
        end = rng.choice((10, 10, 12, 20))
        gap = rng.choice((", ", " ", "\n"))
        return gap.join(str(number) for number in range(1, end + 1))


def title(phrase: str) -> str:
    """`a fox and a lantern` becomes `The Fox and the Lantern`."""
    small = {"and", "a", "an", "the", "who", "with", "near", "is", "for", "has", "of", "named", "called"}
    words = re.sub(r"\ban? ", "the ", phrase).split()
    return " ".join(w if w in small and i else w[:1].upper() + w[1:] for i, w in enumerate(words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="file to write; standard output if absent")
    arguments = parser.parse_args()
    lines = (
        json.dumps(document, ensure_ascii=False) for document in Corpus().documents(arguments.seed, arguments.documents)
    )
    if arguments.out is None:
        sys.stdout.writelines(f"{line}\n" for line in lines)
    else:
        arguments.out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
