"""Pictures of `kvbench calibrate what=attention`.

Each is made from `Seen` of some prompts, layer by layer, and has its numbers as records for a CSV and one sentence for
the terminal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvbench.show.csv_file import Cell, csv_row
from kvbench.show.picture import BLUE, GREY, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEAVY = 0.2  # share of the tokens that count as heavy hitters
BEHIND = 32  # last tokens of a prompt that stand for an answer
MAPS = 4  # maps in a row
SHADES = "cividis"  # even in brightness
LEAST = 1e-8  # of a score that is drawn on a scale of powers


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One layer of one prompt.

    Args:
        received: fp32 [query heads, tokens] mean attention from the queries that see the token.
        windows: fp32 [windows, query heads, tokens / windows] sums over each part of the queries, of the first tokens.
        critical: fp32 [query heads] share of the tokens that have most of a late query's attention.
        keys, values: fp32 [KV heads, tokens, head dim].
        variance: Over tokens, of the attention accumulated over all queries, as the mean over KV heads.
        mapped: fp32 [tokens, tokens] attention of query by key, the mean over query heads; None unless requested.
        heaviest: int64 [3, query heads, top] the tokens with the most accumulated attention, at the first, the middle
            and the last step of the prompt's end.
    """

    received: Tensor
    windows: Tensor
    critical: Tensor
    keys: Tensor
    values: Tensor
    variance: float
    mapped: Tensor | None
    heaviest: Tensor


Prompts = Sequence[Sequence[Seen]]


@dataclass(frozen=True, kw_only=True)
class Made:
    """A picture before it is drawn: the function for its panels, its numbers, and a sentence."""

    panels: Callable[["Sequence[Axes]"], None]
    size: tuple[float, float]
    """Inches."""
    columns: int
    records: list[dict[str, Cell]]
    said: str
    rows: int = 1

    def draw(self, title: str) -> "Figure":
        """The figure under a title."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=self.size, layout="constrained")
        figure.suptitle(title, fontsize=7)
        self.panels(list(figure.subplots(self.rows, self.columns, squeeze=False).flat))
        return figure


def _plain_powers(axes: "Axes") -> None:
    """A scale of powers whose numbers are no formulas, which pictures do not read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _orders(values: Tensor) -> float:
    """Powers of ten between the 1st and the 99th percentile."""
    low, high = np.quantile(values.clamp(min=LEAST).flatten().numpy(), (0.01, 0.99))
    return float(np.log10(high / low))


def spread(prompts: Prompts, share: float) -> Made:
    """Scores and value norms over their ranks, and how many powers of ten they span in each layer."""
    layers = list(zip(*prompts, strict=True))
    kinds = {
        "attention score": [torch.cat([one.received.flatten() for one in layer]) for layer in layers],
        "value norm": [torch.cat([one.values.norm(dim=-1).flatten() for one in layer]) for layer in layers],
    }
    orders = {name: [_orders(values) for values in by_layer] for name, by_layer in kinds.items()}
    records = [
        csv_row(quantity=name, layer=layer, orders=orders[name][layer], median=float(values.median()))
        for name, by_layer in kinds.items()
        for layer, values in enumerate(by_layer)
    ]

    def panels(axes: "Sequence[Axes]") -> None:
        ranks = np.linspace(0, 1, 200)
        for (name, layers), colour in zip(kinds.items(), (VERMILION, BLUE), strict=True):
            curves = [np.quantile((v / v.median()).clamp(min=LEAST).numpy(), ranks) for v in layers]
            for index, curve in enumerate(curves):
                axes[0].plot(ranks, curve, color=colour, lw=0.5, alpha=0.4, label="" if index else name)
            axes[1].plot(orders[name], color=colour, marker="o", ms=2, lw=1, label=name)
        _plain_powers(axes[0])
        axes[0].set(xlabel="rank, as a share of the tokens", ylabel="relative to the layer's median")
        axes[1].set(xlabel="layer", ylabel="powers of ten from 1 % to 99 %", ylim=(0, None))
        axes[0].set_title("a line for each layer")
        for one in axes:
            one.legend(frameon=False)

    score, norm = (fmean(orders[name]) for name in kinds)
    said = f"scores span {score:.1f} powers of ten from 1 % to 99 % (mean over layers), value norms {norm:.1f}"
    return Made(panels=panels, size=(6.4, 2.6), columns=2, records=records, said=said)


def tokens(prompts: Prompts, share: float) -> Made:
    """The score of every token of the first prompt, in every head."""
    scores = torch.cat([one.received for one in prompts[0]])
    heads = len(prompts[0][0].received)
    records = [
        csv_row(layer=layer, head=head, token=token, score=float(value))
        for layer, one in enumerate(prompts[0])
        for head, row in enumerate(one.received)
        for token, value in enumerate(row)
    ]

    def panels(axes: "Sequence[Axes]") -> None:
        image = axes[0].imshow(
            scores.clamp(min=LEAST).log10().numpy(),
            cmap=SHADES,
            aspect="auto",
            interpolation="nearest",
            vmin=-6,
            vmax=0,
        )
        axes[0].set(xlabel="token of the first prompt", ylabel=f"layer x query head ({heads} a layer)")
        axes[0].figure.colorbar(image, ax=axes[0], label="log10 of the mean attention received")

    top = float((scores > 1 / scores.shape[1]).float().mean())
    said = f"{100 * top:.0f} % of a head's tokens receive more than 1 / tokens from those behind them"
    return Made(panels=panels, size=(6.4, 4.2), columns=1, records=records, said=said)


def critical(prompts: Prompts, share: float) -> Made:
    """The share of tokens that have most of the attention: by layer and head, and by request."""
    shares = np.array([[one.critical.numpy() for one in layers] for layers in prompts])  # [prompts, layers, heads]
    records = [
        csv_row(prompt=prompt, layer=layer, head=head, share_of_tokens=float(shares[prompt, layer, head]))
        for prompt, layer, head in np.ndindex(*shares.shape)
    ]

    def panels(axes: "Sequence[Axes]") -> None:
        image = axes[0].imshow(100 * shares.mean(0).T, cmap=SHADES, aspect="auto", interpolation="nearest", vmin=0)
        axes[0].set(xlabel="layer", ylabel="query head", title="mean over requests")
        axes[0].figure.colorbar(image, ax=axes[0], label=f"% of the tokens for {100 * share:g} % of attention")
        axes[1].boxplot(100 * shares.reshape(len(shares), -1).T, sym="", whis=(5, 95), medianprops={"color": VERMILION})
        axes[1].set(xlabel="request", ylabel="% of the tokens, heads of all layers", ylim=(0, None))
        axes[1].set_title("median, quartiles, 5 % and 95 %")

    low, high = 100 * np.quantile(shares, (0.05, 0.95))
    said = (
        f"{100 * share:g} % of a late query's attention lies on {low:.1f} % to {high:.1f} % of the tokens "
        f"(5 % and 95 % of {shares.size} heads and requests), the median on {100 * np.median(shares):.1f} %"
    )
    return Made(panels=panels, size=(6.4, 2.8), columns=2, records=records, said=said)


def outliers(prompts: Prompts, share: float) -> Made:
    """Mean magnitudes of channels: how far the largest is above the median one by layer, and all of the worst layer."""
    sides = {"keys": "keys", "values": "values"}
    means = {
        name: torch.stack([
            torch.stack([getattr(one, side).abs().mean(1) for one in layer]).mean(0)
            for layer in zip(*prompts, strict=True)
        ])
        for name, side in sides.items()
    }  # [layers, KV heads, channels]  # fmt: skip
    ratios = {name: (ratio.amax(-1) / ratio.median(-1).values) for name, ratio in means.items()}
    records = [
        csv_row(side=name, layer=layer, head=head, largest_of_median=float(ratio[layer, head]))
        for name, ratio in ratios.items()
        for layer, head in np.ndindex(*ratio.shape)
    ]
    layer, head = divmod(int(ratios["keys"].argmax()), ratios["keys"].shape[1])

    def panels(axes: "Sequence[Axes]") -> None:
        for name, colour in zip(sides, (VERMILION, BLUE), strict=True):
            axes[0].plot(ratios[name].amax(1), color=colour, marker="o", ms=2, lw=1, label=name)
        _plain_powers(axes[0])
        axes[0].set(xlabel="layer", ylabel="largest channel / median channel", title="worst head")
        axes[0].legend(frameon=False)
        for one, (name, side) in zip(axes[1:], sides.items(), strict=True):
            image = one.imshow(
                getattr(prompts[0][layer], side)[head].abs().numpy(),
                cmap=SHADES,
                aspect="auto",
                interpolation="nearest",
            )
            one.set(xlabel="channel", ylabel="token", title=f"|{name}|, layer {layer}, KV head {head}")
            one.figure.colorbar(image, ax=one, label="absolute value")

    most = {name: float(ratio.max()) for name, ratio in ratios.items()}
    said = f"the largest channel is {most['keys']:.1f} times the median one in keys, {most['values']:.1f} in values"
    return Made(panels=panels, size=(7.2, 2.8), columns=3, records=records, said=said)


def persistence(prompts: Prompts, share: float) -> Made:
    """Share of the heavy hitters of one part of the queries that are heavy hitters of later parts."""
    shares = np.array([[_persisting(one.windows) for one in layers] for layers in prompts]).mean(0)  # [layers, parts]
    records = [
        csv_row(layer=layer, part=part + 3, share_still_heavy=float(shares[layer, part]))
        for layer, part in np.ndindex(*shares.shape)
    ]

    def panels(axes: "Sequence[Axes]") -> None:
        parts = range(3, 3 + shares.shape[1])
        for line in shares:
            axes[0].plot(parts, 100 * line, color=BLUE, lw=0.5, alpha=0.4)
        axes[0].plot(parts, 100 * shares.mean(0), color=VERMILION, lw=1.5, label="mean over layers")
        axes[0].axhline(100 * HEAVY, color=GREY, ls="--", label="chance")
        axes[0].set(xlabel="eighth of the prompt's queries", ylabel="% still heavy", ylim=(0, 100))
        axes[0].legend(frameon=False)
        image = axes[1].imshow(100 * shares.T, cmap=SHADES, aspect="auto", interpolation="nearest", vmin=0, vmax=100)
        axes[1].set(xlabel="layer", ylabel="eighth of the queries", yticks=range(shares.shape[1]), yticklabels=parts)
        axes[1].figure.colorbar(image, ax=axes[1], label="% still heavy")

    said = (
        f"of the {100 * HEAVY:g} % heaviest of the first tokens by the second eighth of the queries, "
        f"{100 * shares[:, -1].mean():.0f} % are so for the last eighth (chance {100 * HEAVY:g} %)"
    )
    return Made(panels=panels, size=(6.4, 2.6), columns=2, records=records, said=said)


def _persisting(windows: Tensor) -> list[float]:
    """Share of the heavy tokens of the second window that are heavy in each later one.

    From sums [windows, heads, tokens]; the first window sees only some of the tokens.
    """
    count = max(1, round(HEAVY * windows.shape[-1]))
    heavy = torch.zeros_like(windows).scatter_(-1, windows.topk(count, -1).indices, 1.0)
    return [float((heavy[1] * later).sum(-1).mean() / count) for later in heavy[2:]]


def steps(prompts: Prompts, share: float) -> Made:
    """Heaviest tokens of single heads at three steps at the end of the first prompt, and their persistence.

    Persistence is the share of those of the first step that stay among them, over all prompts.
    """
    names = ("first", "middle", "last")
    stays = np.array([[_staying(one.heaviest).numpy() for one in layers] for layers in prompts]).mean(0)
    records = [
        csv_row(layer=layer, head=head, still_at_middle=float(both[0]), still_at_last=float(both[1]))
        for layer, heads in enumerate(stays.transpose(0, 2, 1))
        for head, both in enumerate(heads)
    ]
    first = prompts[0]
    shown = [(layer, head) for layer in sorted({0, len(first) // 2, len(first) - 1}) for head in (0, 1)]
    shown = [(layer, head) for layer, head in shown if head < first[layer].heaviest.shape[1]]
    width = first[0].received.shape[1]

    def panels(axes: "Sequence[Axes]") -> None:
        marks = torch.zeros(3 * len(shown), width)
        for index, (layer, head) in enumerate(shown):
            marks[3 * index : 3 * index + 3].scatter_(1, first[layer].heaviest[:, head], 1.0)
        axes[0].imshow(marks.numpy(), cmap="Greens", aspect="auto", interpolation="nearest", vmin=0, vmax=1.4)
        axes[0].set_yticks([3 * index + 1 for index in range(len(shown))])
        axes[0].set_yticklabels([f"layer {layer}, head {head}" for layer, head in shown])
        for index in range(1, len(shown)):
            axes[0].axhline(3 * index - 0.5, color=GREY, lw=0.5)
        axes[0].set(xlabel="token of the first prompt", title=f"heaviest at the {', '.join(names)} step, from above")
        for line, (name, colour) in enumerate(zip(names[1:], (BLUE, VERMILION), strict=True)):
            axes[1].plot(100 * stays[:, line].mean(-1), color=colour, marker="o", ms=2, lw=1, label=f"{name} step")
        axes[1].set(xlabel="layer", ylabel="% of the first step's, mean over heads", ylim=(0, 105))
        axes[1].legend(frameon=False)

    count, before = first[0].heaviest.shape[2], width - min(BEHIND, width // 2)
    said = (
        f"of the {count} heaviest tokens at the first of the last steps, {100 * stays[:, 1].mean():.0f} % are so at "
        f"the last (mean over layers and heads; chance {100 * count / before:.0f} %)"
    )
    return Made(panels=panels, size=(7.2, 2.8), columns=2, records=records, said=said)


def _staying(heaviest: Tensor) -> Tensor:
    """Share of the first tokens, of int64 [3, heads, k], that are among the second, and the third; fp32 [2, heads]."""
    same = heaviest[1:, :, None, :] == heaviest[0][None, :, :, None]
    return same.any(-1).float().mean(-1)


def maps(prompts: Prompts, share: float) -> Made:
    """Attention of query by key in some layers of the first prompt."""
    mapped = {layer: one.mapped for layer, one in enumerate(prompts[0]) if one.mapped is not None}
    columns, rows = min(MAPS, len(mapped)), -(-len(mapped) // MAPS)
    near = {layer: _near(whole) for layer, whole in mapped.items()}
    records = [
        csv_row(layer=layer, first_token=float(whole[:, 0].mean()), nearest_32=near[layer])
        for layer, whole in mapped.items()
    ]

    def panels(axes: "Sequence[Axes]") -> None:
        for one in axes[len(mapped) :]:
            one.set_visible(False)
        for index, (one, (layer, whole)) in enumerate(zip(axes, mapped.items(), strict=False)):
            shown = whole.masked_fill(torch.ones_like(whole).triu(1) > 0, torch.nan).clamp(min=LEAST).log10().numpy()
            image = one.imshow(shown, cmap=SHADES, interpolation="nearest", vmin=-6, vmax=0)
            one.set(title=f"layer {layer}")
            if index >= len(mapped) - columns:
                one.set_xlabel("key")
            if index % columns == 0:
                one.set_ylabel("query")
        axes[0].figure.colorbar(image, ax=axes, label="log10 of attention, mean over heads", shrink=0.8)

    said = "; ".join(
        f"layer {layer}: {100 * float(whole[:, 0].mean()):.0f} % on the first token, {100 * near[layer]:.0f} % on the "
        "nearest 32"
        for layer, whole in mapped.items()
    )
    return Made(panels=panels, size=(7.6, 0.5 + 1.9 * rows), columns=columns, rows=rows, records=records, said=said)


def _near(whole: Tensor) -> float:
    """Mean attention to the last 32 tokens, of the queries that have more before them."""
    return float(whole.triu(-31)[32:].sum(1).mean()) if len(whole) > 32 else 1.0


def variance(prompts: Prompts, share: float) -> Made:
    """Variance of the accumulated attention by layer."""
    values = np.array([[one.variance for one in layers] for layers in prompts])
    records = [
        csv_row(prompt=prompt, layer=layer, variance=float(values[prompt, layer]))
        for prompt, layer in np.ndindex(*values.shape)
    ]

    def panels(axes: "Sequence[Axes]") -> None:
        axes[0].bar(range(values.shape[1]), values.mean(0), color=BLUE, label="mean over prompts")
        for line in values:
            axes[0].plot(line, color=VERMILION, ls="", marker=".", ms=2)
        _plain_powers(axes[0])
        axes[0].set(xlabel="layer", ylabel="variance over tokens of accumulated attention")
        axes[0].set_title("bars: mean over prompts; points: each prompt")

    mean = values.mean(0)
    said = (
        f"the variance of accumulated attention is largest in layer {mean.argmax()} ({mean.max():.3g}) and smallest in "
        f"layer {mean.argmin()} ({mean.min():.3g})"
    )
    return Made(panels=panels, size=(5.2, 2.6), columns=1, records=records, said=said)


FIGURES: dict[str, Callable[[Prompts, float], Made]] = {
    each.__name__: each for each in (spread, tokens, critical, outliers, persistence, steps, maps, variance)
}
