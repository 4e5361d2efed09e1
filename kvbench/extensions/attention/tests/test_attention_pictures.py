"""Pictures of attention: every number against single weights of the model's own attention."""

import pytest
import torch
from engine_helpers import random_tokens

from kvbench.extensions.attention import attention
from kvbench.extensions.attention.attention import Attention, critical_tokens, measure, steps_of
from kvbench.extensions.attention.figures import FIGURES, _persisting, _staying


@pytest.fixture
def looked(tiny_model):
    """A tiny model, two prompts of odd lengths, what was seen of them, and the model's own attention."""
    loaded, prompts = tiny_model(), [random_tokens(37), random_tokens(50, seed=1)]
    measured = measure(loaded, prompts, Attention(share=0.9, mapped=frozenset({0, 1}), top=5))
    model = loaded.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([one]), output_attentions=True).attentions for one in prompts]
    model.set_attn_implementation(before)
    return prompts, measured, expected


@pytest.mark.smoke
def test_what_is_seen_is_the_models_attention(looked, monkeypatch):
    """Received, accumulated, mapped and critical, layer by layer, and the same in blocks of few queries."""
    prompts, measured, of_model = looked
    assert all(seen.heaviest.shape[-1] == 5 for layers in measured for seen in layers)
    for prompt, layers, weights in zip(prompts, measured, of_model, strict=True):
        n = len(prompt)
        late = [i for i in range(n) if i * attention.WINDOWS // n == attention.WINDOWS - 1]
        for seen, whole in zip(layers, weights, strict=True):
            whole = whole[0]  # [query heads, queries, keys]
            received = whole.sum(1) / torch.arange(n, 0, -1)
            torch.testing.assert_close(seen.received, received, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(seen.mapped, whole.mean(0), atol=1e-6, rtol=1e-4)
            assert seen.windows.shape == (attention.WINDOWS, len(whole), n // attention.WINDOWS)
            first = [i for i in range(n) if i * attention.WINDOWS // n == 1]
            expected = whole[:, first, : n // attention.WINDOWS].sum(1)
            torch.testing.assert_close(seen.windows[1], expected, atol=1e-5, rtol=1e-4)
            ends = (n - n // 2 + 1, n - n // 2 + n // 4, n) if n < 64 else (n - 31, n - 16, n)
            for end, heaviest in zip(ends, seen.heaviest, strict=True):
                sums = whole[:, :end, : ends[0] - 1].sum(1)
                assert (sums.gather(1, heaviest).amin(1) >= sums.sort(descending=True)[0][:, 4] - 1e-4).all()
            variance = whole.sum(1).view(2, -1, n).sum(1).var(-1, correction=0).mean()
            assert seen.variance == pytest.approx(float(variance), rel=1e-3)
            counts = [
                [fewest(row.tolist(), 0.9) / (i + 1) for i, row in enumerate(head) if i in late] for head in whole
            ]
            torch.testing.assert_close(seen.critical, torch.tensor(counts).mean(1), atol=1e-5, rtol=1e-5)


def fewest(row, share):
    """The fewest weights that have a share together, one after the other."""
    total, count = 0.0, 0
    for weight in sorted(row, reverse=True):
        if total >= share:
            break
        total, count = total + weight, count + 1
    return count


def test_blocks_of_queries_change_nothing(tiny_model, monkeypatch):
    """A block may be a single query."""
    loaded, prompts = tiny_model(), [random_tokens(33)]
    (whole,) = measure(loaded, prompts, Attention(mapped=frozenset({0, 1})))
    monkeypatch.setattr(attention, "MOST_NUMBERS", 1)
    (single,) = measure(loaded, prompts, Attention(mapped=frozenset({0, 1})))
    for one, other in zip(whole, single, strict=True):
        for name in ("received", "windows", "critical", "mapped"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=1e-6, rtol=1e-5)


def test_critical_tokens_and_persistence_by_hand():
    """All on one token, all alike, and a share that none reaches; heavy hitters that stay, that go, and by chance."""
    rows = torch.tensor([[1.0, 0, 0, 0], [0.25] * 4, [0.5, 0.3, 0.2, 0.0]])
    assert critical_tokens(rows, 0.75).tolist() == [1, 3, 2]
    assert critical_tokens(rows, 1.0).tolist()[:1] == [1] and critical_tokens(0.5 * rows, 0.9).tolist() == [4, 4, 4]
    windows = torch.zeros(4, 1, 10)
    windows[:, 0, :2] = 1.0
    windows[3] = windows[3].flip(-1)
    assert _persisting(windows) == [1.0, 0.0]
    heaviest = torch.tensor([[[3, 1]], [[1, 3]], [[5, 3]]])
    assert _staying(heaviest).tolist() == [[1.0], [0.5]]
    assert steps_of(100) == (69, 84, 100) and steps_of(64) == (33, 48, 64) and steps_of(17) == (10, 13, 17)


@pytest.mark.parametrize("name", sorted(FIGURES))
@pytest.mark.smoke
def test_every_picture(looked, name):
    """It is drawn under its title, and its records are finite numbers by layer."""
    _, measured, _ = looked
    made = FIGURES[name](measured, 0.9)
    assert made.records and made.said and all(value == value for row in made.records for value in row.values())
    figure = made.draw("tiny $1")
    assert figure.get_suptitle() == "tiny $1" and len(figure.axes) >= made.columns
    assert {row["layer"] for row in made.records} <= set(range(2))
