"""The program of an answer: right answers in every style are found, and what is no code costs little time."""

import ast
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from selection import FULL
from tasks.code.answer_styles import cases

from kvbench.tasks.code.extract import build_program, defines, dependencies, parse, without

STYLES = cases()
ONE_EACH = {style: problem for style, problem, _ in STYLES}  # the others run in the exhaustive suite


@pytest.mark.parametrize(
    ("problem", "answer"),
    [
        pytest.param(
            *case[1:],
            id=f"{case[0]}-{case[1].name}",
            marks=() if ONE_EACH[case[0]] is case[1] else pytest.mark.exhaustive,
        )
        for case in STYLES
    ],
)
def test_right_answers_in_every_style(problem, answer, monkeypatch):
    """The program loads without input and gives the right results; EvalPlus' sanitiser accepts 54 of these styles."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("the program asks for input"))
    space: dict = {"__name__": "solution"}
    exec(compile(build_program(problem.prompt, problem.name, answer), "answer", "exec"), space)
    for arguments, expected in problem.calls:
        assert space[problem.name](*map(list, arguments) if expected == [] else arguments) == expected


def test_styles_are_many():
    """More than the 43 styles of the audit, each with problems of both benchmarks."""
    assert len({style for style, _, _ in STYLES}) >= 43 and len(STYLES) >= 200


PROMPT = "import math\n\ndef f():\n    '''One.'''\n"


@pytest.mark.parametrize(
    ("completion", "body"),
    [
        ("    return 1\n\n\ndef g():\n    return 2\n\nif f():\n    print(1)", "    return 1"),
        ("\n    return 1\n\nif __name__", "    return 1"),
        ("```\n    return 1\n```", "    return 1"),
        ("text\n```python\n    return 1", "    return 1"),
        ("```bash\npip\n```\n```python\n    return 1\n```\n", "    return 1"),
        ("    x = [\n# inside\n    1]\n    return x[0]\nx", "    x = [\n# inside\n    1]\n    return x[0]"),
        ("    return g()\ndef g():\n    return 1\ndef h():\n    pass", "    return g()\ndef g():\n    return 1"),
    ],
)
def test_a_body_continues_the_prompt(completion, body):
    """What the function does not need is left out; a comment, a helper or a fence does not end it."""
    assert ast.unparse(ast.parse(build_program(PROMPT, "f", completion))) == ast.unparse(ast.parse(PROMPT + body))


@pytest.mark.parametrize(
    "completion",
    [
        "Use:\n```python\nf()\n```\nDefined:\n```python\ndef f():\n    return 1\n```\n",
        "```Python\ndef f():\n    return 1",
        "\r\n```python\r\ndef f():\r\n    return 1\r\n```",
        "```python\ndef f():\n    return 1\n```\nShort:\n```python\ndef f():\n    ...\n```",
    ],
)
def test_a_definition_replaces_the_prompts(completion):
    """A whole function goes behind the imports and helpers of the prompt, whichever block holds it."""
    assert build_program(PROMPT, "f", completion) == "import math\n\n\ndef f():\n    return 1\n"


@pytest.mark.parametrize(
    "completion", ["", "I cannot do that.", "def f(:\n    return 1", "```python\nfor\n```", "\0", "\ud800"]
)
def test_no_code_stays_what_it_is(completion):
    """Without code that defines the function the program is the prompt and the answer, which loads only if empty."""
    program = build_program(PROMPT, "f", completion)
    assert program.startswith(PROMPT) and completion in program
    assert (parse(program)[0] is None) == bool(completion)


def test_what_a_function_needs():
    """Its helpers and what changes their values, settings, and all bindings of its name; no demonstration."""
    text = """from __future__ import annotations
import sys, os
import json
import random
random.seed(1)
sys.setrecursionlimit(10)
sys.stdout.write("x")
memo = {}
memo[0] = 1
other = {}
other.update(memo)
@cached
def f(n): return memo.get(n) or helper(n)
def helper(n): return Box(n)
def cached(g): return g
class Box: pass
class Rest: pass
f.calls = 0
f = cached(f)
result = f(1)
print(f(2)); memo.clear()
try:
    import fast as quick
except ImportError:
    quick = None
"""
    tree, _ = parse(text)
    found = dependencies(tree, "f")
    kept = without(text.split("\n"), tree, found.kept)
    gone = ("json", 'write("x")', "other", "Rest", "result", "quick")
    assert [word for word in gone if word in kept] == []
    stays = ("annotations", "seed", "recursion", "memo[0]", "@cached", "class Box", "f.calls", "f = cached(f)", "clear")
    assert [word for word in stays if word not in kept] == []
    assert found.missing == {"n", "g"}
    assert dependencies(parse("def f(): return eval('g()')\ndef g(): return 1\nx = f()")[0], "f").kept == {0, 1}


@pytest.mark.parametrize(
    ("text", "defined"),
    [
        ("def f():\n    'doc'\n", False),
        ("def f():\n    'doc'\n    Sure\n", False),
        ("def f():\n    import os\n", False),
        ("def f(a):\n    a.sort()\n", True),
        ("def f():\n    return 1\ndef f():\n    pass\n", False),
        ("if True:\n    def f():\n        pass\n", True),
        ("for f in (len,):\n    pass\n", True),
        ("from math import floor as f\n", True),
        ("g = f\n", False),
    ],
)
def test_what_defines_a_function(text, defined):
    """More than a header; by whatever statement binds the name last."""
    assert defines(ast.parse(text), "f") is defined


FRAGMENTS = ["\n", " ", "(", "'", '"""', "```\n", "~~~\n", "def f():\n", "def f(", "def f():\n    return (", "f = (\n"]
FRAGMENTS += ["x\n", "@f\n", "{[(", "if f:\n", "f(", "-", "1,", "    return 1\n", "# f\n", "\\\n"]
FRAGMENTS += ["```python\nf = 1\n```\n", "Here is f, it's (a\n", "f = f\n", "lambda f:", "\x00", "f'{"]


@pytest.mark.every(2)
@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_time_grows_with_the_length(fragment):
    """Repeated fragments of 4 and 40 thousand characters (exhaustive: 10 and 100): ten times the text takes about ten
    times as long, in the quickest of up to three tries."""
    length, seconds_more = (10_000, 0.1) if FULL else (4_000, 0.04)

    def seconds(count: int) -> float:
        answer = (fragment * count)[:count]
        gc.disable()  # a collection goes through all that other tests of the process hold
        try:
            start = time.process_time()
            build_program(PROMPT, "f", answer)
            return time.process_time() - start
        finally:
            gc.enable()

    limit = min(5, 20 * max(seconds(length), seconds_more))
    assert any(seconds(10 * length) < limit for _ in range(3))


def test_graders_may_parse_at_once():
    """Threads that leave off within each other's parsing, as garbage collection makes them, all get their trees: until
    Python 3.11.8 one of two got a SystemError, and its answer was not graded."""
    nested = f"x = {'(' * 40}1{')' * 40}\n" + "".join(
        f"def f{i}(a):\n    return [a, (a, [{{a: a}}])]\n" for i in range(50)
    )

    def leave_off(*_):
        time.sleep(1e-5)

    threshold = gc.get_threshold()
    gc.callbacks.append(leave_off)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(4) as threads:
            assert all(tree is not None for tree, _ in threads.map(parse, [nested] * 20))
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(leave_off)
