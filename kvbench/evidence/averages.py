"""The mean over groups of the methods that were run on all of them.

Groups may ask the same questions: under other seeds, protocols or lengths. So questions are resampled, not rows: all
answers to one question, a task's sample id, stay together, and n is the number of distinct questions.
"""

from collections.abc import Sequence

import numpy as np

from kvbench.evidence.costs import Cost, cost_interval
from kvbench.evidence.frontier import Panel, Point, Question, score_interval, set_quality
from kvbench.results.measures import COSTS
from kvbench.stats.strata import Strata


def averages(panels: Sequence[Panel]) -> list[Panel]:
    """Average the groups of each model and version of the code, every group with the same weight.

    Args:
        panels: The groups' panels; they get a note where they are not averaged because their code differs.

    Returns:
        Panels with the points that all of their groups have; none where there are fewer than two of those, or where
        the groups measure different things.
    """
    kins: dict[str, list[Panel]] = {}
    for panel in panels:
        kins.setdefault(panel.kin, []).append(panel)
    if len(kins) > 1:
        for panel in panels:
            panel.notes.append("no mean over groups of different models or versions of the code is taken")
    found = []
    for kin, members in kins.items():
        if len(members) > 1 and len({(panel.what.scale, panel.what.higher_is_better) for panel in members}) == 1:
            title = f"mean over {len(members)} groups with {kin.partition(',')[0]}"
            found.append(_average(title, members))
    return [panel for panel in found if len(panel.points) > 1]


def _average(title: str, panels: Sequence[Panel]) -> Panel:
    found = {point.key: [other for panel in panels if (other := panel.find(point.key))] for point in panels[0].points}
    shared = {key: points for key, points in found.items() if len(points) == len(panels)}
    references = {panel.reference for panel in panels}
    questions = [panel.questions for panel in panels]
    first = panels[0]
    result = Panel(
        title=title,
        kin=first.kin,
        what=first.what,
        points=[_point(points, questions) for points in shared.values()],
        questions=_joined(questions),
        total=len({question for panel in panels for part in panel.questions for question in part}),
        reference=first.reference if len(references) == 1 and first.reference in shared else None,
        margin=first.margin,
        resamples=first.resamples,
        seed=first.seed,
    )
    for point in result.points:
        point.score_interval = score_interval(point.scores, result.what)
    set_quality(result)
    result.notes.append(f"over: {'; '.join(panel.title for panel in panels)}")
    rows = sum(panel.num_samples for panel in panels)
    if rows > result.num_samples:
        result.notes.append(
            f"{result.num_samples} distinct questions in {rows} answers: the groups share questions, which were "
            "resampled together"
        )
    return result


def _joined(groups: Sequence[list[list[Question]]]) -> list[list[Question]]:
    """The distinct questions of some groups, in strata of task and subset."""
    strata: dict[tuple[str, str], dict[Question, None]] = {}
    for group in groups:
        for members in group:
            for question in members:
                strata.setdefault(question[:2], {})[question] = None
    return [sorted(strata[name]) for name in sorted(strata)]


def together(questions: Sequence[list[list[Question]]], values: Sequence[Strata]) -> Strata:
    """What each distinct question adds to the mean of some groups' weighted means.

    Args:
        questions: Of each group, those of each of its subsets.
        values: Of each group, a value for each question.

    Returns:
        Subsets of task and subset name, whose weighted mean is the mean of the groups' means. A question that is not in
        every group adds what it has.
    """
    joined = _joined(questions)
    place = {question: (index, row) for index, members in enumerate(joined) for row, question in enumerate(members)}
    sums = [np.zeros(len(members)) for members in joined]
    weights = np.zeros(len(joined))
    for group, strata in zip(questions, values, strict=True):
        for members, own, weight in zip(group, strata.values, strata.weights, strict=True):
            index, share = place[members[0]][0], weight / len(questions)
            rows = [place[question][1] for question in members]
            weights[index] += share
            sums[index] += share * own.mean()
            sums[index][rows] += share * (len(joined[index]) / len(own)) * (own - own.mean())
    # Rounded, so that four equal answers of yes are a yes.
    return Strata(tuple(np.round(s / w, 12) for s, w in zip(sums, weights, strict=True)), tuple(weights.tolist()))


def _point(parts: Sequence[Point], questions: Sequence[list[list[Question]]]) -> Point:
    costs = {}
    for name in COSTS:
        held = [part.costs[name] for part in parts if name in part.costs]
        if len(held) < len(parts):
            continue
        value = float(np.mean([cost.value for cost in held]))
        known = [cost.shares for cost in held if cost.shares is not None]
        shares = together(questions, known) if len(known) == len(held) else None
        costs[name] = Cost(value=value, interval=cost_interval(shares) if shares else None, shares=shares)
    return Point(
        key=parts[0].key,
        label=parts[0].label,
        method=parts[0].method,
        family=parts[0].family,
        scores=together(questions, [part.scores for part in parts]),
        score_interval=None,
        quality=0.0,
        interval=None,
        costs=costs,
        names=[name for part in parts for name in part.names],
    )
