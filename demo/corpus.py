"""The corpus of the demo model: an endless, repeatable stream of documents.

Makes documents from the sentences in `writing/`: chooses the kind of document, the paraphrases, the hero of a story.
All text was written for this repository.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import Template
from typing import TypeVar

WRITING = Path(__file__).parent / "writing"

Option = TypeVar("Option")

Conversation = tuple[dict[str, str], ...]  # messages with "role" and "content", as chat templates take them
Document = str | Conversation


@dataclass(frozen=True)
class Topic:
    """Paragraphs of slots; a slot is one sentence and the other ways to say it."""

    title: str
    paragraphs: tuple[tuple[tuple[str, ...], ...], ...]


@dataclass(frozen=True)
class Country:
    name: str
    capital: str
    region: str
    is_often_asked: bool


def documents(seed: int) -> Iterator[Document]:
    """Yield documents endlessly; a seed determines them."""
    random = Random(seed)
    makers, weights = zip(*_MIXTURE, strict=True)
    while True:
        yield random.choices(makers, weights)[0](random)


def read_topics(file_name: str) -> tuple[Topic, ...]:
    """Read `# title` sections: a line is a slot, ` | ` parts its paraphrases, an empty line ends a paragraph."""
    sections = re.split(r"^# ", (WRITING / file_name).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    topics = []
    for section in sections:
        title, body = section.split("\n", 1)
        paragraphs = [tuple(map(_paraphrases, block.split("\n"))) for block in body.strip().split("\n\n")]
        topics.append(Topic(title, tuple(paragraphs)))
    return tuple(topics)


def _paraphrases(line: str) -> tuple[str, ...]:
    """Split at the bars that are outside braces; bars inside braces belong to `_say`."""
    return tuple(part.strip() for part in re.split(r"\|(?![^{}]*\})", line))


_BRACES = re.compile(r"\{([^{}]*)\}")


def _favour_first(random: Random, options: Sequence[Option]) -> Option:
    # The first wording is taken more often than all others together. So greedy decoding has a clear favourite at each
    # fork, and small differences in arithmetic (a batch, another kernel, bfloat16) rarely change the text.
    if len(options) == 1 or random.random() < 0.6:
        return options[0]
    return random.choice(options[1:])


def _say(random: Random, slot: Sequence[str], bindings: dict[str, str] | None = None) -> str:
    text = _favour_first(random, slot)
    text = _BRACES.sub(lambda braces: _favour_first(random, braces[1].split("|")), text)
    return Template(text).substitute(bindings) if bindings else text


def _tell(random: Random, topic: Topic, bindings: dict[str, str] | None = None) -> str:
    told = (" ".join(_say(random, slot, bindings) for slot in paragraph) for paragraph in topic.paragraphs)
    return "\n\n".join(told)


# ---- essays

_TRANSFORMER = read_topics("long_transformer.txt")[0]
_QUANTUM = read_topics("long_quantum.txt")[0]
_ROME = read_topics("rome.txt")[0]
_WEATHER = read_topics("weather.txt")
_OPENINGS = read_topics("openings.txt")
_ESSAYS = tuple(
    topic
    for name in ("science", "technology", "nature", "inventions", "history", "geography", "everyday")
    for topic in read_topics(f"{name}.txt")
)
_EXPLAINABLE = (*_ESSAYS, _TRANSFORMER, _QUANTUM, _ROME)


def _weather(random: Random) -> str:
    return _tell(random, _favour_first(random, _WEATHER))


def _essay(random: Random) -> str:
    return _tell(random, random.choice(_ESSAYS))


def _opening(random: Random) -> str:
    return _tell(random, random.choice(_OPENINGS), _cast(random))


# ---- stories

_STORIES = read_topics("stories.txt")
_STORY_OPENING = read_topics("story_parts.txt")[0].paragraphs[0][0]


def _read_cast() -> dict[str, list[str]]:
    lines = (WRITING / "cast.txt").read_text(encoding="utf-8").splitlines()
    return {role: words.split(", ") for role, words in (line.split(": ") for line in lines)}


_CAST = _read_cast()


def _early(random: Random, options: Sequence[str]) -> str:
    """Choose with weights 1, 1/2, 1/3 ..., for the same reason as `_favour_first`."""
    return random.choices(options, [1 / rank for rank in range(1, len(options) + 1)])[0]


def _cast(random: Random, kind: str | None = None) -> dict[str, str]:
    """Choose the values of the `$words` of a text."""
    kind = kind or random.choice(_CAST["hero"])
    may_be_she = kind not in _CAST["always he"]
    is_she = kind in _CAST["always she"] or (may_be_she and random.random() < 0.4)
    he, him, his = ("she", "her", "her") if is_she else ("he", "him", "his")
    cast = {
        "kind": kind,
        "name": _early(random, _CAST["she" if is_she else "he"]),
        "friend": _early(random, _CAST["he" if is_she else "she"]),
        "other": random.choice([other for other in _CAST["other"] if other != kind]),
        "place": _early(random, _CAST["place"]),
        "adj": _early(random, _CAST["adjective"]),
        "he": he,
        "him": him,
        "his": his,
        "He": he.title(),
        "His": his.title(),
    }
    return {**cast, "opening": _say(random, _STORY_OPENING, cast)}


def _story(random: Random, kind: str | None = None) -> str:
    return _tell(random, random.choice(_STORIES), _cast(random, kind))


# ---- facts


def read_countries() -> tuple[Country, ...]:
    lines = (WRITING / "countries.txt").read_text(encoding="utf-8").splitlines()[1:]
    rows = ((line + "; ").split("; ") for line in lines)
    return tuple(Country(name, capital, region, often == "often") for name, capital, region, often, *_ in rows)


_COUNTRIES = read_countries()
_COUNTRY_WEIGHTS = [4 if country.is_often_asked else 1 for country in _COUNTRIES]

_CAPITAL_SENTENCES = (
    "The capital of {name} is {capital}.",
    "{capital} is the capital of {name}.",
    "{Name} is a country in {region}, and its capital is {capital}.",
    "The capital city of {name} is {capital}.",
    "{capital} is a city in {region} and the capital of {name}.",
)
_CAPITAL_CHATTER = (
    "It is {an important city|one of the best known cities} in {region}, and many people visit it every year.",
    "The city is the home of the government, and many visitors come to see its streets, its museums and its markets.",
    "Many people live and work in {capital}, and visitors enjoy its old streets and its food.",
)


def _country(random: Random) -> Country:
    return random.choices(_COUNTRIES, _COUNTRY_WEIGHTS)[0]


def _about(random: Random, sentence: str, country: Country) -> str:
    names = {
        "{name}": country.name,
        "{Name}": country.name[0].upper() + country.name[1:],
        "{capital}": country.capital,
        "{region}": country.region,
    }
    for key, value in names.items():
        sentence = sentence.replace(key, value)
    # A capital such as Washington, D.C. already brings its full stop.
    return _say(random, [sentence]).replace("D.C..", "D.C.")


def _capitals(random: Random) -> str:
    sentences = []
    for country in dict.fromkeys(_country(random) for _ in range(random.randint(2, 5))):
        sentences.append(_about(random, _favour_first(random, _CAPITAL_SENTENCES), country))
        if random.random() < 0.3:
            sentences.append(_about(random, random.choice(_CAPITAL_CHATTER), country))
    return " ".join(sentences)


_SUMS = (("plus", int.__add__), ("times", int.__mul__))


def _numbers(random: Random) -> str:
    first = random.randint(0, 60)
    return ", ".join(str(number) for number in range(first, first + random.randint(8, 30)))


# ---- conversations


def _turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def _read_dialogues() -> tuple[tuple[tuple[str, ...], ...], ...]:
    blocks = (WRITING / "chat.txt").read_text(encoding="utf-8").strip().split("\n\n")
    return tuple(tuple(_paraphrases(line.split(": ", 1)[1]) for line in block.split("\n")) for block in blocks)


_DIALOGUES = _read_dialogues()
_SYSTEMS = (WRITING / "systems.txt").read_text(encoding="utf-8").splitlines()

_ASK_CAPITAL = (
    "What is the capital of {name}?",
    "What is the capital city of {name}?",
    "Tell me the capital of {name}.",
    "Which city is the capital of {name}?",
    "Do you know the capital of {name}?",
    "What's the capital of {name}?",
)
_ASK_NEXT_CAPITAL = (
    "And the capital of {name}?",
    "And {name}?",
    "What about {name}?",
    "And what is the capital of {name}?",
)
_ASK_ESSAY = (
    "Tell me about {title}.",
    "Explain {title}.",
    "Can you explain {title}?",
    "What can you tell me about {title}?",
    "What do you know about {title}?",
    "Can you tell me something about {title}?",
    "Write a short text about {title}.",
)
_ASK_STORY = (
    "Tell me a story about {hero}.",
    "Tell me a short story about {hero}.",
    "Can you tell me a story about {hero}?",
    "Write a story about {hero}.",
    "I would like to hear a story about {hero}.",
    "Please tell me a story about {hero}.",
)
_ASK_ECHO = ("Repeat after me: {words}", "Please repeat these words: {words}", "Say: {words}", "Repeat: {words}")
_ASK_ANY_STORY = (
    "Tell me a story.",
    "Can you tell me a story?",
    "Write a short story.",
    "Please tell me a fairy tale.",
)


def _small_talk(random: Random) -> list[dict[str, str]]:
    return _turns(*(_say(random, (random.choice(slot),)) for slot in random.choice(_DIALOGUES)))


def _ask_capitals(random: Random) -> list[dict[str, str]]:
    turns = []
    asks: Sequence[str] = _ASK_CAPITAL
    for _ in range(random.choice((1, 1, 2, 3))):
        country = _country(random)
        turns += [_about(random, random.choice(asks), country), _about(random, _CAPITAL_SENTENCES[0], country)]
        asks = (_ASK_CAPITAL[0], *_ASK_NEXT_CAPITAL)
    return _turns(*turns)


def _ask_essay(random: Random) -> list[dict[str, str]]:
    topic = random.choice(_EXPLAINABLE)
    answer = " ".join(_say(random, slot) for slot in topic.paragraphs[0])
    return _turns(random.choice(_ASK_ESSAY).format(title=topic.title), answer)


def _ask_story(random: Random) -> list[dict[str, str]]:
    if random.random() < 0.15:
        return _turns(random.choice(_ASK_ANY_STORY), _story(random))
    kind = random.choice(_CAST["hero"])
    hero = f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
    return _turns(random.choice(_ASK_STORY).format(hero=hero), _story(random, kind))


def _ask_sum(random: Random) -> list[dict[str, str]]:
    word, combine = random.choice(_SUMS)
    left, right = random.randint(0, 10), random.randint(0, 10)
    return _turns(f"What is {left} {word} {right}?", f"{left} {word} {right} is {combine(left, right)}.")


def _ask_echo(random: Random) -> list[dict[str, str]]:
    # Repeating random words needs attention to earlier tokens. It teaches a small model early what every answer
    # needs: to take the country, the hero or the subject from the question.
    known = [*_CAST["hero"], *_CAST["she"], *_CAST["he"], *(country.name for country in _COUNTRIES)]
    words = ", ".join(random.sample(known, random.randint(2, 8)))
    return _turns(random.choice(_ASK_ECHO).format(words=words), words)


_TALKS: tuple[tuple[Callable[[Random], list[dict[str, str]]], float], ...] = (
    (_small_talk, 24),
    (_ask_capitals, 14),
    (_ask_essay, 14),
    (_ask_story, 8),
    (_ask_echo, 8),
    (_ask_sum, 2),
)


def _conversation(random: Random) -> Conversation:
    talks, weights = zip(*_TALKS, strict=True)
    turns = [turn for talk in random.choices(talks, weights, k=random.choice((1, 1, 1, 2, 3))) for turn in talk(random)]
    for turn in turns[::2]:
        turn["content"] = _as_typed(random, turn["content"])
    system = [{"role": "system", "content": _early(random, _SYSTEMS)}] if random.random() < 0.35 else []
    return (*system, *turns)


def _as_typed(random: Random, question: str) -> str:
    """Leave out the last mark or the first capital now and then, as people do."""
    if random.random() < 0.2:
        question = question.rstrip("?.!")
    if random.random() < 0.1:
        question = question.lower()
    return question


# Shares of documents, not of tokens: an essay on transformers is as long as a dozen questions. About half of the tokens
# are conversation, because an answer that follows its question is the hardest thing to learn from few examples.
_MIXTURE: tuple[tuple[Callable[[Random], Document], float], ...] = (
    (lambda random: _tell(random, _TRANSFORMER), 3),
    (lambda random: _tell(random, _QUANTUM), 3),
    (lambda random: _tell(random, _ROME), 3),
    (_weather, 5),
    (_essay, 20),
    (_opening, 3),
    (_story, 9),
    (_capitals, 18),
    (_numbers, 0.5),
    (_conversation, 90),
)


def _print_some(count: int, seed: int) -> None:
    for _, document in zip(range(count), documents(seed), strict=False):
        lines = document if isinstance(document, str) else "\n".join(f"[{m['role']}] {m['content']}" for m in document)
        print(lines, end="\n\n----\n\n")


if __name__ == "__main__":
    _print_some(*map(int, sys.argv[1:3] or ("10", "0")))
