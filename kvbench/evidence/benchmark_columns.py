"""Subsets of a benchmark as papers print them: their order, short names and categories."""

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


def subsets_of(task: str, there: list[str]) -> list[str]:
    """The columns of a task: all subsets of a benchmark that is known, in its own order, else those that some run
    has."""
    known = [name for part in BENCHMARKS.get(task, {}).values() for name in part]
    if there and {_plain(name) for name in there} <= set(known):
        extended = all(name.endswith("_e") for name in there)
        # LongBench-E has no narrativeqa, musique and qmsum, and its columns are not LongBench's.
        return known if not extended else [f"{name}_e" for name in known if f"{name}_e" in there]
    return there


def title_of(task: str, subset: str) -> str:
    """The short name that papers give a subset, or its own."""
    for part in BENCHMARKS.get(task, {}).values():
        if _plain(subset) in part:
            return part[_plain(subset)] + ("-E" if subset.endswith("_e") else "")
    return subset


def category_of(task: str, subset: str) -> str:
    """The category that the benchmark's paper puts a subset in; the subset itself where there is none."""
    for name, part in BENCHMARKS.get(task, {}).items():
        if _plain(subset) in part:
            return name
    return subset


def _plain(subset: str) -> str:
    return subset.removesuffix("_e")
