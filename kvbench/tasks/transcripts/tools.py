"""`task=tools`: an agent's long trace of tool calls, and one more call that takes its arguments from an early result.

The prompt has the tools as JSON schemas, then requests, each with the call that answered it and its result. The last
request is about somebody whose record was looked up long before: the right call names the right tool, takes two values
from that result and one from the request. It is graded by comparing JSON, without a judge.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from kvbench.tasks.ruler.document import Document
from kvbench.tasks.taskset import MetricInfo
from kvbench.tasks.transcripts import NAMES, Transcript

_HEAD = (
    "You are the agent of a help desk. Answer each request with one call of a tool, as a JSON object in one line. "
    "The tools, as JSON schemas:\n"
)


@dataclass(frozen=True)
class Service:
    """A tool pair of the transcripts: one looks up a thing of a person, the other acts on it."""

    thing: str
    find: str  # the tool that looks it up
    act: str  # the tool that does something with it
    request: str  # person and channel
    ways: tuple[str, ...]
    way: str  # name of the argument that says how
    taken: tuple[tuple[str, str], ...]  # field of the result -> argument, with the types of `draw`

    def schemas(self) -> list[dict[str, Any]]:
        """Both tools."""
        kinds = {argument: _TYPES[field] for field, argument in self.taken}
        properties: dict[str, Any] = {name: {"type": kind} for name, kind in kinds.items()}
        properties[self.way] = {"type": "string", "enum": list(self.ways)}
        return [
            {"name": self.find, "parameters": {"person": {"type": "string"}}, "required": ["person"]},
            {"name": self.act, "parameters": properties, "required": list(properties)},
        ]


_TYPES = {"code": "string", "total": "number", "room": "integer", "nights": "integer", "serial": "string"}
_TYPES |= {"port": "integer", "grams": "integer"}
SERVICES = (
    Service(
        *("order", "find_order", "refund_order", "Refund the order of {}: it was {}."),
        *(("late", "broken", "wrong"), "reason", (("code", "code"), ("total", "amount"))),
    ),
    Service(
        *("booking", "find_booking", "extend_booking", "Extend the booking of {} at the {} rate."),
        *(("flexible", "member", "saver"), "rate", (("room", "room"), ("nights", "nights"))),
    ),
    Service(
        *("device", "find_device", "restart_device", "Restart the device of {} in {} mode."),
        *(("hard", "safe", "soft"), "mode", (("serial", "serial"), ("port", "port"))),
    ),
    Service(
        *("parcel", "find_parcel", "send_parcel", "Send the parcel of {} to the {} depot."),
        *(("harbour", "north", "south"), "depot", (("code", "code"), ("grams", "grams"))),
    ),
)


def _draw(field: str, rng: Random) -> str | int | float:
    if field == "code":
        return f"{rng.choice('KLMP')}-{rng.randrange(10_000, 100_000)}"
    if field == "serial":
        return f"{rng.randrange(100, 1000)}-{rng.choice('ABCDEF')}{rng.randrange(10, 100)}"
    if field == "total":
        return rng.randrange(1_000, 30_000) / 100
    low, high = {"room": (101, 960), "nights": (2, 30), "port": (2000, 9000), "grams": (200, 9000)}[field]
    return rng.randrange(low, high)


@dataclass(frozen=True)
class Case:
    """One person with a record."""

    service: Service
    person: str
    result: Mapping[str, str | int | float]
    way: str

    @classmethod
    def draw(cls, service: Service, person: str, rng: Random) -> "Case":
        """A case with values of its own."""
        return cls(service, person, {field: _draw(field, rng) for field, _ in service.taken}, rng.choice(service.ways))

    @property
    def looked_up(self) -> str:
        """The steps that looked it up."""
        call = {"name": self.service.find, "arguments": {"person": self.person}}
        request = f"Look up the {self.service.thing} of {self.person}."
        return f"Request: {request}\nCall: {json.dumps(call)}\nResult: {json.dumps(self.result)}\n"

    @property
    def request(self) -> str:
        """The request to act on it."""
        return f"Request: {self.service.request.format(self.person, self.way)}\n"

    @property
    def call(self) -> dict[str, Any]:
        """The call that does it."""
        arguments = {argument: self.result[field] for field, argument in self.service.taken}
        return {"name": self.service.act, "arguments": arguments | {self.service.way: self.way}}

    @property
    def done(self) -> str:
        """The steps that did it."""
        return f'{self.request}Call: {json.dumps(self.call)}\nResult: {{"ok": true}}\n'


@dataclass(frozen=True, kw_only=True)
class Tools(Transcript):
    """The task."""

    metrics: ClassVar = {
        "score": MetricInfo(True, "the call is right: the tool, and every argument"),
        "tool": MetricInfo(True, "the right tool was called"),
        "arguments": MetricInfo(True, "share of the arguments that are right, of a call of the right tool"),
        "valid": MetricInfo(True, "the answer is a call that a schema allows"),
    }
    answer_tokens: ClassVar = 80
    least: ClassVar = len(SERVICES) + 1  # one of each before the one that is asked for
    most: ClassVar = len(NAMES)

    def write(self, seed: str, depth: float, count: int) -> Document:
        rng = Random(seed)
        persons = rng.sample(NAMES, len(NAMES))
        wanted = Case.draw(rng.choice(SERVICES), persons[0], rng)
        others = [
            Case.draw(SERVICES[number] if number < len(SERVICES) else rng.choice(SERVICES), person, rng)
            for number, person in enumerate(persons[1:count])
        ]
        steps = [case.looked_up + case.done for case in others]
        steps.insert(len(SERVICES) + round(depth * (len(others) - len(SERVICES))), wanted.looked_up)
        schemas = [json.dumps(schema) for service in SERVICES for schema in service.schemas()]
        right = json.dumps(wanted.call)
        return Document(
            _HEAD + "\n".join(schemas) + "\n\n" + "".join(steps), wanted.request, "Call:", (right,), f" {right}"
        )

    def grade(self, document: Document, answer: str) -> Mapping[str, float]:
        return graded_call(answer, json.loads(document.answers[0]))


def graded_call(answer: str, right: Mapping[str, Any]) -> dict[str, float]:
    """The scores of a text that calls a tool: its first JSON object counts, whatever follows."""
    call = _first_object(answer)
    stated = call.get("arguments")
    arguments: dict[str, Any] = stated if isinstance(stated, dict) else {}
    tool = call.get("name") == right["name"]
    same = sum(_same(arguments.get(name), value) for name, value in right["arguments"].items())
    share = same / len(right["arguments"]) if tool else 0.0
    whole = share == 1.0 and set(arguments) == set(right["arguments"])
    return {
        "score": float(whole),
        "tool": float(tool),
        "arguments": share,
        "valid": float(any(_allows(schema, call) for service in SERVICES for schema in service.schemas())),
    }


def _first_object(text: str) -> dict[str, Any]:
    start = text.find("{")
    try:
        parsed, _ = json.JSONDecoder().raw_decode(text, start) if start >= 0 else ({}, 0)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _same(mine: object, right: object) -> bool:
    """Equal, and of the same kind: text is no number, and neither is true; 3.0 is 3."""
    kinds = [bool(isinstance(value, int | float) and not isinstance(value, bool)) for value in (mine, right)]
    return mine == right and kinds[0] == kinds[1]


def _allows(schema: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """True if a call is one of a tool: its name, all that it requires, nothing else, each of its type."""
    arguments = call.get("arguments")
    if call.get("name") != schema["name"] or not isinstance(arguments, dict):
        return False
    kinds: dict[str, type | tuple[type, ...]] = {"string": str, "integer": int, "number": (int, float)}
    return set(arguments) == set(schema["required"]) and all(
        isinstance(value, kinds[schema["parameters"][name]["type"]])
        and not isinstance(value, bool)
        and value in schema["parameters"][name].get("enum", [value])
        for name, value in arguments.items()
    )
