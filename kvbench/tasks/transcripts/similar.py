"""`task=similar`: many requests that are nearly the same, and one of the answers to be repeated.

A transcript has short texts of several kinds about several things, each asked for again and again. The last request
asks for one of them by kind, thing and number ("the third riddle about lamps"), after a code. Finding kind and thing
alone repeats a wrong request: the order of the requests must be kept too.

Source: OpenAI's MRCR and Vodrahalli et al. 2024 (arXiv 2409.12640): which of several like turns is meant; the score is
    the ratio of difflib's SequenceMatcher, 0 where the code does not stand before the text.
Differs: the texts are made here, one line each, and no data set is needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from random import Random
from typing import Annotated, ClassVar

from kvbench.rules import Whole
from kvbench.tasks.ruler.document import Document
from kvbench.tasks.taskset import MetricInfo
from kvbench.tasks.transcripts import Transcript

KINDS = ("riddle", "slogan", "toast", "rumour")
THINGS = ("lamps", "otters", "bridges", "pears", "clocks", "rivers")
NUMBERS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_WHO = "An old sailor,A quiet baker,The youngest judge,A tired nurse,My neighbour,The night guard,A lost tourist".split(
    ","
)
_DID = "sold,painted,counted,hid,borrowed,praised,followed,drew,feared,polished".split(",")
_WHERE = "behind the mill,under a red roof,near the station,at the market,in the attic,beside a well,on the pier".split(
    ","
)
_WHEN = "before dawn,during the storm,on a Monday,after the concert,all winter,at noon,last spring".split(",")
_HEAD = "A writer answers each request with one line of text. Keep all lines in mind: some are asked for again.\n\n"


def _line(thing: str, rng: Random) -> str:
    who, did, where, when = map(rng.choice, (_WHO, _DID, _WHERE, _WHEN))
    return f"{who} {did} {rng.randrange(3, 99)} {thing} {where} {when}."


@dataclass(frozen=True, kw_only=True)
class Similar(Transcript):
    """The task.

    Args:
        copies: Requests of the kind and about the thing that is asked for.
    """

    metrics: ClassVar = {
        "score": MetricInfo(True, "how much of the text that was asked for came back behind its code (MRCR's ratio)"),
        "exact": MetricInfo(True, "code and text are right to the letter"),
    }
    answer_tokens: ClassVar = 48
    least: ClassVar = len(NUMBERS) + 1

    copies: Annotated[int, Whole(2, len(NUMBERS), unit="requests")] = 4

    def write(self, seed: str, depth: float, count: int) -> Document:
        rng = Random(seed)
        kind, thing, code = rng.choice(KINDS), rng.choice(THINGS), f"{rng.randrange(10_000, 100_000)}"
        wanted = rng.randrange(self.copies)
        lines = [_line(thing, rng) for _ in range(self.copies)]
        cases = [(k, t) for k in KINDS for t in THINGS if (k, t) != (kind, thing)]
        steps = [_step(*case, _line(case[1], rng)) for case in (rng.choice(cases) for _ in range(count - self.copies))]
        # The requested one lies at the depth, the others before and after it, as evenly as there is room.
        at = round(depth * len(steps))
        positions = [round(at * (position + 0.5) / max(1, wanted)) for position in range(wanted)] + [at]
        rest = self.copies - wanted - 1
        positions += [at + round((len(steps) - at) * (position + 0.5) / max(1, rest)) for position in range(rest)]
        for position, line in reversed(list(zip(positions, lines, strict=True))):
            steps.insert(position, _step(kind, thing, line))
        question = f"Request: Repeat the {NUMBERS[wanted]} {kind} about {thing}, with {code} before it.\n"
        gold = f" {code} {lines[wanted]}"
        return Document(_HEAD + "".join(steps), question, "Answer:", (gold.strip(),), gold)

    def grade(self, document: Document, answer: str) -> Mapping[str, float]:
        return graded_line(answer, document.answers[0])


def _step(kind: str, thing: str, line: str) -> str:
    return f"Request: Write a {kind} about {thing}.\nAnswer: {line}\n"


def graded_line(answer: str, right: str) -> dict[str, float]:
    """The scores of a text whose first line is compared with the right one."""
    said, code = answer.strip().split("\n")[0].strip(), right.split()[0]
    if not said.startswith(code):
        return {"score": 0.0, "exact": 0.0}
    texts = said.removeprefix(code), right.removeprefix(code)
    return {"score": SequenceMatcher(None, *texts, autojunk=False).ratio(), "exact": float(said == right)}
