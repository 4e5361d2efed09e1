"""Measures: name, key, unit, scale and better direction of each number.

Tables, pictures, comparisons and calibrations all take these from here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvbench.results.record import RunRecord
from kvbench.results.sample import SampleRecord
from kvbench.stats.intervals import Estimate

Path = tuple[str, ...]
SCORE_MARGIN = 0.01  # one point
NATS_MARGIN = 0.05
# Twelve prompts of SmolLM2-135M in batches of 1, 4 and 12 and in either order: no method's NLL moved by more than
# 0.0024 nats per token (diffkv's; the full cache's by 0.00005).
NATS_TOLERANCE = 0.0025
NATS, POINTS, PERCENT_OF_FULL = "nats per token", "points", "% of an FP16 full cache"
OF_ITS_SCORE = "% of the full cache's"
SHARE_MARK = "%"  # at the end of a measure's name: in % of the full cache's

# LongBench's English subsets. The order and the categories are those of its own table 1; the short names are those of
# the tables in SnapKV's and PyramidKV's papers.
# Source: Bai et al. 2023, LongBench, arXiv 2308.14508, table 1.
LONGBENCH = {
    "Single-document QA": {"narrativeqa": "NrtvQA", "qasper": "Qasper", "multifieldqa_en": "MF-en"},
    "Multi-document QA": {"hotpotqa": "HotpotQA", "2wikimqa": "2WikiMQA", "musique": "Musique"},
    "Summarization": {"gov_report": "GovReport", "qmsum": "QMSum", "multi_news": "MultiNews"},
    "Few-shot learning": {"trec": "TREC", "triviaqa": "TriviaQA", "samsum": "SAMSum"},
    "Synthetic": {"passage_count": "PCount", "passage_retrieval_en": "PRe"},
    "Code": {"lcc": "LCC", "repobench-p": "RB-P"},
}
BENCHMARKS = {"longbench": LONGBENCH}
# Name of a measure -> the category whose score it is.
CATEGORIES = {
    "single_doc_qa": "Single-document QA",
    "multi_doc_qa": "Multi-document QA",
    "summarization": "Summarization",
    "few_shot": "Few-shot learning",
    "synthetic": "Synthetic",
    "code": "Code",
}


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number that every sample has, and that a run has over all samples."""

    name: str
    """Its name in the settings of the commands."""
    title: str
    """Its name for people, without the unit."""
    short: str
    """Its name at the head of a narrow column."""
    numerator: Path
    """Keys that lead to the value in a sample's record; to the numerator where there is a denominator."""
    denominator: Path | None = None
    """Keys that lead to the denominator; over several samples the measure is then a sum divided by a sum."""
    in_run: Path | None = None
    """Field of `RunRecord` and the name in it that hold the measure over all samples."""
    unit: str
    """Unit of a shown value."""
    scale: float = 1.0
    """Factor of a value that is shown."""
    higher_is_better: bool = False
    """Direction."""
    bounded: bool = False
    """A score in [0, 1]: no difference is larger than 1, so even samples of which none differs prove something."""
    margin: float = 0.0
    """Largest difference that counts as none where a command does not say otherwise, in the unit of the records."""
    tolerance: float = 0.0
    """Largest difference of a sample that is only numerical noise, in the unit of the records."""
    verdicts: tuple[str, str] = ("worse", "better")
    """Words for a value that is worse, and for one that is better, than another run's."""
    is_fidelity: bool = False
    """Nearness to the full cache. Beside the full cache itself everything is farther away, so only a difference beyond
    the margin says anything."""
    subsets: frozenset[str] = frozenset()
    """The subsets that it is of, as LongBench has them without the ending of LongBench-E; empty for all."""
    of: "Measure | None" = None
    """The score that it shows in % of the full cache's: a mean over a mean of the same samples. None for what is a
    number by itself."""

    @property
    def key(self) -> str:
        """Name of the value in the record."""
        return self.numerator[-1]

    @property
    def csv_name(self) -> str:
        """Name in CSV files: the name in the record, followed by its own for a part or a share."""
        return f"{self.key}:{self.name}" if self.subsets or self.of else self.key

    def is_of(self, record: SampleRecord) -> bool:
        """True for a sample of its subsets."""
        return not self.subsets or plain_subset(record["subset"]) in self.subsets

    @property
    def part(self) -> str:
        """Part of the record that the value is in."""
        return self.numerator[0]

    def above(self, record: SampleRecord) -> float | None:
        """The value of a sample, or its numerator; None where the number was not finite.

        Raises:
            KeyError, TypeError: The record does not have it, or is of another subset.
        """
        if not self.is_of(record):
            raise KeyError(record["subset"])
        return at(record, self.numerator)

    def below(self, record: SampleRecord) -> float | None:
        """The denominator of a sample, 1 without one."""
        return 1.0 if self.denominator is None else at(record, self.denominator)

    def of_run(self, record: RunRecord) -> float | None:
        """The measure over all samples of a run, as `run.json` has it; None where it is missing."""
        if self.in_run is None:
            return None
        part, name = self.in_run
        held = getattr(record, part)
        value = held.get(name) if isinstance(held, dict) else getattr(held, name)
        return value.value if isinstance(value, Estimate) else value


def at(record: SampleRecord, path: Path) -> float | None:
    """Follow keys to the number in a sample's record."""
    value: Any = record  # a path may lead into any part
    for key in path:
        value = value[key]
    return value


# Of shares between 0 and 1, shown in points.
_SHARE: dict[str, Any] = {"unit": POINTS, "scale": 100.0, "bounded": True, "margin": SCORE_MARGIN}
_SHARE["higher_is_better"] = True
_LOWER = {"higher_is_better": False}


# Of scores whose name says nothing to a reader who does not know the task's code.
SCORE_TITLES = {"correct": "problems solved", "plus": "problems solved", "base": "problems solved, original tests"}


def score(name: str = "score", higher_is_better: bool = True) -> Measure:
    """A score of a task."""
    where: dict[str, Any] = {"numerator": ("scores", name), "in_run": ("metrics", name)}
    where |= {"title": SCORE_TITLES.get(name, name), "short": name}
    return Measure(name=name, **where, **(_SHARE | {"higher_is_better": higher_is_better}))


SCORE = score()  # unit and scale of every score


def plain_subset(name: str) -> str:
    """LongBench's name of a subset, of LongBench-E too."""
    return name.removesuffix("_e")


def of_subsets(what: Measure, name: str, title: str, subsets: Iterable[str]) -> Measure:
    """A measure over some subsets, under a name and a title of their own."""
    words = f"{what.title} of {title}"
    only = frozenset(map(plain_subset, subsets))
    return replace(what, name=name, title=words, short=title, subsets=only, in_run=None)


def of_category(what: Measure, task: str, name: str) -> Measure:
    """A score over the subsets of one of `CATEGORIES`; raises KeyError where the task has none."""
    title = CATEGORIES[name]
    return of_subsets(what, name, title, BENCHMARKS[task][title])


def of_full(what: Measure) -> Measure:
    """A score in % of the full cache's, over the same samples."""
    return replace(what, name=f"{what.name}{SHARE_MARK}", unit=OF_ITS_SCORE, of=what, in_run=None)


def _fidelity(name: str, title: str, short: str, key: str, **more: Any) -> Measure:
    """A distance of the answer's probabilities from the full cache's, on the gold answer; in nats by default."""
    nats: dict[str, Any] = {"unit": NATS, "margin": NATS_MARGIN, "tolerance": NATS_TOLERANCE}
    where: dict[str, Any] = {"numerator": ("fidelity", key), "in_run": ("fidelity", key)}
    return Measure(name=name, title=title, short=short, is_fidelity=True, **(where | (more or nats)))


NLL = _fidelity("nll", "gold NLL", "gold NLL", "nll")
KL = _fidelity("kl", "KL to the full cache", "KL to full", "kl_mean")
# Over the tokens that do not copy the prompt: what the answer adds.
KL_NEW = _fidelity("kl_new", "KL to the full cache, tokens not copied", "KL, not copied", "kl_new")
# The tail: the KL that 99 % and 99.9 % of an answer's tokens do not exceed, of answers with at least 100 and 1,000.
KL_99 = _fidelity("kl_99", "KL to the full cache, 99 % of an answer", "KL 99 %", "kl_99")
KL_999 = _fidelity("kl_999", "KL to the full cache, 99.9 % of an answer", "KL 99.9 %", "kl_999")
KL_MAX = _fidelity("kl_max", "KL to the full cache, largest of an answer", "KL max", "kl_max")
# Root mean square over an answer's tokens.
DP = _fidelity("dp", "change of the forced token's probability", "RMS dp", "dp_rms", **(_SHARE | _LOWER))
TOP1 = _fidelity("top1", "same first choice as the full cache", "top 1", "top1_agreement", **_SHARE)
FIDELITY = {measure.name: measure for measure in (NLL, KL, KL_NEW, KL_99, KL_999, KL_MAX, DP, TOP1)}

# Traits of the answers apart from their scores, computed from their tokens as a journal is read.
LENGTH = Measure(
    name="tokens",
    title="tokens of an answer",
    short="tokens",
    numerator=("answer", "tokens"),
    unit="tokens",
    margin=1.0,
    verdicts=("longer", "shorter"),
)
LOOPS = Measure(
    name="loops", title="answers that end in a loop", short="loops", numerator=("answer", "loops"), **(_SHARE | _LOWER)
)
ANSWERS = {measure.name: measure for measure in (LENGTH, LOOPS)}


def _of_full(name: str, title: str, short: str) -> Measure:
    """Bytes of a sample's ledger, as a share of an FP16 full cache of the same tokens."""
    return Measure(
        name=name,
        title=title,
        short=short,
        numerator=("ledger", f"{name}_bytes"),
        denominator=("ledger", "fp16_bytes"),
        in_run=("ledger", f"{name}_ratio"),
        unit=PERCENT_OF_FULL,
        scale=100.0,
    )


# Cache bytes per sample, relative to an FP16 full cache of the same tokens; `run.json` has NAME_bytes and NAME_ratio.
RESIDENT = _of_full("resident", "resident bytes at the end", "resident")
AVERAGE = Measure(
    name="average",
    title="bytes averaged over the answer",
    short="average",
    numerator=("ledger", "average_ratio"),  # every decode step relative to the FP16 cache of that step
    in_run=("ledger", "average_ratio"),
    unit=PERCENT_OF_FULL,
    scale=100.0,
)
PEAK = _of_full("peak", "bytes at the worst moment", "peak")
BYTES = (RESIDENT, AVERAGE, PEAK)
# Of prompts that were read in chunks.
ONE_SHOT_PEAK = _of_full("one_shot_peak", "bytes at the worst moment, had prompts been read at once", "peak at once")
# Of models that have layers of other kinds than those on which a method acts.
FULL_LAYERS = Measure(
    name="full_layers",
    title="bytes of the layers that see everything",
    short="full layers",
    numerator=("ledger", "full_layers_bytes"),
    denominator=("ledger", "full_layers_fp16_bytes"),
    in_run=("ledger", "full_layers_ratio"),
    unit="% of their FP16 cache",
    scale=100.0,
)
# Bytes of the ledger that are sums or something else than an item.
NOT_ITEMS = {"resident_bytes", "average_bytes", "peak_bytes", "one_shot_peak_bytes", "staging_peak_bytes"}
NOT_ITEMS |= {"fp16_bytes", "page_bytes", "total_bytes", "full_layers_bytes", "full_layers_fp16_bytes"}
# Of what reading all that is kept takes; only methods that choose what to read have it.
READ = Measure(
    name="read",
    title="bytes read while decoding",
    short="read",
    numerator=("kept", "read_ratio"),
    in_run=("kept", "read_ratio"),
    unit="%",
    scale=100.0,
)

# Time.
PREFILL = Measure(
    name="prefill",
    title="time to read a prompt",
    short="prefill",
    numerator=("timing", "prefill_s"),
    in_run=("timing", "prefill_s"),
    unit="s",
)
TIME = Measure(
    name="time",
    title="time per generated token",
    short="time",
    numerator=("timing", "decode_share_s"),
    denominator=("timing", "decode_tokens"),
    unit="ms",
    scale=1000.0,
)
RATE = Measure(
    name="rate",
    title="tokens generated per second",
    short="decode",
    numerator=("timing", "decode_tokens"),
    denominator=("timing", "decode_share_s"),
    in_run=("timing", "decode_tokens_per_s"),
    unit="tok/s",
    higher_is_better=True,
)

# A token that is pruned in one list of three counts a third: what is left is 1 / the compression rate of KV-Compress,
# and 100 % less what DiffKV's figure 9 calls pruned. Precisions do not count.
KEPT = Measure(
    name="kept",
    title="tokens kept",
    short="kept",
    numerator=("kept", "slot_ratio"),
    in_run=("kept", "slot_ratio"),
    unit="% of the tokens of all KV heads",
    scale=100.0,
)
COSTS = {measure.name: measure for measure in (*BYTES, TIME, KEPT)}  # what quality can be drawn against
# The same where runs of several models stand together; `kvbench.evidence.model_pool` adds it up.
TOTAL = Measure(
    name="total",
    title="bytes of weights and cache",
    short="weights + cache",
    numerator=("ledger", "total_bytes"),
    unit="MiB",
    scale=2.0**-20,
)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of a method in a measure against the full cache, positive when worse: a criterion of a calibration."""

    measure: Measure
    title: str
    """Its name for people, without the unit."""
    short: str
    """Its name at the head of a narrow column."""
    rule: str
    """Its name in the rule of a calibration, with the unit of the margin."""

    @property
    def scale(self) -> float:
        """Factor of a loss that is shown."""
        return self.measure.scale

    @property
    def unit(self) -> str:
        """Unit of a shown loss."""
        return self.measure.unit


LOSSES = {
    "score": Loss(
        measure=SCORE,  # stands for the task's primary one
        title="score lost to the full cache",
        short="score lost, points",
        rule="points of the task's own score lost to the full cache, as a share",
    ),
    "nll": Loss(
        measure=NLL,
        title="gold NLL above the full cache's",
        short="gold NLL - full's",
        rule="gold NLL above the full cache's, nats per token",
    ),
    "kl": Loss(
        measure=KL, title=KL.title, short=KL.short, rule="KL to the full cache on the gold tokens, nats per token"
    ),
}


def ledger_items(ledger: Mapping[str, float]) -> dict[str, float]:
    """The items that add up to the resident bytes, in the ledger's order, with those that are 0."""
    return {name: count for name, count in ledger.items() if name.endswith("_bytes") and name not in NOT_ITEMS}


def item_title(name: str) -> str:
    """The name of an item for people: `quant_meta_bytes` is `quant meta`."""
    return name.removesuffix("_bytes").replace("_", " ")
