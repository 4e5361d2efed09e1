"""The sweep behind docs/reference/results.md; run again, it goes on where it was ended.

    python results/example/study.py FOLDER [LENGTH ...]

200 questions of four kinds that kvbench makes itself: 140 in 512 tokens, and 60 others in 1,024. All methods of one
length run in this process, so the model reads each prompt once. It takes 9 GiB of memory and no network.
"""

import sys

import kvbench

BUDGETS = (0.5, 0.25, 0.125)  # of the tokens
LENGTHS = {512: (35, 0, 35), 1024: (15, 1, 35)}  # questions of each kind, seed, batch size

SETTINGS: list[tuple[str, dict]] = [
    ("full", {}),
    *(("random", {"budget": budget}) for budget in BUDGETS),
    *(("snapkv", {"budget": budget}) for budget in BUDGETS),
    ("int8", {}),
    ("int4", {}),
    ("kivi", {"bits": 4}),
    ("kivi", {"bits": 2}),
    *((name, {"budget": budget}) for name in ("streaming_llm", "kv_compress", "tova", "h2o") for budget in BUDGETS),
    *(("snapkv", {"budget": budget, "tier": "k8v4"}) for budget in (0.6, 0.3)),
    ("fp8", {}),
    ("kvquant_style", {}),
    ("diffkv", {"alpha_h": 0.0, "alpha_l": 0.0}),
    ("diffkv", {"alpha_h": 5.0, "alpha_l": 0.0}),
    ("diffkv", {"alpha_h": 1.0, "alpha_l": 0.02}),
    *(("minikv", {"budget": budget}) for budget in (1.0, 0.5)),
    *((name, {"budget": budget}) for name in ("keydiff", "ada_snapkv", "expected_attention") for budget in BUDGETS),
    *((name, {"budget": budget}) for name in ("pyramidkv", "chunkkv", "critical") for budget in BUDGETS),
]


def sweep(folder: str, length: int) -> None:
    """Run every method on the questions of one length; on the shortest, the full cache again in other batches."""
    items, seed, rows = LENGTHS[length]
    shared = {"task.length": length, "task.items": items, "seed": seed, "prompt_cache_bytes": "8GiB"}
    for method, settings in SETTINGS:
        kvbench.run(method, task="longctx", results_dir=folder, settings={**shared, "batch_size": rows}, **settings)
    if length == min(LENGTHS):  # where the prompts are many, what other batches change is seen best
        kvbench.run("full", task="longctx", results_dir=folder, settings={**shared, "batch_size": rows - 10})
    kvbench.release()


if __name__ == "__main__":
    for wanted in map(int, sys.argv[2:] or LENGTHS):
        sweep(sys.argv[1], wanted)
