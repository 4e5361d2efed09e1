"""Metrics of `task=custom` over odd right answers: 1 against itself, 0 against nothing, whatever the Unicode form."""

import json
import unicodedata

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvbench.tasks import load_task
from kvbench.tasks.custom import grade
from kvbench.tasks.custom.metrics import ABSENT, REGEX, SCORES, check_answers, fold

WRITTEN = sorted(set(SCORES) - {REGEX})
ODD = ["A", "a.", "The", "the an", "?", "{}", "...", ". .", "#", "# c\n\nx = 1", "`x`", "x\ny", "B, A", "0", "-1", "I"]
ODD += ["\u0130", "\u0131", "stra\u00dfe", "\u200b", "e\u0301", "\ufb01", "\u00a0x", "\u0345", "\ud55c", "2\u00b2"]
ODD += ["a\u030a\u0323"]
TEXTS = st.one_of(st.sampled_from(ODD), st.text(max_size=12).filter(str.strip))


@settings(max_examples=300)
@given(metric=st.sampled_from(WRITTEN), answer=TEXTS, form=st.sampled_from(["NFC", "NFD"]))
def test_right_answers_score_1_against_themselves_and_0_against_nothing(metric: str, answer: str, form: str) -> None:
    """In either Unicode form; `absent` the reverse. Only what nobody sees is refused."""
    try:
        check_answers(metric, [answer])
    except ValueError as error:
        assert f"metric={metric}" in str(error) and not any(unicodedata.category(sign)[0] in "LNPS" for sign in answer)
        return
    right = float(metric != ABSENT)
    assert grade(metric, answer, [answer]) == pytest.approx(right, abs=1e-6)
    assert grade(metric, unicodedata.normalize(form, answer), [answer]) == pytest.approx(right, abs=1e-6)
    assert grade(metric, "", [answer]) == 1 - right


@settings(max_examples=200)
@given(answer=TEXTS)
@example("STRASSE")
@example("\u0130stanbul")
def test_case_is_none_in_any_letter(answer: str) -> None:
    """Upper, lower and folded forms of a text are one text, and a secret in any of them is there."""
    assume(fold(answer).strip())
    for other in (answer.upper(), answer.lower(), answer.casefold()):
        if unicodedata.normalize("NFKC", answer) == answer:
            assert grade("exact", other, [answer]) == grade("contains", other, [answer]) == 1
            assert grade(ABSENT, f"it is {other}", [answer]) == 0


@pytest.mark.parametrize(
    ("metric", "text", "answer", "score"),
    [
        ("f1", "A", "A", 1),
        ("exact", "a.", "A", 1),
        ("exact", "The A", "A", 1),
        ("exact", "B", "A", 0),
        ("exact", "", "A", 0),
        ("exact", "The", "A", 0),
        ("exact", "(", "A", 0),
        ("exact", "B", "A, B", 0),
        ("exact", "a b", "A, B", 1),
        ("exact", "the a", "an a", 0),  # of articles alone, none is dropped
        ("exact", "A door", "the door", 1),
        ("f1", "?", "?", 1),
        ("f1", "!", "?", 0),
        ("exact", "the the", "The!", 0),
        ("exact", "STRASSE", "stra\u00dfe", 1),
        ("exact", "\u0131rmak", "IRMAK", 1),
        ("exact", "\uff11\uff12", "12", 1),
        ("exact", "2\u00b2", "22", 0),
        ("exact", "1\u00bd", "11/2", 0),
        ("contains", "a \ufb01ne day", "Fine", 1),
        (ABSENT, "it is Zu\u0308rich", "Z\u00fcrich", 0),
        (ABSENT, "it is 7\u200b431", "7431", 0),
        (ABSENT, "it is 7\u00b2", "72", 1),
        ("rouge_l", "e\u0301 b", "\u00e9 b", 1),
        ("rouge_l", "...", "...", 1),
        ("rouge_l", "a", "...", 0),
        ("code", "    return x", "    return x", 1),
        ("code", "return x", "return x\nreturn y", 1),
        ("code", "x", "# a comment", 0.0),
        ("code", "# a comment", "# a comment", 1),
        (REGEX, "e\u0301", "^\u00e9$", 1),
        (REGEX, "it is 7431", "^(?!.*7431)", 0),
    ],
)
def test_answers_by_hand(metric: str, text: str, answer: str, score: float) -> None:
    """Letters, signs, articles, case and Unicode forms."""
    check_answers(metric, [answer])
    assert grade(metric, text, [answer]) == pytest.approx(score, abs=1e-6)


@pytest.mark.parametrize("pattern", ["a*", "(yes)?", ".*", "^", "(?s)^.*$", "x{0,3}", "a|"])
def test_patterns_that_every_text_matches_are_no_answers(pattern: str) -> None:
    """They are refused; patterns about what an answer lacks are not."""
    with pytest.raises(ValueError, match="every text"):
        check_answers(REGEX, [pattern])
    check_answers(REGEX, [r"^(?!.*secret)", "^$", "^[^0-9]*$", r"^\s*$", "a+"])


def test_rows_with_such_answers_are_set_aside(tmp_path, model) -> None:
    """Each by its line, those in turns included; letters and signs are graded."""
    rows = [{"question": "q", "answers": answer} for answer in ("A", "?", "\u200b", ["B", "\u200b"])]
    rows.append({"question": "q", "answers": "A", "turns": [{"question": "r", "answers": "\u200b"}]})
    (tmp_path / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for metric in ("f1", "exact", "contains", "absent"):
        cfg = {"name": "custom", "file": str(tmp_path / "my.jsonl"), "metric": metric}
        task = load_task(cfg, model, limit=None, seed=0, protocol=None)
        assert [row["line"] for row in task.quarantined] == [3, 4, 5]
        assert all(f"metric={metric}" in row["reason"] for row in task.quarantined)
        for request, answer in zip(task.requests, "A?", strict=True):
            assert task.score(request, answer)["score"] == float(metric != "absent")
            assert task.score(request, "")["score"] == float(metric == "absent")
