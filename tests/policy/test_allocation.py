"""How lists share a budget, against the same choices in plain loops."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from store_helpers import prefill_view

from kvbench.errors import NotForModel
from kvbench.policy import Scored, ScoreSpec, read_table, shares_by_score, shares_by_table
from kvbench.runs.verdict import complaint

LAYERS, HEADS, LENGTH = 3, 2, 29
WEIGHTS = [[4.0, 1.0], [0.0, 2.0], [1.0, 8.0]]


class Plain(Scored):
    """Ranks by whatever score a view has."""

    first, last = 0, 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rank_by(ScoreSpec(prefill_queries=-1))

    def always(self, budget):
        return self.first, self.last


class Windowed(Plain):
    """The same with two first and three last tokens."""

    first, last = 2, 3


def views(policy, score, extra=None):
    """The views that the cache would make of scores [L, H, N]: all layers at once, or one after the other."""
    together = [torch.arange(len(score))] if policy.scope == "model" else torch.arange(len(score))[:, None]
    for own in together:
        more = {name: value[own] for name, value in (extra or {}).items()}
        yield prefill_view(
            score[own].clone(), score.shape[-1], score.shape[1], layers=own, num_layers=len(score), extra=more
        )


def kept(policy, score, extra=None) -> list[list[list[int]]]:
    """Positions that a policy keeps, per layer and head."""
    plans = [policy.plan_prefill(view).tier_of for view in views(policy, score, extra)]
    return [[(head >= 0).nonzero()[:, 0].tolist() for head in layer] for layer in torch.cat(plans)]


def rounded(exact: list[Fraction], total: int) -> list[int]:
    """Floors, then one more for the largest remainders, the first ones of equal."""
    found = [int(x) for x in exact]
    order = sorted(range(len(exact)), key=lambda i: (found[i] - exact[i], i))
    for index in order[: total - sum(found)]:
        found[index] += 1
    return found


def by_counts(scores: list[list[float]], mean: int, alpha: Fraction) -> list[int]:
    """Ada-KV in loops: how many of the best tokens of some lists each of them has, with a floor."""
    best = sorted((-x, own, at) for own, row in enumerate(scores) for at, x in enumerate(row))[: mean * len(scores)]
    counts = [sum(own == index for _, own, _ in best) for index in range(len(scores))]
    return rounded([count * (1 - alpha) + mean * alpha for count in counts], mean * len(scores))


def oracle(policy, score, budget: int) -> list[list[list[int]]]:
    """The kept positions in loops over layers, heads and tokens, for every allocation but pyramids."""
    first, last = policy.first, policy.last
    free = range(first, LENGTH - last)
    mean, alpha = budget - first - last, Fraction(str(policy.alpha))
    rows = [[[float(score[layer, head, p]) for p in free] for head in range(HEADS)] for layer in range(LAYERS)]
    reserve = int(first + last == 0)  # every list begins with its best token
    rest = [[sorted(row, reverse=True)[reserve:] for row in layer] for layer in rows]
    if policy.allocation == "uniform":
        own = [[mean] * HEADS] * LAYERS
    elif policy.allocation == "ada":
        own = [[reserve + x for x in by_counts(layer, mean - reserve, alpha)] for layer in rest]
    elif policy.allocation == "global":
        flat = by_counts([row for layer in rest for row in layer], mean - reserve, alpha)
        own = [[reserve + x for x in flat[layer * HEADS : (layer + 1) * HEADS]] for layer in range(LAYERS)]
    else:
        flat = [Fraction(x) for row in WEIGHTS for x in row]
        mixed = [alpha * sum(flat) / len(flat) + (1 - alpha) * x for x in flat]
        total, cap, shares = (mean - reserve) * len(flat), len(free) - reserve, [None] * len(flat)
        while None in shares:  # a share above what there is goes to the others
            open_lists = [i for i, x in enumerate(shares) if x is None]
            left, weight = total - sum(x or 0 for x in shares), sum(mixed[i] for i in open_lists)
            exact = [mixed[i] * left / weight if weight else Fraction(left, len(open_lists)) for i in open_lists]
            full = [i for i, x in zip(open_lists, exact, strict=True) if x >= cap]
            for i, x in zip(open_lists, rounded(exact, left), strict=True):
                shares[i] = cap if i in full else None if full else x
        own = [[reserve + x for x in shares[layer * HEADS : (layer + 1) * HEADS]] for layer in range(LAYERS)]
    found = []
    for layer in range(LAYERS):
        found.append([])
        for head in range(HEADS):
            order = sorted(range(len(free)), key=lambda i: (-rows[layer][head][i], i))
            chosen = [free[i] for i in order[: own[layer][head]]]
            found[-1].append(sorted([*range(first), *chosen, *range(LENGTH - last, LENGTH)]))
    return found


@pytest.mark.parametrize("kind", [Plain, Windowed])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.37, 1.0])
@pytest.mark.parametrize("allocation", ["uniform", "ada", "global", "table"])
def test_an_allocation_keeps_what_loops_keep(allocation, alpha, kind):
    """Seven budgets from the smallest to nearly all: the kept tokens of every head, and their total is the budget."""
    table = WEIGHTS if allocation == "table" else None
    for budget in (1, 2, 5, 6, 11, 20, 28):
        torch.manual_seed(budget)
        score = torch.rand(LAYERS, HEADS, LENGTH) * torch.tensor([[1.0, 0.5], [2.0, 0.1], [1.0, 3.0]])[..., None]
        if budget <= kind.first + kind.last:
            continue
        policy = kind(allocation=allocation, alpha=alpha, budget=budget, table=table)
        found = kept(policy, score)
        assert found == oracle(policy, score, budget)
        assert sum(len(head) for layer in found for head in layer) == budget * LAYERS * HEADS
        assert min(len(head) for layer in found for head in layer) >= 1


@pytest.mark.parametrize("allocation", ["pyramid", "ada_pyramid"])
@pytest.mark.parametrize("kind", [Plain, Windowed])
def test_a_pyramid_falls_from_layer_to_layer_and_keeps_the_budget(allocation, kind):
    """Lower layers never keep less, nobody keeps nothing, and the total is the budget; within a layer `pyramid` gives
    every head as much."""
    for budget in (1, 6, 9, 14, 28):
        if budget <= kind.first + kind.last:
            continue
        found = kept(kind(allocation=allocation, beta=3, budget=budget), torch.rand(LAYERS, HEADS, LENGTH))
        layers = [sum(map(len, layer)) for layer in found]
        assert sum(layers) == budget * LAYERS * HEADS and layers == sorted(layers, reverse=True)
        assert min(len(head) for layer in found for head in layer) >= 1
        if allocation == "pyramid":
            assert all(len({len(head) for head in layer}) == 1 for layer in found)
    assert layers[0] == layers[-1]  # nearly everything leaves no room for a pyramid


def test_a_pyramid_is_as_steep_as_the_paper_s_unless_told_otherwise():
    """PyramidKV's beta is 20, and one more or less gives other layers."""
    score = torch.rand(LAYERS, HEADS, 4000)
    shapes = [
        [len(layer[0]) for layer in kept(Plain(allocation="pyramid", budget=1000, **beta), score)]
        for beta in ({}, {"beta": 20}, {"beta": 19}, {"beta": 21})
    ]
    assert shapes[0] == shapes[1] and shapes[0] not in shapes[2:]


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=6), st.integers(0, 5))
def test_shares_of_ties_are_those_of_loops(rows, base):
    """Equal scores go to the lower list and then to the lower position, whatever the groups; the sum is exact."""
    score = torch.tensor(rows, dtype=torch.float32)
    both = torch.stack([score, score.flip(0)])
    found = shares_by_score(both, torch.tensor([base, base]), 0.25)
    for own, lists in zip(found.tolist(), (rows, rows[::-1]), strict=True):
        assert own == by_counts(lists, base, Fraction(1, 4)) and sum(own) == base * len(rows)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    st.integers(0, 20),
    st.sampled_from((0.0, 0.2, 1.0)),
)
def test_shares_by_table_keep_total_and_room(weights, base, alpha):
    """No list gets more than there is, and the total is the budget; what no weight claims goes to all."""
    found = shares_by_table(torch.tensor([weights], dtype=torch.float64), base, 20, alpha)[0].tolist()
    assert sum(found) == base * len(weights) and max(found) <= 20
    if alpha == 1.0:
        assert max(found) - min(found) <= 1


def test_chunks_stay_or_go_together():
    """Of chunks of four, ranked by their means, each head keeps whole ones and at most one in part."""
    torch.manual_seed(3)
    score = torch.rand(LAYERS, HEADS, LENGTH)
    for layer, heads in enumerate(kept(Windowed(budget=15, chunk=4), score)):
        for head, found in enumerate(heads):
            chunks = [list(range(a, min(a + 4, 26))) for a in range(2, 26, 4)]
            order = sorted(chunks, key=lambda own: (-float(score[layer, head, own].mean()), own))
            want = [p for own in order for p in own][:10]
            assert found == sorted([0, 1, *want, 26, 27, 28])


@pytest.mark.parametrize("allocation", ["uniform", "ada", "global", "pyramid"])
def test_a_value_aware_choice_has_the_counts_of_a_plain_one(allocation):
    """Half of each head's tokens go by the score, the others by the score times the norm; negative scores count from
    the smallest of their head."""
    torch.manual_seed(4)
    score = torch.randn(LAYERS, HEADS, LENGTH)
    norm = torch.rand(LAYERS, HEADS, LENGTH)
    plain = kept(Windowed(budget=13, allocation=allocation), score)
    found = kept(Windowed(budget=13, allocation=allocation, value_aware=True), score, {"norm": norm})
    assert found != plain
    mean = score / LENGTH  # a sum over all queries
    for layer in range(LAYERS):
        for head in range(HEADS):
            free, count = range(2, 26), len(plain[layer][head]) - 5
            own = {p: float(mean[layer, head, p] - mean[layer, head, 2:26].min()) for p in free}
            one = sorted(free, key=lambda p: -own[p])[: count // 2]
            worth = {p: (own[p] + 1e-4) * float(norm[layer, head, p]) for p in free if p not in one}
            two = sorted(worth, key=lambda p: -worth[p])[: count - len(one)]
            assert found[layer][head] == sorted([0, 1, *one, *two, 26, 27, 28])


def test_a_threshold_keeps_what_reaches_it():
    """Tokens with at least 0.02 per query, the best one of a head that has none, and what always stays."""
    torch.manual_seed(5)
    score = torch.rand(LAYERS, HEADS, LENGTH)
    score[1, 1] *= 0.01
    for kind in (Plain, Windowed):
        policy = kind(budget=None, threshold=0.02)
        for layer, heads in enumerate(kept(policy, score)):
            for head, found in enumerate(heads):
                own = score[layer, head] / LENGTH
                always = {*range(policy.first), *range(LENGTH - policy.last, LENGTH), int(own.argmax())}
                assert found == [p for p in range(LENGTH) if own[p] >= 0.02 or p in always]
        assert complaint(policy, {"kept": {"lists": 1}}) is None


def test_a_table_has_the_model_s_shape(tmp_path):
    """A missing or a foreign table is refused for a model; a file gives what the list gives, also for query heads."""
    for table in (None, [[1.0, 2.0]]):
        with pytest.raises(NotForModel, match=r"the model has 3 layers x 2 KV heads; give allocation=table"):
            Plain(allocation="table", table=table).check_model(3, 2)
    path = tmp_path / "weights.tsv"
    path.write_text("\n".join("\t".join(map(str, row)) for row in WEIGHTS))
    policy = Plain(allocation="table", table=str(path), budget=9)
    policy.check_model(3, 2)
    assert policy.table == read_table(WEIGHTS) and policy == Plain(allocation="table", table=WEIGHTS, budget=9)
    copies = torch.rand(LAYERS, 4, LENGTH)
    counts = [[len(head) for head in layer] for layer in kept(policy, copies)]
    assert sum(map(sum, counts)) == 9 * LAYERS * 4
    assert all(abs(a - b) <= 1 and abs(c - d) <= 1 for a, b, c, d in counts)
