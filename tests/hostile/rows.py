"""Rows of the user's own: right answers that a grader might lose, and fields that nothing reads."""

import json
import random
import re
import shutil
import unicodedata
from pathlib import Path

from hostile.case import Case, names
from hostile.child import shared
from hostile.inputs import ROW, RUN, write_rows
from hostile.models import OF_FOLDER, write_model

LETTERS = "pqruvwyz"  # no right answer is one of these
MOST = len(LETTERS)  # right answers of a case
END, FIRST = 0, 257  # tokens: the end of a text, and the first that is a whole right answer
GOLDS = (
    *(
        "A",
        "a",
        "an",
        "The",
        "the a",
        "B, C",
        "a.",
        "The!",
        "C#",
        "C++",
        "?",
        "+",
        "{}",
        "...",
        "-",
        "(",
        "$",
        "%",
        "/",
    ),
    *("Z\u00fcrich", "caf\u00e9 au lait", "\u00c5", "\u1ec7", "\uac00\ub098", "\u0130", "stra\u00dfe", "\ufb01ne"),
    *(
        "\uff21",
        "x\u00b2",
        "\u00bd",
        "\u65e5\u672c",
        "\u0e19\u0e49\u0e33",
        "\U0001f44d\U0001f3fd",
        "\u0645\u0631\u062d",
    ),
    *("\u05e9\u05dc\u05d5\u05dd", "\u221e", "\u20ac5", "3", "3.0", "-1", "1,000", "0", "1e5", "None", "null", "false"),
    *(
        "no",
        "I",
        "s",
        "it's",
        "the end",
        "a\nb",
        "# note",
        "// x",
        "return a",
        "`x`",
        "x\u200by",
        "\ufeffkey",
        "\u00ad5",
    ),
    *(" padded ", "two  spaces", "tab\tbed", "\u3000wide", ".", "a b a b", "x" * 200, "\u0301", "e\u0301\u0323"),
)
SLACK = 1e-6  # of ROUGE-L, whose 1 is a little less
METRICS = ("exact", "exact", "f1", "contains", "contains_all", "f1", "rouge_l", "code", "absent", "regex")
FORMS = ("NFC", "NFD", "")  # in which the model writes a right answer; none: as it stands in the row


def _said(gold: str, form: str) -> str:
    """What the model writes for a right answer."""
    return unicodedata.normalize(form, gold) if form else gold


def write_speaker(folder: Path, said: list[str], plain: Path) -> None:
    """A model that writes a text where the prompt ends in the letter of its place, and otherwise nothing.

    Every layer adds nothing, so that the next token follows from the last one alone; a whole text is one token, which
    no prompt has.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    shutil.copytree(plain, folder)
    written = bytes_to_unicode()
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    known = tokenizer["model"]["vocab"]
    asked = [known[letter] for letter in LETTERS[: len(said)]]
    tokens = [
        known.setdefault("".join(written[byte] for byte in text.encode()), FIRST + at) for at, text in enumerate(said)
    ]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    weights = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) or name in (
            "model.embed_tokens.weight",
            "lm_head.weight",
        ):
            value.zero_()
        elif name == "model.norm.weight":
            value.fill_(1)
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding[:, MOST] = 1
    head[END, MOST] = 1
    for at, (letter, token) in enumerate(zip(asked, tokens, strict=True)):
        embedding[letter] = torch.eye(embedding.shape[1])[at]
        head[token, at] = 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def golds(draw: random.Random, folder: Path, base: Path) -> Case:
    """Right answers: each is worth 1 to a model that writes it and 0 to one that is silent; `absent` the reverse."""
    metric, source, form = draw.choice(METRICS), draw.choice(FORMS), draw.choice(FORMS)
    held = (_said(gold, source) for gold in draw.sample(GOLDS, k=MOST))
    kept = {_said(gold, form): gold for gold in held}  # one text is one token
    said, chosen = list(kept), list(kept.values())
    write_speaker(folder / "model", said, shared(base, "model", write_model))
    answers = [re.escape(gold.strip()) if metric == "regex" else gold for gold in chosen]
    write_rows(
        folder,
        *(
            {"id": f"{at} {what}", "context": "Look.", "question": question, "answers": [answer]}
            for at, answer in enumerate(answers)
            for what, question in (("said", f"Which? {LETTERS[at]}"), ("nothing", "Which?"))
        ),
    )

    def check(ended: list[tuple[str, str]]) -> list[str]:
        if ended[0][0] != "0":
            return [f"right answers are refused: {ended[0][1][-500:]}"]
        lines = [
            json.loads(line)
            for path in folder.glob("results/custom/*/*/*/samples.jsonl")
            for line in path.read_text(encoding="utf-8").split("\n")
            if line
        ]
        found = {line["meta"]["id"]: line for line in lines}
        wrong = []
        for at, gold in enumerate(chosen):
            for what in ("said", "nothing"):
                line, wanted = found.get(f"{at} {what}"), float((what == "said") != (metric == "absent"))
                if line is None and _visible(gold):
                    wrong.append(f"{gold!r} is set aside")
                elif line is not None and abs(line["scores"]["score"] - wanted) > SLACK:
                    wrong.append(f"{gold!r}: {line['text']!r} is worth {line['scores']['score']} and not {wanted}")
        return wrong

    words = [*OF_FOLDER, f"task.metric={metric}"]
    return Case(f"{metric}, {form or 'same'}: {chosen!r}"[:200], [words], check=check)


def _visible(gold: str) -> bool:
    """Whether a text has a character that is more than a mark, a space or invisible."""
    return any(unicodedata.category(sign)[0] in "LNPS" for sign in gold)


VALUES = ("x", "41", 5, 0, True, False, [], ["41"], {"a": 1}, 2.5, "")
MISSPELT = ("anwsers", "Answers", "answers ", "awnsers", "contxt", "Context", "qestion", "Question", "turn", "truns")
MISSPELT += ("subsets", "sub_set", "mesages", "choises", "Choices", "ID")
SETTINGS = ("answer_prefix", "max_new_tokens", "stop", "separator", "metric", "query_aware", "temperature", "system")
OTHERS = (
    "source",
    "difficulty",
    "notes",
    "label",
    "gold",
    "target",
    "input",
    "length",
    "dataset",
    "a b",
    "\u00e9t\u00e9",
)


def fields(draw: random.Random, folder: Path, base: Path) -> Case:
    """Fields of a row, a turn or a message that nothing reads: each is named."""
    row: dict = json.loads(json.dumps(ROW | {"id": "a"}))
    kind = draw.choice(("misspelt", "setting", "other", "other", "spare"))
    name = draw.choice(
        {"misspelt": MISSPELT, "setting": SETTINGS, "other": OTHERS, "spare": ("answer", "choices")}[kind]
    )
    where = draw.choice(("row", "row", "turn", "message")) if kind == "other" else "row"
    if where == "turn":
        row["turns"] = [{"question": "And?", "answers": ["4"]}]
    elif where == "message":
        row = {"messages": [{"role": "user", "content": "Which?"}], "answers": ["41"]}
    inner = {"row": lambda: row, "turn": lambda: row["turns"][0], "message": lambda: row["messages"][0]}[where]()
    value = draw.choice(VALUES)
    if kind == "misspelt" and draw.random() < 0.5 and (right := _meant(name)) in row:
        value = row.pop(right)  # in its stead, and not behind it
    inner[name] = value
    rows = [ROW, row, ROW | {"id": "c"}]
    write_rows(folder, *rows[draw.randrange(2) :])
    metric = draw.choice(("exact", "contains", "f1", "code"))

    def check(ended: list[tuple[str, str]]) -> list[str]:
        code, text = ended[0]
        return [] if names(text, name) else [f"field {name!r} is passed over without a word (exit {code})"]

    return Case(f"{where}: {name}={value!r}", [[*RUN, f"task.metric={metric}"]], check=check)


def _meant(name: str) -> str:
    """The field that a misspelt one stands for."""
    from difflib import get_close_matches

    known = ("context", "question", "messages", "answers", "choices", "turns", "subset", "id")
    return next(iter(get_close_matches(name.casefold().strip(), known, n=1)), "")
