"""From what a model wrote to the program that is graded. Text only: nothing here parses or runs the answer."""

import re

# Where a model that continues raw code has left the function it was asked for.
STOP_WORDS = ("\nclass ", "\ndef ", "\nasync def ", "\n#", "\nif ", "\nprint", "\nassert ", "\n@", "\n```", "\n<|")
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)


def build_program(prompt: str, entry_point: str, completion: str) -> str:
    """Put the program together that an answer stands for.

    A fenced block that defines the function (or the last block, when none does) is taken out of a chat reply; text up
    to `</think>` is dropped. A definition of the function replaces the prompt's, behind the imports and helpers of the
    prompt; anything else continues the prompt and ends at the first stop word.

    Args:
        prompt: What the model was given to continue: imports, helpers, signature and docstring; or a docstring alone
            (MBPP+).
        entry_point: Name of the function.
        completion: The answer.

    Returns:
        Python source, not checked in any way.

    Differs: EvalPlus takes the code of a chat reply without the prompt's imports; a reply that leaves `from typing
        import List` to the prompt fails there and runs here.
    """
    answer = completion.replace("\r\n", "\n").rpartition("</think>")[2]
    defines = re.compile(rf"^(?:async )?def {re.escape(entry_point)}\b", re.MULTILINE)
    blocks = _blocks(answer)
    if blocks:
        answer = next((block for block in blocks if defines.search(block)), blocks[-1])
    if found := defines.search(answer):
        head = _before_definition(prompt, defines)
        return f"{head}\n{answer if blocks else _cut(answer, found.end())}\n"
    return f"{prompt}{_indented(_cut(answer, 0))}\n"


def _blocks(answer: str) -> list[str]:
    """The contents of fenced blocks of Python or of no stated language; the last may lack its end."""
    fences = list(_FENCE.finditer(answer))
    blocks, place = [], 0
    while place < len(fences):
        start = fences[place]
        end = next((at for at in range(place + 1, len(fences)) if not fences[at].group(1)), None)
        stop = fences[end].start() if end is not None else len(answer)
        # The end of an answer that began inside a block has no text behind it.
        if start.group(1).lower() in ("", "python", "python3", "py") and answer[start.end() : stop].strip():
            blocks.append(answer[start.end() : stop].strip("\n"))
        if end is None:
            break
        place = end + 1
    return blocks


def _before_definition(prompt: str, defines: re.Pattern[str]) -> str:
    found = defines.search(prompt)
    return prompt[: found.start()] if found else prompt


def _cut(text: str, start: int) -> str:
    places = [place for word in STOP_WORDS if (place := text.find(word, start)) >= 0]
    return text[: min(places)] if places else text


def _indented(body: str) -> str:
    """Give the first line of a function body back the indentation that chat models and tokenizers strip."""
    if not body[:1].strip() or body.startswith("#"):
        return body
    return "    " + body
