"""Answers of models to mathematical problems in many styles: where the final answer stands, and how it is written."""

from collections.abc import Callable
from typing import NamedTuple


class Style(NamedTuple):
    """A final answer as a model writes it, and the same with another one."""

    name: str
    reference: str
    right: str
    wrong: str


# (right answer, wrong answer) that stand in for each other in every style of `POSITIONS`.
ANSWERS = (
    ("\\frac{3}{4}", "\\frac{4}{3}"),
    ("42", "24"),
    ("-7", "7"),
    ("x^2+1", "x^2-1"),
    ("(1,2)", "(2,1)"),
    ("2\\sqrt{3}", "3\\sqrt{2}"),
)
_WORK = "We add $3$ and $5$, then divide by $2$.\n\n"

POSITIONS: dict[str, Callable[[str], str]] = {
    "box": lambda a: f"{_WORK}So it is $\\boxed{{{a}}}$.",
    "box with spaces": lambda a: f"{_WORK}\\boxed {{ {a} }}",
    "box in display mathematics": lambda a: f"{_WORK}\\[\n\\boxed{{{a}}}\n\\]",
    "box over lines": lambda a: f"{_WORK}\\boxed{{\n{a}\n}}",
    "box in a box": lambda a: f"{_WORK}\\boxed{{\\boxed{{{a}}}}}",
    "fbox": lambda a: f"{_WORK}\\fbox{{${a}$}}",
    "box with dollars inside": lambda a: f"{_WORK}\\boxed{{${a}$}}",
    "box with inline mathematics inside": lambda a: f"{_WORK}\\boxed{{\\({a}\\)}}",
    "box with displaystyle": lambda a: f"{_WORK}$\\boxed{{\\displaystyle {a}}}$",
    "box with a name": lambda a: f"{_WORK}$\\boxed{{y = {a}}}$",
    "box with a full stop": lambda a: f"{_WORK}$\\boxed{{{a}.}}$",
    "box after an equals sign": lambda a: f"{_WORK}$$y = 3 + 5 = \\boxed{{{a}}}$$",
    "box after an aligned block": lambda a: f"\\begin{{align*}}\ny &= 3 + 5 \\\\\n&= \\boxed{{{a}}}.\n\\end{{align*}}",
    "several boxes": lambda a: f"First $\\boxed{{1}}$, then $\\boxed{{5}}$. Finally $\\boxed{{{a}}}$.",
    "box, then a sentence": lambda a: f"$\\boxed{{{a}}}$\n\nThis answers all of the 3 questions.",
    "box, then a cut box": lambda a: f"$\\boxed{{{a}}}$\n\nTo check: $\\boxed{{\\frac{{9}}",
    "box in bold": lambda a: f"**Final Answer**\n\n**$\\boxed{{{a}}}$**",
    "box behind a heading": lambda a: f"### Final Answer\n\\[ \\boxed{{{a}}} \\]",
    "box behind the phrase": lambda a: f"{_WORK}The final answer is $\\boxed{{{a}}}$.",
    "box behind thoughts": lambda a: f"<think>Is it $\\boxed{{9}}$?</think>\n\nIt is $\\boxed{{{a}}}$.",
    "phrase, dollars": lambda a: f"{_WORK}The answer is ${a}$.",
    "phrase, two dollars": lambda a: f"{_WORK}The answer is $${a}$$",
    "phrase, two dollars on lines below": lambda a: f"{_WORK}The answer is:\n\n$$\n{a}\n$$\n",
    "phrase, inline mathematics": lambda a: f"{_WORK}The final answer is: \\({a}\\).",
    "phrase, display mathematics": lambda a: f"{_WORK}The final answer is \\[{a}\\]",
    "phrase, display mathematics below": lambda a: f"{_WORK}The final answer is:\n\\[\n{a}\n\\]",
    "phrase, display mathematics below, then prose": lambda a: (
        f"{_WORK}The final answer is:\n\n\\[\n{a}\n\\]\n\nThis uses $9$ and $10$."
    ),
    "phrase, display mathematics begins on its line": lambda a: f"{_WORK}The final answer is: \\[\n{a}\n\\]",
    "phrase, display mathematics with a full stop": lambda a: f"{_WORK}Thus, the final answer is:\n\\[\n{a}.\n\\]",
    "phrase, equation environment": lambda a: f"{_WORK}The answer is:\n\\begin{{equation*}}\n{a}\n\\end{{equation*}}",
    "phrase, aligned environment": lambda a: (
        f"{_WORK}The answer is:\n\\begin{{align*}}\ny &= 3 + 5 \\\\\n&= {a}\n\\end{{align*}}"
    ),
    "phrase, aligned in display mathematics": lambda a: (
        f"{_WORK}The answer is:\n\\[\n\\begin{{aligned}}\ny &= 3 + 5 \\\\\n&= {a}\n\\end{{aligned}}\n\\]"
    ),
    "phrase, bare": lambda a: f"{_WORK}The answer is {a}.",
    "phrase, bare on the line below": lambda a: f"{_WORK}Answer:\n\n{a}",
    "phrase in bold": lambda a: f"{_WORK}**The final answer is:** ${a}$",
    "phrase in bold, answer below": lambda a: f"{_WORK}**Final Answer:**\n\n${a}$",
    "answer in bold": lambda a: f"{_WORK}The answer is **{a}**.",
    "answer in bold, dollars": lambda a: f"{_WORK}The answer is: **${a}$**.",
    "answer as code": lambda a: f"{_WORK}The answer is `{a}`.",
    "heading, answer below": lambda a: f"{_WORK}## Final answer:\n${a}$",
    "phrase with a name": lambda a: f"{_WORK}The answer is $y = {a}$.",
    "phrase, then another problem": lambda a: f"{_WORK}Final Answer: The final answer is ${a}$. I hope it is correct.",
    "phrase, bare, Minerva": lambda a: f"{_WORK}Final Answer: The final answer is {a}. I hope it is correct.",
    "phrase twice": lambda a: f"The answer is $9$? No.\n\nThe answer is ${a}$.",
    "phrase with a unicode colon": lambda a: f"{_WORK}The answer is\uff1a${a}$",
    "phrase behind thoughts": lambda a: f"<think>The answer is $9$.</think>The answer is ${a}$.",
    "phrase, dollars cut": lambda a: f"{_WORK}The answer is ${a}",
    "phrase, display mathematics cut": lambda a: f"{_WORK}The answer is:\n\\[\n{a}",
    "phrase, an adverb": lambda a: f"{_WORK}The answer is therefore {a}.",
    "phrase, announced": lambda a: f"{_WORK}The answer is given by the following value:\n\n$${a}$$",
    "phrase, underlined": lambda a: f"{_WORK}The answer is: __{a}__",
    "heading of its own": lambda a: f"{_WORK}### Answer\n${a}$\n\nI checked it with $9$.",
    "heading in bold": lambda a: f"{_WORK}**Final Answer**\n\n\\[\n{a}\n\\]\n\nThis uses $9$.",
    "phrase over two lines": lambda a: f"{_WORK}The final answer\nis {a}.",
    "last mathematics": lambda a: f"{_WORK}Hence it comes to ${a}$.",
    "last display mathematics": lambda a: f"{_WORK}Hence\n\\[\n{a}\n\\]",
    "last sentence with a name": lambda a: f"{_WORK}Therefore, $y = {a}$.",
    "carriage returns": lambda a: f"{_WORK}The final answer is:\n\\[\n{a}\n\\]\n".replace("\n", "\r\n"),
}

FORMS = (
    Style("dfrac", "\\frac{3}{4}", "\\dfrac{3}{4}", "\\dfrac{3}{5}"),
    Style("tfrac", "\\frac{3}{4}", "\\tfrac34", "\\tfrac43"),
    Style("fraction with a slash", "\\frac{3}{4}", "3/4", "4/3"),
    Style("fraction as decimal", "\\frac{3}{4}", "0.75", "0.7"),
    Style("fraction not reduced", "\\frac{3}{4}", "\\frac{6}{8}", "\\frac{6}{7}"),
    Style("fraction with its minus inside", "-\\frac{3}{4}", "\\frac{-3}{4}", "\\frac{3}{4}"),
    Style("mixed number", "\\frac{7}{2}", "3\\frac{1}{2}", "3\\frac{1}{4}"),
    Style("mixed reference", "3\\frac{1}{2}", "\\frac{7}{2}", "\\frac{3}{2}"),
    Style("third as decimal", "\\frac{1}{3}", "\\frac{2}{6}", "0.33"),
    Style("decimal with zeros", "2.5", "2.50", "2.05"),
    Style("decimal without its zero", "0.5", ".5", ".05"),
    Style("commas", "12345", "12,345", "12,354"),
    Style("commas in braces", "12345", "12{,}345", "12{,}354"),
    Style("thin spaces", "12345", "12\\,345", "12\\,354"),
    Style("commas in the reference", "12,345", "12345", "12354"),
    Style("scientific notation", "150000", "1.5 \\times 10^5", "1.5 \\times 10^4"),
    Style("scientific reference", "1.5 \\times 10^{-5}", "0.000015", "0.00015"),
    Style("power of ten", "10^{20}", "100000000000000000000", "10000000000000000000"),
    Style("huge", "2^{100}", "1267650600228229401496703205376", "1267650600228229401496703205375"),
    Style("tiny", "\\frac{1}{2^{99}}", "2^{-99}", "\\frac{1}{2^{98}}"),
    Style("tiny as 1/2^99", "1/2^{99}", "\\frac{1}{2^{99}}", "1/2^{98}"),
    Style("tiny decimal", "0.00000000000001", "10^{-14}", "0.00000000000002"),
    Style("tiny against nothing", "0", "0.0", "10^{-30}"),
    Style("tiny in a set", "\\{1,\\frac{1}{2^{99}}\\}", "\\{2^{-99},1\\}", "\\{2^{-98},1\\}"),
    Style("tiny in a point", "(1,10^{-20})", "(1,\\frac{1}{10^{20}})", "(1,10^{-21})"),
    Style("tiny root", "\\sqrt{2}\\cdot 10^{-20}", "\\frac{\\sqrt{2}}{10^{20}}", "\\sqrt{3}\\cdot 10^{-20}"),
    Style("tiny in an equation", "x=10^{-20}", "x=\\frac{1}{10^{20}}", "x=10^{-21}"),
    Style("factorial below", "\\frac{1}{100!}", "\\frac{1}{100 \\cdot 99!}", "\\frac{1}{101!}"),
    Style("percent", "25\\%", "25", "2.5"),
    Style("percent sign", "25", "25\\%", "26\\%"),
    Style("dollars", "36", "\\$36", "\\$37"),
    Style("dollars in the reference", "\\$36.50", "36.50", "36.05"),
    Style("unit", "15", "15\\text{ cm}", "16\\text{ cm}"),
    Style("unit in words", "15", "15 \\text{ square units}", "14 \\text{ square units}"),
    Style("unit, mathrm", "15\\text{ cm}", "15\\,\\mathrm{cm}", "14\\,\\mathrm{cm}"),
    Style("power of a unit", "15\\text{ cm}^2", "15 \\text{ cm}^{2}", "15 \\text{ cm}^{3}"),
    Style("degrees", "90^\\circ", "90", "60"),
    Style("degrees sign", "90", "90\u00b0", "60\u00b0"),
    Style("unicode minus", "-7", "\u22127", "7"),
    Style("plus sign", "7", "+7", "-7"),
    Style("unicode root", "\\sqrt{3}", "\u221a3", "\u221a2"),
    Style("unicode pi", "2\\pi", "2\u03c0", "3\u03c0"),
    Style("unicode times", "150000", "1.5 \u00d7 10^5", "1.5 \u00d7 10^4"),
    Style("root", "2\\sqrt{3}", "\\sqrt{12}", "\\sqrt{13}"),
    Style("root without braces", "\\sqrt{2}", "\\sqrt2", "\\sqrt3"),
    Style("root below", "\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}", "\\frac{\\sqrt{2}}{3}"),
    Style("cube root", "\\sqrt[3]{2}", "2^{1/3}", "2^{1/2}"),
    Style("nested roots", "1+\\sqrt{2}", "\\sqrt{3+2\\sqrt{2}}", "\\sqrt{3+\\sqrt{2}}"),
    Style("pi", "\\frac{\\pi}{2}", "\\frac{1}{2}\\pi", "\\frac{1}{3}\\pi"),
    Style("pi, not its decimals", "\\pi", "\\frac{2\\pi}{2}", "3.1416"),
    Style("e", "e^2", "e \\cdot e", "e^3"),
    Style("logarithm", "3", "\\log_2 8", "\\log_2 16"),
    Style("trigonometry", "\\frac{1}{2}", "\\cos\\frac{\\pi}{3}", "\\cos\\frac{\\pi}{6}"),
    Style("binomial", "\\binom{5}{2}", "10", "20"),
    Style("factorial", "120", "5!", "4!"),
    Style("complex", "2+3i", "3i+2", "2-3i"),
    Style("absolute value", "|x|", "|x|", "x"),
    Style("polynomial", "x^2+2x+1", "(x+1)^2", "(x-1)^2"),
    Style("factors in another order", "(x+1)(x-2)", "(x-2)(x+1)", "(x+2)(x-1)"),
    Style("equation", "y=2x+3", "y = 3 + 2x", "y = 3 - 2x"),
    Style("equation turned", "2x+y=3", "y+2x=3", "y+2x=4"),
    Style("name of the value", "5", "x=5", "x=6"),
    Style("name in the reference", "x=5", "5", "6"),
    Style("function", "f(x)=2x", "2x", "3x"),
    Style("inequality", "x \\ge 2", "x \\geq 2", "x > 2"),
    Style("inequality turned", "x < 2", "2 > x", "2 < x"),
    Style("set", "\\{1,2,3\\}", "\\{3, 2, 1\\}", "\\{1,2,4\\}"),
    Style("set without braces", "1,2,3", "3, 2, 1", "3, 2"),
    Style("set with or", "\\{1,2\\}", "1 \\text{ or } 2", "1 \\text{ or } 3"),
    Style("set with and", "1,2", "1 \\text{ and } 2", "1 \\text{ and } 3"),
    Style("names in a set", "\\{1,2\\}", "x=1 \\text{ or } x=2", "x=1 \\text{ or } x=3"),
    Style("empty set", "\\emptyset", "\\varnothing", "\\{0\\}"),
    Style("plus or minus", "\\{2,-2\\}", "\\pm 2", "\\pm 3"),
    Style("point", "(1,2)", "\\left(1, 2\\right)", "\\left(2, 1\\right)"),
    Style("point of fractions", "\\left(\\frac{1}{2},3\\right)", "(0.5,3)", "(0.5,4)"),
    Style("point of three", "(1,2,3)", "(1, 2, 3)", "(1, 3, 2)"),
    Style("points", "(1,2),(3,4)", "(3,4),(1,2)", "(1,2),(4,3)"),
    Style("open interval", "(2,\\infty)", "(2, +\\infty)", "[2,\\infty)"),
    Style("half open interval", "[0,1)", "\\left[0, 1\\right)", "[0,1]"),
    Style(
        "union", "(-\\infty,1)\\cup(2,\\infty)", "(-\\infty, 1) \\cup (2, \\infty)", "(-\\infty, 1] \\cup (2, \\infty)"
    ),
    Style("interval with a name", "(2,\\infty)", "x \\in (2,\\infty)", "x \\in (3,\\infty)"),
    Style(
        "matrix",
        "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
        "\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}",
        "\\begin{bmatrix} 1 & 3 \\\\ 2 & 4 \\end{bmatrix}",
    ),
    Style(
        "vector",
        "\\begin{pmatrix} 1/2 \\\\ 3 \\end{pmatrix}",
        "\\begin{pmatrix} \\frac{1}{2} \\\\ 3 \\end{pmatrix}",
        "\\begin{pmatrix} 3 \\\\ \\frac{1}{2} \\end{pmatrix}",
    ),
    Style("base", "52_8", "52_{8}", "52_{9}"),
    Style("text", "\\text{Evelyn}", "Evelyn", "Angela"),
    Style("text in other case", "\\text{even}", "\\text{Even}", "\\text{odd}"),
    Style("choice", "\\text{(C)}", "C", "D"),
    Style("choice in brackets", "\\text{C}", "(C)", "(D)"),
    Style("choice with its value", "C", "\\textbf{(C)}", "\\textbf{(B)}"),
    Style("yes", "\\text{Yes}", "\\text{yes}", "\\text{no}"),
    Style("time", "10\\!:\\!30", "10:30", "10:31"),
    Style("ratio", "3:2", "3 : 2", "2 : 3"),
    Style(
        "sizes of brackets",
        "\\left(\\frac{1}{2}\\right)^3",
        "\\bigl(\\tfrac{1}{2}\\bigr)^3",
        "\\bigl(\\tfrac{1}{3}\\bigr)^3",
    ),
    Style("not written out", "7", "3+4", "3+5"),
    Style("equals chain", "7", "3+4=7", "3+5=8"),
    Style("percent without its backslash", "25", "25%", "26%"),
    Style("commas and a unit", "12345", "12,345\\text{ people}", "12,354\\text{ people}"),
    Style("a half in one sign", "\\frac{1}{2}", "\u00bd", "\u00bc"),
    Style("mixed number in signs", "\\frac{7}{2}", "3\u00bd", "3\u00bc"),
    Style("power in one sign", "x^2+1", "x\u00b2 + 1", "x\u00b3 + 1"),
    Style("root of a bracket", "\\sqrt{x+1}", "\u221a(x+1)", "\u221a(x-1)"),
    Style("about", "7", "\\approx 7", "\\approx 8"),
)


# Final answers of several values, and of a value with words, behind the phrase.
SENTENCES = (
    Style("one of two", "5", "The answer is $5$.", "The answer is $5$ or $6$."),
    Style("two values", "5,6", "The answer is $5$ and $6$.", "The answer is $5$ and $7$."),
    Style("two names", "\\{5,6\\}", "The answer is $x=5$ or $x=6$.", "The answer is $x=5$ or $x=7$."),
    Style("three values", "1,2,3", "The answer is $1$, $2$, and $3$.", "The answer is $1$, $2$, and $4$."),
    Style("two values at the end", "1,2", "Hence $x=1$ or $x=2$.", "Hence $x=1$ or $x=3$."),
    Style("last of two values at the end", "2", "Hence $x=2$.", "Hence $x=1$ or $x=2$."),
    Style("two bare values", "5", "The answer is 5.", "The answer is 5 or 6."),
    Style("a condition before the last", "5", "As $x$ is not $0$, $x=5$.", "As $x$ is not $5$, $x=0$."),
    Style("two results, the last counts", "41", "Hence $b=287$ and $a=41$.", "Hence $a=41$ and $b=287$."),
    Style(
        "an equation that is solved",
        "2",
        "\\begin{align*}\n2x+1 &= 5 \\\\\n2x &= 4 \\\\\nx &= 2\n\\end{align*}",
        "\\begin{align*}\n2x+1 &= 5 \\\\\n2x &= 2 \\\\\nx &= 1\n\\end{align*}",
    ),
    Style("a reason behind", "7", "The answer is $7$, since $3+4=7$.", "The answer is $8$, since $3+4=7$."),
    Style("a reason behind, bare", "7", "The answer is 7 because 3+4=7.", "The answer is 8 because 3+5=8."),
    Style("a unit behind", "7", "The answer is 7 apples.", "The answer is 17 apples."),
    Style("a scale behind", "7", "The answer is 7 square miles.", "The answer is 7 million."),
    Style("a unit behind mathematics", "7", "The answer is $7$ cm.", "The answer is $17$ cm."),
    Style("thousands and a unit", "12345", "The answer is 12,345 people.", "The answer is 12,354 people."),
    Style("a currency sign", "36", "The answer is $36.", "The answer is $35."),
    Style("an escaped currency sign", "36", "The answer is \\$36.", "The answer is \\$35."),
    Style("a percentage", "25", "The answer is 25%.", "The answer is 26%."),
    Style("a relation", "5", "The answer is 5.", "The answer is > 5."),
    Style("a letter", "C", "The answer is (C).", "The answer is (B)."),
    Style("a letter in bold", "\\text{(C)}", "The answer is **C**.", "The answer is **B**."),
    Style("two displays", "6", "\\[ a = 1 \\]\nthen\n\\[ b = 6 \\]", "\\[ b = 6 \\]\nthen\n\\[ a = 1 \\]"),
    Style(
        "results one below the other",
        "2",
        "The answer is:\n\\begin{align*}\nx &= 1 + 1 \\\\\n&= 2\n\\end{align*}",
        "The answer is:\n\\begin{align*}\nx &= 1 \\\\\ny &= 2\n\\end{align*}",
    ),
    Style(
        "matrix in an aligned line",
        "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        "The answer is:\n\\begin{align*}\nv &= \\begin{pmatrix}1\\\\2\\end{pmatrix}\n\\end{align*}",
        "The answer is:\n\\begin{align*}\nv &= \\begin{pmatrix}2\\\\1\\end{pmatrix}\n\\end{align*}",
    ),
)


def cases() -> list[Style]:
    """Every style; each of `POSITIONS` with each of `ANSWERS`, each of `FORMS` in a box, and `SENTENCES`."""
    styles = [
        Style(f"{name}: {right}", right, write(right), write(wrong))
        for name, write in POSITIONS.items()
        for right, wrong in ANSWERS
    ]
    boxed = [form._replace(right=f"$\\boxed{{{form.right}}}$", wrong=f"$\\boxed{{{form.wrong}}}$") for form in FORMS]
    return [*styles, *boxed, *SENTENCES]
