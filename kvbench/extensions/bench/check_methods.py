"""Checks every method through the whole engine on a device: `python -m kvbench.extensions.bench.check_methods`.

A small random model answers the same prompts twice, with the GPU kernels and with plain torch. In fp32 tokens, bytes
and what was kept must be the same; in 16 bits, whose products are rounded elsewhere, the likelihoods of given tokens
must be close. With --graphs, the GPU kernels answer three times, with decode steps from a CUDA graph, from what stands
for one (`kernels.gpu.emulator`), and one by one; the last answer of a case is drawn. The first two must be the same to
the bit. Likelihoods of the third must be close: graphs pad their rows, so that last bits differ, and with them, now and
then, a code that a number is rounded to. Needs torch, triton and transformers alone; exit status 0 when everything
passed.
"""

import argparse
import math
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any

import torch

from kvbench.cache.options import StoreOptions
from kvbench.config.files import options
from kvbench.engine.engine import Engine
from kvbench.engine.requests import Outcome, Request
from kvbench.errors import NotForModel
from kvbench.extensions.bench.decoders import capture_on
from kvbench.kernels.backend import Backend
from kvbench.kernels.check_device import in_shares, report
from kvbench.kernels.device_inputs import Finding
from kvbench.kernels.dispatch import HOST, gpu_backend
from kvbench.kernels.graphs import Capture
from kvbench.kernels.names import DECODES, TRITON
from kvbench.models.load import LoadedModel
from kvbench.runs import choices
from kvbench.runs.parts import policy_class

# Windows, budgets and groups so small that a method drops, demotes, chooses and flushes within some dozens of tokens.
SMALL = {"window": 8, "budget": 16, "sinks": 2, "recent": 8, "residual_tokens": 16, "group": 16, "read_budget": 16}
SMALL |= {"min_pages": 1, "dense_layers": 0, "obs_window": 4, "protected": 8, "skip_near": 2}
# The same where the kernels in CUDA C++ attend, which take key groups of whole turns of 32 tokens.
IN_TURNS = SMALL | {"group": 32, "residual_tokens": 32}
# Tables of one model, of two layers with two KV heads of width 64: gates, mean queries, and books, with
# arbitrary levels.
_LEVELS = [code * 255 // (2**bits - 1) for bits in (2, 3, 4) for _ in "kv" for code in range(2**bits)]
_SHARES = [[0.9, 0.1], [0.2, 0.8]]
TABLE: dict[str, dict[str, list]] = {
    "duo_attention": {"table": _SHARES},
    "headkv": {"table": _SHARES},
    "triattention": {"centres": [[round(math.sin(i * (n + 1)), 3) for i in range(192)] for n in range(2)]},
    "kvquant": {"books": [[*_LEVELS, *[(0.01, 0.02)[n]] * 128, *[-1.5] * 128] for n in range(2)]},
}
MODEL = "random preset=tiny num_layers=2"
# Attention that is off by 4e-3 of itself, as 16-bit products are, moved a token's likelihood by at most 0.15 nats here;
# attention that is off by a tenth moved it by at least 0.49.
LOW_PRECISION_NATS = 0.3
LONGER = 10  # times as many tokens with graphs: the first steps are warm-up and capture


@dataclass(frozen=True)
class Case:
    """A batch of prompts, each as the tokens of its segments and those to answer with.

    Optionally at the settings of `SMALL`, and with everything kept in the high tier where a method has thresholds.
    """

    prompts: tuple[tuple[tuple[int, ...], int], ...]
    small: bool = True
    one_tier: bool = False


CASES = {
    "below the window": Case((((5,), 3),), small=False),
    "one token": Case((((1,), 3),), small=False),
    "an empty tier": Case((((24,), 3),), one_tier=True),
    "a row that ends early": Case((((26,), 2), ((12,), 3))),
    "segments": Case((((18, 5), 2),)),
}


def changes(method: str, case: Case, small: Mapping[str, int] = SMALL) -> dict:
    """The changes that a case makes to a method's settings."""
    listed = choices.read_choice("method", method)
    settings: dict[str, Any] = {item.name: item.default for item in fields(policy_class(listed["_target_"]))} | listed
    changed: dict[str, Any] = dict(TABLE.get(method, {}))
    if case.small:
        for key, value in small.items():
            is_count = (
                isinstance(settings.get(key), int) and not isinstance(settings[key], bool) and settings[key] > value
            )
            if is_count or (key in ("budget", "read_budget") and settings.get(key) is not None):
                changed[key] = value
    if case.one_tier and "alpha_h" in settings:
        changed["alpha_h"] = settings["alpha_l"]
    return changed


@cache
def small_model(device: str, dtype: str) -> LoadedModel:
    """Small model for the checks."""
    return choices.make_model(f"{MODEL} dtype={dtype}", device)


def answer(
    model: LoadedModel, method: str, case: Case, backend: str, capture: Capture | None = None, at_length: bool = False,
    decode: str = TRITON,
) -> tuple[list[Outcome], Backend, dict[str, int]]:  # fmt: skip
    """Run a case; returns outcomes in order, the backend, and the kinds of steps (eager or captured).

    Answers are as short as the case sets, or long, of given tokens.
    """
    changed = changes(method, case, SMALL if decode == TRITON else IN_TURNS)
    words = " ".join(f"{key}={str(value).replace(' ', '')}" for key, value in changed.items())
    policy = choices.make_method(f"{method} {words}")
    make, requests, how = torch.Generator().manual_seed(1), [], dict[str, Any]()
    for index, (segments, tokens) in enumerate(case.prompts):
        parts = tuple(tuple(torch.randint(1, 257, (n,), generator=make).tolist()) for n in segments)
        how = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        if at_length:  # tokens that may not come yet are the host's business
            gold = tuple(torch.randint(1, 257, (tokens * LONGER,), generator=make).tolist())
            how = {"max_new_tokens": tokens * LONGER, "gold": gold}
            how |= {"temperature": 0.8, "top_p": 0.9} if index + 1 == len(case.prompts) else {}
        requests.append(Request(sample_id=str(index), subset="check", segments=parts, **how))
    how = {"store": StoreOptions(), "batch_size": len(requests), "seed": 0, "backend": backend}
    how |= {"fidelity_max_tokens": None if at_length else 0, "fidelity_per_token": at_length, "capture": capture}
    how |= {"decode": decode} if backend == "triton" else {}
    engine = Engine(model, policy, **how)
    outcomes: list[Outcome] = []
    engine.run(requests, on_outcome=outcomes.append)
    outcomes.sort(key=lambda outcome: outcome.sample_id)
    return outcomes, engine.backend, engine.graphs


def differing(mine: Outcome, theirs: Outcome, nats: float = 0.0) -> int:
    """Counts which of status, tokens, bytes, kept slots and fidelity differ between two outcomes.

    Where likelihoods may differ by `nats`, whether they do by more.
    """
    names = ["status", "token_ids", "ledger", "kept", *["fidelity"] * (not nats)]
    pairs = [(getattr(mine, name), getattr(theirs, name)) for name in names]
    far = nats > 0 and not farther(mine, theirs) <= nats
    return sum(a != b for a, b in pairs) + (mine.status != "ok") + far


def farther(mine: Outcome, theirs: Outcome) -> float:
    """The largest difference of a token's likelihood in nats between two outcomes; infinite where one has failed."""
    if mine.per_token is None or theirs.per_token is None or {mine.status, theirs.status} != {"ok"}:
        return math.inf
    pairs = zip(mine.per_token["nll"], theirs.per_token["nll"], strict=True)
    return max(abs(a - b) for a, b in pairs)


def check(
    device: str, dtype: str, methods: list[str], cases: list[str], *, graphs: bool = False, decode: str = TRITON
) -> Iterator[Finding]:
    """Compare answers of every case between both backends, or between captured and eager steps.

    Without a replayed graph the check fails.
    """
    model = small_model(device, dtype)
    exact = graphs or dtype == "float32"
    for method in methods:
        for name in cases:
            try:
                run = partial(answer, model, method, CASES[name], at_length=graphs or not exact, decode=decode)
                want, _, _ = run("triton" if graphs else "torch")
            except NotForModel as error:  # such as a package that it needs and that is not there
                print(f"{method} is left out: {error}", file=sys.stderr)
                break
            try:
                got, backend, counts = run("triton", capture_on(model.device) if graphs else None)
                notes = _notes(backend)
                if graphs:
                    same, _, _ = run("triton", capture_on(torch.device("cpu")))
                    differ = sum(differing(*pair) for pair in zip(got, same, strict=True))
                    differ += sum(differing(*pair, LOW_PRECISION_NATS) for pair in zip(got, want, strict=True))
                    worst = float(differ + (not counts.get("replayed")))
                elif exact:
                    worst = float(sum(differing(*pair) for pair in zip(got, want, strict=True)))
                else:
                    worst = max(map(farther, got, want))
            except Exception as error:  # compilers and drivers have kinds of their own; the other cases still run
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                worst, notes = float("nan"), ""
            yield Finding(f"{method}, {name}, {dtype}{notes}", worst, 0 if exact else LOW_PRECISION_NATS)


def _notes(backend: Backend) -> str:
    """Operations that fell back to plain torch, and the attention kernels of steps, where these are not only Triton."""
    slow = f" (plain torch: {', '.join(sorted(backend.fallbacks))})" if backend.fallbacks else ""
    return slow + (f" (decode: {'; '.join(sorted(backend.decodes))})" if backend.decodes - {TRITON} else "")


def main(argv: list[str] | None = None) -> int:
    """Runs the checks, prints one line each, and returns 0 when all passed, 1 otherwise, 2 where they cannot run."""
    known = list(options("method"))
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu with TRITON_INTERPRET=1 (slow)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--method", nargs="*", choices=known, default=known)
    parser.add_argument("--case", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--decode", default=TRITON, choices=[*DECODES, HOST],
        help="what makes the attention of steps; host = the source in CUDA C++, built for this CPU",
    )  # fmt: skip
    parser.add_argument("--graphs", action="store_true", help="compare steps from a CUDA graph with steps one by one")
    parser.add_argument("--jobs", type=int, default=1, help="processes that check, and so compile, in parallel")
    parser.add_argument("--share", default="0/1", help="one share of the methods, such as 3/16; --jobs gives them out")
    chosen = parser.parse_args(argv)
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"no GPU: torch {torch.__version__} sees none here; run this on a machine with one", file=sys.stderr)
        return 2
    try:
        gpu_backend(chosen.device)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"torch {torch.__version__}, TRITON_INTERPRET={os.environ.get('TRITON_INTERPRET', '')}")
    words = [
        "--device",
        chosen.device,
        "--dtype",
        chosen.dtype,
        "--decode",
        chosen.decode,
        "--method",
        *chosen.method,
        "--case",
        *chosen.case,
    ]
    if chosen.jobs > 1:
        return in_shares("kvbench.extensions.bench.check_methods", [*words, *["--graphs"] * chosen.graphs], chosen.jobs)
    part, parts = (int(x) for x in chosen.share.split("/"))
    mine = chosen.method[part::parts]
    outcome = check(chosen.device, chosen.dtype, mine, chosen.case, graphs=chosen.graphs, decode=chosen.decode)
    return report(outcome, may_be_empty=parts > 1)


if __name__ == "__main__":
    raise SystemExit(main())
