"""DiffKV while decoding: the released rule, every branch of Algorithm 1, random states, and a long simulation."""

import random

import pytest
import torch
from golden_helpers import store_holding
from store_helpers import filled, golden, held_positions, held_scores, plain_attention, random_layer, step_at

from kvbench.methods.diffkv import DiffKV

HIGH, LOW = 0, 1


def sums(states, tokens_seen) -> list:
    """Stored scores of states of means over all later queries."""
    return [tuple({pos: x * (tokens_seen - pos) for pos, x in tier.items()} for tier in state) for state in states]


def stepped(policy, states, tokens_seen):
    """Runs begin_step on states of stored scores; returns per list the sorted positions (high, low)."""
    store, row = store_holding(policy, states, tokens_seen)
    store.begin_step(torch.tensor([row]))
    high, low = held_positions(store, row, HIGH), held_positions(store, row, LOW)
    return [(sorted(h), sorted(x)) for h, x in zip(high, low, strict=True)]


def after_step(policy, states, tokens_seen):
    """The same from states of means over all later queries."""
    return stepped(policy, sums(states, tokens_seen), tokens_seen)


# The golden decode states, with the action that Algorithm 1 as kvbench settles its open points takes. Its candidate is
# token 4 (position 6 - window 2). The golden `action` is the released code's, which has no candidate: (its, Algorithm
# 1's).
GOLDEN_ACTIONS = {
    "ah1_al.2": ("append", "append"),  # candidate .3 stays; argmin token 3 (.2) >= 1/6
    "ah1.5_al.2": ("demote 3 new slot", "demote 3 new slot"),  # candidate .3 >= .25 stays; token 3: .0333 <= .2 < .25
    # Candidate .3 stays; token 3: .1667 <= .2 < .25 is demoted. The code then also looks at the low section and evicts
    # token 2 (.15 < .1667); Algorithm 1 does not look at it again in that step.
    "ah1.5_al1": ("demote 3 over 2", "demote 3 new slot"),
    # Candidate .3 stays; token 3: .2 < T_l = .2167 is pruned. The code demotes it, because a low token is worse still.
    "ah1.5_al1.3": ("demote 3 over 2", "prune 3"),
    "ah1.5_al1.3_low.9": ("prune 3", "prune 3"),
    "code_vs_alg1": ("demote 3 new slot", "demote 4 new slot"),  # candidate .22 < .25 goes down itself
}


@pytest.mark.parametrize("name", GOLDEN_ACTIONS)
def test_golden_decode_states(name):
    """On the golden states the released rule takes the golden action, and Algorithm 1 does what its text says, which is
    not always the same."""
    case = golden("diffkv_decode")[name]
    assert case["action"] == GOLDEN_ACTIONS[name][0]
    alpha_h, alpha_l = {"ah1_al.2": (1, 0.2), "ah1.5_al1": (1.5, 1.0)}.get(name, (1.5, 1.3 if "1.3" in name else 0.2))
    assert [alpha_h / 6, alpha_l / 6] == pytest.approx(case["thr"], abs=1e-6)
    high = {int(t): mean for t, mean in case["high"].items()} | {5: 0.5}  # token 5 is in the window
    low = {int(t): mean for t, mean in case["low"].items()}
    rules = ("released", 4, 4), ("algorithm1", -1, 6)  # name, queries that count, and how many those are at most
    for (rule, queries, most), action in zip(rules, GOLDEN_ACTIONS[name], strict=True):
        policy = DiffKV(alpha_h=alpha_h, alpha_l=alpha_l, window=2, decode_rule=rule, queries=queries)
        state = tuple({t: x * min(6 - t, most) for t, x in tier.items()} for tier in (high, low))
        words, want_high, want_low = action.split(), {*high, 6}, set(low)
        if words[0] != "append":
            want_high.remove(int(words[1]))
        if words[0] == "demote":
            want_low.add(int(words[1]))
            want_low -= {int(words[3])} if words[2] == "over" else set()
        assert stepped(policy, [state], 6) == [(sorted(want_high), sorted(want_low))]


# Algorithm 1 branch by branch: 8 tokens seen, window 2, alpha_h = 2 and alpha_l = 1, so that T_h = .25 and T_l = .125
# exactly, and the candidate is token 6. Each state: high, low, then high and low after the step.
BRANCHES = {
    "candidate pruned, no victim looked for": ({0: 0.6, 3: 0.05, 6: 0.1, 7: 0.5}, {2: 0.01}, [0, 3, 7, 8], [2]),
    "candidate demoted to a new slot": ({0: 0.6, 3: 0.05, 6: 0.2, 7: 0.5}, {2: 0.3}, [0, 3, 7, 8], [2, 6]),
    "candidate demoted into an empty low tier": ({0: 0.6, 6: 0.2, 7: 0.5}, {}, [0, 7, 8], [6]),
    "candidate demoted over a low victim": ({0: 0.6, 6: 0.2, 7: 0.5}, {1: 0.3, 2: 0.1, 4: 0.11}, [0, 7, 8], [1, 4, 6]),
    "candidate stays, high victim pruned": ({0: 0.6, 3: 0.1, 4: 0.2, 6: 0.4, 7: 0.5}, {2: 0.3}, [0, 4, 6, 7, 8], [2]),
    "candidate stays, high victim demoted to a new slot although a low token is worse": (
        {0: 0.6, 3: 0.2, 6: 0.4, 7: 0.5},
        {2: 0.01},
        [0, 6, 7, 8],
        [2, 3],
    ),
    "nobody is under a threshold": ({0: 0.6, 3: 0.3, 6: 0.4, 7: 0.5}, {2: 0.01}, [0, 3, 6, 7, 8], [2]),
    "window tokens are never victims": ({0: 0.6, 6: 0.4, 7: 0.0}, {}, [0, 6, 7, 8], []),
    "at alpha_h / N a token is high": ({0: 0.6, 3: 0.25, 6: 0.25, 7: 0.5}, {}, [0, 3, 6, 7, 8], []),
    "at alpha_l / N a candidate is low, not pruned": ({0: 0.6, 6: 0.125, 7: 0.5}, {2: 0.125}, [0, 7, 8], [2, 6]),
    "at alpha_l / N a high victim is demoted, not pruned": ({0: 0.6, 4: 0.125, 6: 0.5, 7: 0.5}, {}, [0, 6, 7, 8], [4]),
    "no high token leaves the window, so no victim is looked for": ({0: 0.01, 7: 0.5}, {6: 0.1}, [0, 7, 8], [6]),
    "of equal high victims the earlier position goes, not the earlier slot": (
        {4: 0.0625, 0: 0.0625, 5: 0.0625, 6: 0.5, 7: 0.5},
        {},
        [4, 5, 6, 7, 8],
        [],
    ),
    "of equal low victims the earlier position goes": (
        {0: 0.6, 6: 0.2, 7: 0.5},
        {4: 0.0625, 2: 0.0625, 5: 0.0625},
        [0, 7, 8],
        [4, 5, 6],
    ),
}
BRANCH_POLICY = {"alpha_h": 2.0, "alpha_l": 1.0, "window": 2}


def test_all_branches_in_one_step():
    """Different heads take different branches, one state each, in the same step without disturbing each other."""
    got = after_step(DiffKV(**BRANCH_POLICY), [(high, low) for high, low, _, _ in BRANCHES.values()], 8)
    for name, result in zip(BRANCHES, got, strict=True):
        assert result == BRANCHES[name][2:], name


def test_nothing_happens_while_the_window_is_not_full():
    """With fewer tokens than the window nobody leaves it, however low the scores."""
    state = ({0: 0.0, 1: 0.0, 2: 0.0}, {})
    assert after_step(DiffKV(window=4, alpha_h=2, alpha_l=1), [state], 3) == [([0, 1, 2, 3], [])]
    assert after_step(DiffKV(window=3, alpha_h=2, alpha_l=1), [state], 3) == [([1, 2, 3], [])]


def test_demoted_tokens_keep_their_key_value_score_and_position():
    """What was token 6 in the high tier is token 6 in the low tier, and the new token starts from score 0."""
    high, low, _, _ = BRANCHES["candidate demoted over a low victim"]
    store, row = store_holding(DiffKV(**BRANCH_POLICY), sums([(high, low)], 8), 8)
    pages = store.pages.pool.num_used
    store.begin_step(torch.tensor([row]))
    assert store.pages.pool.num_used == pages
    assert held_positions(store, row, LOW) == [[1, 6, 4]]  # the victim's slot was reused
    assert held_scores(store, row, LOW)[0] == pytest.approx({1: 0.3 * 7, 6: 0.2 * 2, 4: 0.11 * 4})
    assert held_positions(store, row, HIGH) == [[0, 8, 7]]
    assert held_scores(store, row, HIGH)[0][8] == 0.0
    label = torch.full((1, 1, 8), 8.0)
    store.attend(0, torch.zeros(1, 1, 8), label, -label, 1.0)
    tiers, _ = store.holding.layer(torch.tensor([row]), 0)
    keys, values, live = store.pages.backend.gather_dense(store.pages.pool.pages, tiers, None)
    assert keys[live][:, 0].tolist() == [0, 8, 7, 1, 6, 4]  # constant vectors survive any number of bits exactly
    assert torch.equal(values[live], -keys[live])


def algorithm_1(high, low, seen, window, alpha_h, alpha_l):
    """Algorithm 1 in plain Python, as the policy docstring states it; returns the new (high, low) positions."""
    t_high, t_low = alpha_h / seen, alpha_l / seen
    high, low, leaving = dict(high), dict(low), seen - window
    old = {t: m for t, m in high.items() if t <= leaving}
    if leaving in high:
        mean = high[leaving]
        if mean < t_low:
            del high[leaving]
        elif mean < t_high:
            victim = min(low, key=lambda t: (low[t], t), default=None)
            if victim is not None and low[victim] < t_low:
                del low[victim]
            low[leaving] = high.pop(leaving)
        else:
            victim = min(old, key=lambda t: (old[t], t))
            if old[victim] < t_low:
                del high[victim]
            elif old[victim] < t_high:
                low[victim] = high.pop(victim)
    return sorted([*high, seen]), sorted(low)


@pytest.mark.parametrize("seed", range(4))
def test_random_states_equal_the_oracle(seed):
    """64 lists with random states over several pages take the step that Algorithm 1 in plain Python takes."""
    rng = random.Random(seed)
    seen, window, states = rng.randint(40, 300), rng.randint(1, 30), []
    for _ in range(64):
        # Multiples of 1/512 make ties frequent, and the division by the count of queries exact.
        least = rng.choice([0, 5, 9])
        mean = {t: rng.randint(least, 12) / 512 for t in range(seen)}
        tokens = list(range(seen - window))
        rng.shuffle(tokens)
        cut = sorted(rng.randint(0, len(tokens)) for _ in range(2))
        high, low = [*tokens[: cut[0]], *range(seen - window, seen)], tokens[cut[0] : cut[1]]
        states.append(({t: mean[t] for t in high}, {t: mean[t] for t in low}))
    alpha_h, alpha_l = 8.5 / 512 * seen, 4.5 / 512 * seen  # between the possible means
    got = after_step(DiffKV(alpha_h=alpha_h, alpha_l=alpha_l, window=window), states, seen)
    assert got == [algorithm_1(high, low, seen, window, alpha_h, alpha_l) for high, low in states]
    changes = {(len(h) - len(s[0]), len(x) - len(s[1])) for (h, x), s in zip(got, states, strict=True)}
    assert changes == {(1, 0), (0, 0), (0, 1)}  # appended; pruned or demoted over a victim; demoted to a new slot


@pytest.mark.parametrize(("queries", "window"), [(-1, 6), ("later", 6), ("later", 1)])
def test_a_long_decode_equals_a_plain_simulation(queries, window):
    """Scores, tiers and attention of 40 steps, lossless tiers, against a loop over Python dicts; with `later` a token's
    own attention is in no sum and no count."""
    num_tokens, alpha_h, alpha_l, scale = 30, 2.5, 1.5, 0.25
    near = int(queries == "later")
    policy = DiffKV(window=window, alpha_h=alpha_h, alpha_l=alpha_l, high="native", low="native", queries=queries)
    q, k, v = random_layer(3, 2, 3, 80, 16)
    q = 2 * q
    store, row = filled(policy, [(q, k, v)], num_tokens, scale)
    score = [s.copy() for s in held_scores(store, row, HIGH)]
    tiers = [(held_positions(store, row, HIGH)[h], held_positions(store, row, LOW)[h]) for h in range(2)]
    for head in range(2):
        score[head] |= held_scores(store, row, LOW)[head]
    for seen in range(num_tokens, num_tokens + 40):
        (out,) = step_at(store, row, [(q, k, v)], seen, scale)
        for head in range(2):
            means = [{t: score[head][t] / max(1, seen - t - near) for t in tier} for tier in tiers[head]]
            tiers[head] = algorithm_1(*means, seen, window, alpha_h, alpha_l)
            held = sorted([*tiers[head][0], *tiers[head][1]])
            group = slice(3 * head, 3 * head + 3)
            prob = torch.softmax(q[group, seen].double() @ k[head, held].double().T * scale, -1).amax(0)
            counted = {t: p if t + near <= seen else 0.0 for t, p in zip(held, prob.tolist(), strict=True)}
            score[head] = {t: score[head].get(t, 0.0) + p for t, p in counted.items()}
            want = plain_attention(q[group, seen], k[head : head + 1, held], v[head : head + 1, held], scale)
            assert (out[group] - want).abs().max() < 1e-5
    for head in range(2):
        assert sorted(held_positions(store, row, HIGH)[head]) == tiers[head][0]
        assert sorted(held_positions(store, row, LOW)[head]) == tiers[head][1]
        stored = held_scores(store, row, HIGH)[head] | held_scores(store, row, LOW)[head]
        assert stored == pytest.approx(score[head], abs=1e-4)
    assert all(len(high) + len(low) < 70 and low for high, low in tiers)


# The released rule ----


@pytest.mark.parametrize(("window", "acts"), [(6, False), (5, True), (64, False)])
def test_released_rule_needs_more_than_a_window_of_tokens(window, acts):
    """The incoming token counted, a list of at most `window` tokens only appends; with one more it acts."""
    policy = DiffKV(alpha_h=100, alpha_l=100, window=window, queries=4, decode_rule="released")
    store, row = store_holding(policy, [({0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4, 4: 0.5}, {})], 20)
    store.counters.prompt_tokens[row] = 2  # long ago: every token was scored by a window of queries
    store.begin_step(torch.tensor([row]))
    held = held_positions(store, row, HIGH)[0] + held_positions(store, row, LOW)[0]
    assert len(held) == (5 if acts else 6)


def test_released_rule_takes_tokens_that_a_window_of_queries_scored():
    """A token is a candidate from its `window`-th query on: of six tokens and a window of two, 0 to 4 are; 5 is not."""
    policy = DiffKV(alpha_h=1.5, alpha_l=0.2, window=2, queries=4, decode_rule="released")
    for lightest, taken in ((4, True), (5, False)):
        high = dict.fromkeys((0, 1, 2, 3, 4, 5), 100.0) | {lightest: 0.0}
        ((held, _),) = stepped(policy, [(high, {})], 6)
        assert (lightest not in held) == taken
