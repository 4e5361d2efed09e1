"""Ways in which models write an answer that is right: for each style a function from a problem to the text.

It needs the standard library only, so that EvalPlus' own sanitiser can be asked about the same answers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import dedent, indent


@dataclass(frozen=True)
class Problem:
    """A problem with what its answers are made of."""

    prompt: str  # what is continued
    name: str
    header: str  # its line with `def`
    body: str  # its lines, indented; they call nothing but builtins, `math` is not imported
    helped: str  # the same with a call of `helper`
    helper: str
    wrong: str  # a body with another result
    imported: str  # the same as `body`, with `math`, which the answer imports itself
    calls: tuple[tuple[tuple, object], ...]  # arguments and results

    @property
    def function(self) -> str:
        """The whole function."""
        return self.header + self.body


def _body(text: str) -> str:
    return indent(dedent(text).strip("\n"), "    ") + "\n"


PROBLEMS = (
    Problem(
        prompt="from typing import List\n\n\ndef scaled(numbers: List[int]) -> List[int]:\n"
        '    """Doubled.\n    >>> scaled([1])\n    [2]\n    """\n',
        name="scaled",
        header="def scaled(numbers: List[int]) -> List[int]:\n",
        body=_body("result = []\nfor number in numbers:\n    result.append(number * 2)\nreturn result"),
        helped=_body("return [helper(number) for number in numbers]"),
        helper="def helper(number):\n    return number * 2\n",
        wrong=_body("return numbers"),
        imported=_body("return [math.prod((number, 2)) for number in numbers]"),
        calls=((([1, 2],), [2, 4]), (([],), [])),
    ),
    Problem(
        prompt='"""\nWrite a function to count the positive numbers of a list.\nassert count_pos([1, -1]) == 1\n"""\n',
        name="count_pos",
        header="def count_pos(values):\n",
        body=_body("if not values:\n    return 0\nreturn (values[0] > 0) + count_pos(values[1:])"),
        helped=_body("total = sum(helper(value) for value in values)\nreturn total"),
        helper="def helper(value):\n    return 1 if value > 0 else 0\n",
        wrong=_body("return len(values) + 1"),
        imported=_body("return sum(math.copysign(1, value) > 0 for value in values if value)"),
        calls=((([1, -1, 3],), 2), (([],), 0)),
    ),
    Problem(
        prompt="\n\ndef joined(first: str, second: str) -> str:\n"
        '    """ Put two texts\n    together with a dash.\n    """\n',
        name="joined",
        header="def joined(first: str, second: str) -> str:\n",
        body=_body('parts = [first, second]\n\nreturn "-".join(parts)'),
        helped=_body("return helper(first, second)"),
        helper='def helper(one, other):\n    return f"{one}-{other}"\n',
        wrong=_body("return first + second"),
        imported=_body('return "-".join([first, second][: math.floor(2.5)])'),
        calls=((("a", "b"), "a-b"), (("", ""), "-")),
    ),
    Problem(
        prompt='def depth(text: str) -> int:\n    """How deep the brackets go."""\n',
        name="depth",
        header="def depth(text: str) -> int:\n",
        body=_body(
            "now = best = 0\nfor sign in text:\n    if sign == '(':\n        now += 1\n        best = max(best, now)\n"
            "    elif sign == ')':\n        now -= 1\nreturn best"
        ),
        helped=_body(
            "best = 0\nfor end in range(len(text) + 1):\n    best = max(best, helper(text[:end]))\nreturn best"
        ),
        helper="def helper(part):\n    return part.count('(') - part.count(')')\n",
        wrong=_body("return text.count('(')"),
        imported=_body(
            "return max([0] + [math.ceil(text[:e].count('(') - text[:e].count(')')) for e in range(len(text) + 1)])"
        ),
        calls=((("(()())",), 2), (("",), 0)),
    ),
)

_WHERE = "Here is the function. It's simple (see below):\n\n"
_AFTER = "\nThis works because each element is looked at once; it's O(n).\n"


def _typed(text: str) -> str:
    """With the import that the annotations need."""
    return f"from typing import List\n\n{text}" if "List[" in text else text


def _fenced(text: str, label: str = "python", fence: str = "```") -> str:
    return f"{fence}{label}\n{text.rstrip()}\n{fence}\n"


def _block(text: str) -> str:
    return _fenced(_typed(text))


def _documented(p: Problem, doc: str) -> str:
    return p.header + indent(f'"""{doc}"""\n', "    ") + p.body


def _demo(p: Problem) -> str:
    return "".join(f"print({p.name}(*{arguments!r}))\n" for arguments, _ in p.calls)


def _tests(p: Problem) -> str:
    return "".join(f"assert {p.name}(*{arguments!r}) == {result!r}\n" for arguments, result in p.calls)


def _name_bound(p: Problem, end: str) -> str:
    return _typed(p.function.replace(p.name, "_solve")) + f"\n\n{end}\n"


WHOLE: dict[str, Callable[[Problem], str]] = {
    "bare": lambda p: _typed(p.function),
    "fence": lambda p: _block(p.function),
    "fence, no language": lambda p: _fenced(_typed(p.function), ""),
    "fence, Python3": lambda p: _fenced(_typed(p.function), "python3"),
    "fence, PY": lambda p: _fenced(_typed(p.function), "PY"),
    "fence of tildes": lambda p: _fenced(_typed(p.function), "python", "~~~"),
    "fence of four": lambda p: _fenced(_typed(p.function), "python", "````"),
    "fence without end": lambda p: "```python\n" + _typed(p.function),
    "prose around a fence": lambda p: _WHERE + _block(p.function) + _AFTER,
    "prose before code": lambda p: _WHERE + _typed(p.function),
    "prose after code": lambda p: _typed(p.function) + _AFTER,
    "prose around code": lambda p: _WHERE + _typed(p.function) + _AFTER,
    "a word before code": lambda p: "Solution\n\n" + _typed(p.function),
    "wrong block, right block": lambda p: _block(p.header + p.wrong) + "Wait, that is wrong:\n" + _block(p.function),
    "usage block, then definition": lambda p: "Usage:\n" + _fenced(_demo(p)) + "Code:\n" + _block(p.function),
    "definition, then usage block": lambda p: _block(p.function) + "Usage:\n" + _fenced(_demo(p)),
    "shell block first": lambda p: _fenced("pip install nothing", "bash") + _block(p.function),
    "output block after": lambda p: _block(p.function) + "Output:\n" + _fenced("1\n2", "text"),
    "fence in the docstring": lambda p: _block(_documented(p, f"Do it.\n\n```\n{p.name}()\n```\nand so on\n")),
    "labelled fence in the docstring": lambda p: (
        _WHERE + _block(_documented(p, f"Do it.\n\n```python\n{p.name}()\n```\n")) + _AFTER
    ),
    "docstring at the margin": lambda p: _fenced(
        _typed(p.header + '    """Do it.\n\nAt the margin:\ndef no():\n"""\n' + p.body)
    ),
    "helper above": lambda p: _block(p.helper + "\n\n" + p.header + p.helped),
    "helper below, in a fence": lambda p: _block(p.header + p.helped + "\n\n" + p.helper),
    "helper below, bare": lambda p: _typed(p.header + p.helped + "\n\n" + p.helper),
    "helper below, after prose": lambda p: _WHERE + _typed(p.header + p.helped + "\n\n" + p.helper) + _AFTER,
    "helper in a block of its own": lambda p: "First:\n" + _fenced(p.helper) + "Then:\n" + _block(p.header + p.helped),
    "helper in a block below": lambda p: _block(p.header + p.helped) + "with\n" + _fenced(p.helper),
    "name = lambda": lambda p: _fenced(
        p.helper + f"\n{p.name} = lambda *given: _solve(*given)\n\n" + _typed(p.function).replace(p.name, "_solve")
    ),
    "name = _impl": lambda p: _fenced(_name_bound(p, f"{p.name} = _solve")),
    "name = _impl, bare": lambda p: _name_bound(p, f"{p.name} = _solve"),
    "name: type = _impl": lambda p: _fenced(
        "from typing import Callable\n" + _name_bound(p, f"{p.name}: Callable = _solve")
    ),
    "decorated": lambda p: _fenced(
        "import functools\n\n\ndef same(given):\n    @functools.wraps(given)\n    def call(*arguments):\n"
        "        return given(*arguments)\n    return call\n\n\n@same\n" + p.function.replace("List[int]", "list")
    ),
    "defined twice": lambda p: _block(p.header + p.wrong + "\n\n" + p.function),
    "defined twice, bare": lambda p: _typed(p.header + p.wrong + "\n\n" + p.function),
    "byte order mark": lambda p: "\ufeff" + _typed(p.function),
    "byte order mark in a fence": lambda p: _fenced("\ufeff" + _typed(p.function)),
    "no-break space behind": lambda p: _fenced(_typed(p.function).replace("\n", "\u00a0\n")),
    "no-break spaces as indentation": lambda p: _fenced(_typed(p.function).replace("    ", "\u00a0" * 4)),
    "carriage returns": lambda p: _block(p.function).replace("\n", "\r\n"),
    "comment at the margin": lambda p: _block(p.header + "# at the margin\n" + p.body),
    "comment at the margin, bare": lambda p: _typed(p.header + "# at the margin\n" + p.body),
    "input behind": lambda p: _fenced(_typed(p.function) + "\n\ngiven = input()\nprint(given)\n"),
    "input behind, bare": lambda p: _typed(p.function) + f"\n\nprint({p.name}(int(input())))\n",
    "main behind": lambda p: _fenced(
        _typed(p.function)
        + "\n\ndef main():\n    "
        + _demo(p).replace("\n", "; ")
        + '\n\n\nif __name__ == "__main__":\n    main()\n'
    ),
    "main called": lambda p: _typed(p.function) + "\n\ndef main():\n    print(input())\n\n\nmain()\n",
    "wrong assertions behind": lambda p: _fenced(_typed(p.function) + f"\n\nassert {p.name}() == 'wrong'\n"),
    "tests behind": lambda p: _fenced(_typed(p.function) + "\n\n" + _tests(p)),
    "test framework behind": lambda p: _fenced(
        "import pytest\n" + _typed(p.function) + "\n\n@pytest.mark.slow\ndef test_it():\n    pass\n\npytest.main()\n"
    ),
    "exit behind": lambda p: _fenced("import sys\n" + _typed(p.function) + "\n\nsys.exit(0)\n"),
    "session behind": lambda p: _typed(p.function) + f"\n>>> {p.name}()\n",
    "cut off in a helper": lambda p: "```python\n" + _typed(p.function) + "\n\ndef more(x):\n    if x in (1, 2",
    "cut off in prose": lambda p: _block(p.function) + "The complexity is O(",
    "import of its own": lambda p: _fenced("import math\n\n" + _typed(p.header + p.imported)),
    "import in the middle": lambda p: _fenced("X = 1\nimport math\n\n" + _typed(p.header + p.imported)),
    "future import": lambda p: _fenced("from __future__ import annotations\n\n" + _typed(p.function)),
    "table filled at the top": lambda p: _fenced(
        "table = []\nfor place in range(3):\n    table.append(place)\n\n\n"
        + _typed(p.header + "    assert table == [0, 1, 2]\n" + p.body)
    ),
    "depth of recursion": lambda p: _fenced("import sys\n\nsys.setrecursionlimit(4321)\n\n" + _typed(p.function)),
    "thoughts": lambda p: f"<think>\ndef {p.name}(*x):\n    return 7\n</think>\n" + _block(p.function),
    "fence within a list": lambda p: "1. So:\n\n" + indent(_block(p.function), "   ") + "\n2. Done\n",
    "try around an import": lambda p: _fenced(
        "try:\n    import math\nexcept ImportError:\n    math = None\n\n" + _typed(p.header + p.imported)
    ),
    "names by text": lambda p: _fenced(
        _typed(f"{p.helper}\n\n" + p.header + p.helped.replace("helper(", "globals()['helper']("))
    ),
}
# The prompts of MBPP+ have no header that a body could continue.
BODY: dict[str, Callable[[Problem], str]] = {
    "body": lambda p: p.body,
    "body without its first indentation": lambda p: p.body[4:],
    "body in a fence": lambda p: _fenced(p.body),
    "body in a fence, first indentation lost": lambda p: _WHERE + _fenced(p.body[4:]),
    "body, helper below": lambda p: p.helped + "\n\n" + p.helper,
    "body, comment at the margin": lambda p: "# at the margin\n" + p.body,
    "body, then prose": lambda p: p.body + "\nThis is O(n).\n",
    "body, then a fence": lambda p: p.body + "```\n",
    "body, then tests": lambda p: p.body + "\n\n" + _tests(p) + "print('done')\nx = input()\n",
    "body, then a cut function": lambda p: p.body + "\n\ndef main():\n    syntax error",
}


def cases() -> list[tuple[str, Problem, str]]:
    """Every style with every problem that it fits."""
    found = [(style, problem, make(problem)) for style, make in WHOLE.items() for problem in PROBLEMS]
    with_header = [problem for problem in PROBLEMS if problem.header.strip() in problem.prompt]
    return found + [(style, problem, make(problem)) for style, make in BODY.items() for problem in with_header]
