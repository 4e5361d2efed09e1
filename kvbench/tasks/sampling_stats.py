"""Statistics of several answers to one problem: avg@n, pass@k and maj@k with intervals, and how the answers ended."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from fractions import Fraction
from math import comb
from statistics import fmean

from kvbench.engine.requests import FLAGS
from kvbench.stats.intervals import estimate
from kvbench.stats.repetition import ends_in_loop

BOUNDS = (0.0, 1.0)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that at least one of k answers, drawn from those at hand without putting back, is right.

    Raises:
        ValueError: k is not between 1 and num_samples, or there are more right answers than answers.

    Source: Chen et al. 2021 (arXiv 2107.03374), equation 1.
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(
            f"pass@{k} cannot be computed from {num_right} right answers of {num_samples}; k must lie in "
            f"1..{num_samples}"
        )
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def maj_at_k(right: int, wrong: Sequence[int], silent: int, k: int) -> float:
    """Chance that the right answer wins the vote of k answers, drawn from those at hand without putting back.

    Exact, over all draws. Of answers with equally many votes one is drawn by lot; nothing wins where nobody votes.

    Args:
        right: Right answers at hand; they vote for the same, however they are written.
        wrong: Votes for each of the wrong answers.
        silent: Answers that do not vote.
        k: Answers drawn, between 1 and all of them.

    Source: Wang et al. 2023 (arXiv 2203.11171), majority vote; papers of thinking models print it as cons@k.
    """
    total = right + sum(wrong) + silent
    if not 1 <= k <= total:
        raise ValueError(f"maj@{k} cannot be computed from {total} answers; k must lie in 1..{total}")
    won = Fraction(0)
    for votes in range(1, min(k, right) + 1):
        # Answers with fewer votes than the right one in every draw are drawn freely; the others have `votes` at most.
        free = silent + sum(count for count in wrong if count < votes)
        draws = {(0, 0): 1}  # (answers drawn, ties with the right one) -> ways
        for count in (count for count in wrong if count >= votes):
            grown: dict[tuple[int, int], int] = {}
            for (drawn, ties), ways in draws.items():
                for more in range(min(votes, k - votes - drawn) + 1):
                    key = (drawn + more, ties + (more == votes))
                    grown[key] = grown.get(key, 0) + ways * comb(count, more)
            draws = grown
        for (drawn, ties), ways in draws.items():
            won += Fraction(comb(right, votes) * ways * comb(free, k - votes - drawn), ties + 1)
    return float(won / comb(total, k))


def sampling_statistics(
    records: Iterable[dict],
    metric: str,
    *,
    sizes: Sequence[int] | None = None,
    vote: Callable[[dict], str | None] | None = None,
) -> dict:
    """avg@n, pass@k and maj@k of a yes-or-no metric over problems that were answered several times.

    Args:
        records: Journal records.
        metric: A metric of the values 0 and 1.
        sizes: The k; those above n are left out. None takes 1, 2, 4, ... and n.
        vote: Record -> what its answer votes for, None for nothing; without it there is no maj@k.

    Returns:
        `num_samples` (n), `num_problems`, `num_incomplete` (left out: an answer failed), and `avg@n`, `pass@k`, `maj@k`
        as estimates with 95 % intervals over problems. Empty when every problem has one answer.
    """
    right: dict[str, list[float]] = {}
    subset_of: dict[str, str] = {}
    repeats: dict[str, int] = {}
    answers: dict[str, list[dict]] = {}
    for record in records:
        key = record["sample_id"]
        subset_of[key] = record["subset"]
        repeats[key] = max(repeats.get(key, 0), record.get("repeat", 0) + 1)
        right.setdefault(key, [])
        if record.get("status", "ok") == "ok":
            right[key].append(record["scores"][metric])
            answers.setdefault(key, []).append(record)
    n = max(repeats.values(), default=0)
    if n < 2:
        return {}
    whole = {key: values for key, values in right.items() if len(values) == n}
    result: dict = {"num_samples": n, "num_problems": len(whole), "num_incomplete": len(right) - len(whole)}

    def over_problems(values: dict[str, float]) -> dict:
        strata: dict[str, list[float]] = {}
        for key, value in values.items():
            strata.setdefault(subset_of[key], []).append(value)
        return asdict(estimate(strata, bounds=BOUNDS))

    result[f"avg@{n}"] = over_problems({key: fmean(values) for key, values in whole.items()})
    ballots = {
        key: [(record["scores"][metric] == 1, vote(record)) for record in answers[key]]
        for key in whole
        if vote is not None
    }
    powers = {1 << power for power in range(n.bit_length()) if 1 << power <= n} | {n}
    for k in sorted(powers if sizes is None else {k for k in sizes if k <= n}):
        result[f"pass@{k}"] = over_problems({key: pass_at_k(n, round(sum(v)), k) for key, v in whole.items()})
        if vote is not None:
            result[f"maj@{k}"] = over_problems({key: _majority(ballots[key], k) for key in whole})
    return result


def _majority(ballots: Sequence[tuple[bool, str | None]], k: int) -> float:
    """`maj_at_k` of the answers to one problem: whether each is right, and what it votes for."""
    wrong = Counter(answer for is_right, answer in ballots if not is_right and answer is not None)
    right = sum(is_right for is_right, _ in ballots)
    return maj_at_k(right, list(wrong.values()), len(ballots) - right - wrong.total(), k)


def answer_statistics(records: Iterable[dict]) -> dict:
    """Count how the answers ended.

    `num_answers`, `mean_tokens` (None without answers), `cut_share`, `loop_share`, `num_unparsed`, `num_fallback`,
    `num_out_of_time`, `num_several`.

    `cut_share` were ended by the length limit, `loop_share` end in a loop (`ends_in_loop`); `num_unparsed` and the
    numbers of flags are there for tasks that count it. Records without a `finish` are left out; nothing is counted
    where choices were scored.
    """
    records = list(records)
    if any("choices" in record for record in records):
        return {}
    rows = [record for record in records if record.get("status", "ok") == "ok" and record.get("finish")]
    answers = [answer for row in rows for answer in (*row.get("turns", ()), row)]  # those of a conversation, too
    result: dict = {
        "num_answers": len(answers),
        "mean_tokens": fmean(len(answer.get("token_ids") or ()) for answer in answers) if answers else None,
        "cut_share": fmean(answer["finish"] == "length" for answer in answers) if answers else None,
        "loop_share": fmean(ends_in_loop(answer.get("token_ids") or ()) for answer in answers) if answers else None,
    }
    flags = Counter(flag for row in rows for flag in row.get("flags", ()))
    if any("parsed" in row["scores"] for row in rows):
        result["num_unparsed"] = sum(row["scores"].get("parsed") == 0 for row in rows)
        flags.update(dict.fromkeys(FLAGS, 0))
    return result | {f"num_{flag}": count for flag, count in sorted(flags.items())}
