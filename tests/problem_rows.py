"""Made-up problems, one per benchmark, and folders of them."""

from pathlib import Path

from longbench_rows import write

GSM8K = {"question": "Ann has 3 boxes of 4. How many?", "answer": "3 boxes are <<3*4=12>>12.\n#### 12"}
MATH = {
    "problem": "What is $1/2+1/3$?",
    "solution": "It is $\\boxed{\\frac{5}{6}}$.",
    "answer": "\\frac{5}{6}",
    "subject": "Algebra",
    "level": 2,
}
AIME = {"problem": "Find $6\\cdot 7$.", "solution": "", "answer": "042"}
CODE = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x):\n    """ Twice x. """\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "base_input": [[1]],
    "plus_input": [[-3], [10**30]],
    "atol": 0,
}
FILES = {
    "gsm8k": ("test", GSM8K),
    "math500": ("test", MATH),
    "math": ("algebra", MATH),
    "aime24": ("test", AIME),
    "aime25": ("aime25", AIME),
    "aime26": ("test", AIME | {"answer": 42}),
    "humaneval_plus": ("humanevalplus", CODE),
    "mbpp_plus": ("MbppPlus", CODE),
}


def folder_of(tmp_path: Path, task: str, *lines: bytes | dict) -> Path:
    """A data folder of a task: the given lines, or three copies of its row."""
    stem, row = FILES[task]
    write(tmp_path / f"{stem}.jsonl", *(lines or [row] * 3))
    return tmp_path
