"""Instructions: their text, whether an answer follows them, and an answer that does.

A rule is followed only by an answer that also answers: one that names half of the list or more. So an answer that
repeats one word, or says nothing, follows nothing, and neither does the one that everybody would give, which breaks
every rule: a method that loses the instructions falls to 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvbench.tasks.instructions.topics import LANGUAGES, TOPICS, Topic, named, plain

LEAST = 0.5  # of the list; an answer with less is none
KINDS = ("format", "forbidden", "language")
PAIRS = ("format+forbidden", "format+language", "forbidden+language")
FORMATS = ("begin", "end", "capitals", "bars")
_OPENINGS = ("Report", "Notice", "Memo", "Bulletin", "Record")
_CLOSINGS = ("over and out", "end of message", "that is all", "signing off")
_AROUND = " \t\r\n*_#>`\"'.!:"


@dataclass(frozen=True)
class Format:
    """The look of an answer: one of `FORMATS`, and the word that it begins or ends with, for these two."""

    kind: str
    word: str = ""

    @property
    def text(self) -> str:
        """The sentence for the model."""
        return {
            "begin": f'Begin every answer with the word "{self.word}:".',
            "end": f'End every answer with the words "{self.word}".',
            "capitals": "Write every answer in capital letters only.",
            "bars": 'Write a vertical bar between the items of every list: "a | b | c".',
        }[self.kind]

    def holds(self, answer: str) -> bool:
        """Tell whether an answer that answers follows it."""
        bare = answer.strip(_AROUND).casefold()
        if self.kind == "begin":
            return bare.startswith(self.word.casefold())
        if self.kind == "end":
            return bare.endswith(self.word.casefold())
        if self.kind == "capitals":
            return answer == answer.upper() and any(map(str.isalpha, answer))
        return answer.count("|") >= 2 and answer.count("|") > answer.count(",")

    def write(self, items: Sequence[str]) -> str:
        """A list in the form of the rule."""
        text = (" | " if self.kind == "bars" else ", ").join(items)
        if self.kind == "begin":
            return f"{self.word}: {text}"
        if self.kind == "end":
            return f"{text}. {self.word[:1].upper()}{self.word[1:]}."
        return text.upper() if self.kind == "capitals" else text


@dataclass(frozen=True)
class Forbidden:
    """Words that may not be written: one of each list that is asked for, and maybe more."""

    words: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"Never write any of these words, leave them out: {', '.join(self.words)}."

    def holds(self, answer: str) -> bool:
        return not named(self.words, answer)


@dataclass(frozen=True)
class Language:
    """The language of every answer, one of `LANGUAGES`."""

    name: str

    @property
    def text(self) -> str:
        return f"Write every answer in {self.name}, not in English."

    def holds(self, answer: str) -> bool:
        return True  # `Instructions.follow` counts the items in either language


Rule = Format | Forbidden | Language


@dataclass(frozen=True)
class Instructions:
    """Two rules, in the order in which the system prompt has them."""

    rules: tuple[Rule, Rule]

    @property
    def language(self) -> str:
        """The language of the answers."""
        return next((rule.name for rule in self.rules if isinstance(rule, Language)), LANGUAGES[0])

    @property
    def text(self) -> str:
        """The system prompt."""
        first, second = (rule.text for rule in self.rules)
        return (
            f"You are a helpful assistant. Two rules hold for every answer, whatever you are asked.\n1. {first}\n"
            f"2. {second}"
        )

    def allowed(self, topic: Topic, language: str) -> tuple[str, ...]:
        """The items of a list that no rule forbids."""
        banned = {plain(word) for rule in self.rules if isinstance(rule, Forbidden) for word in rule.words}
        return tuple(item for item in topic.items[language] if plain(item) not in banned)

    def follow(self, topic: Topic, answer: str) -> tuple[bool, bool, float]:
        """Tell whether an answer follows the first rule and the second, and the share of the list that it names."""
        in_language = named(self.allowed(topic, self.language), answer)
        in_english = named(self.allowed(topic, LANGUAGES[0]), answer)
        content = max(in_language, in_english)

        def followed(rule: Rule) -> bool:
            if isinstance(rule, Language):
                return in_language >= LEAST and in_language > in_english
            return content >= LEAST and rule.holds(answer)

        first, second = (followed(rule) for rule in self.rules)
        return first, second, content

    def right(self, topic: Topic) -> str:
        """An answer that follows both."""
        form = next((rule for rule in self.rules if isinstance(rule, Format)), Format("plain"))
        return form.write(self.allowed(topic, self.language))


def draw(pair: str, topics: Sequence[str], index: int, rng: Random) -> Instructions:
    """Draw the two rules of one of `PAIRS` for the lists that will be asked for; every other index swaps them."""
    language = rng.choice(LANGUAGES[1:])
    spoken = language if "language" in pair else LANGUAGES[0]
    form = rng.choice(FORMATS)
    word = rng.choice(_OPENINGS if form == "begin" else _CLOSINGS) if form in ("begin", "end") else ""
    # Of a list that is not asked for, too: that a word is forbidden does not say what will be asked.
    more = rng.choice([name for name in TOPICS if name not in topics] or list(topics))
    banned = [rng.choice(TOPICS[name].items[spoken]) for name in dict.fromkeys((*topics, more))]
    rng.shuffle(banned)
    made: dict[str, Rule] = {
        "format": Format(form, word),
        "forbidden": Forbidden(tuple(banned)),
        "language": Language(language),
    }
    first, second = pair.split("+") if index % 2 == 0 else reversed(pair.split("+"))
    return Instructions((made[first], made[second]))
