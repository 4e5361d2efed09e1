"""Results folders of made-up runs, in the real format, for the tests of what reads them."""

from functools import cache
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from kvbench.cli.commands import compose_command
from kvbench.results import summary
from kvbench.results.claims import TASKS
from kvbench.results.faults import REVISION
from kvbench.results.identity import hash_identity, run_folder
from kvbench.results.provenance import Git, Machine, Versions
from kvbench.results.record import RunRecord, Session
from kvbench.results.sample import write_line
from kvbench.results.summary import metrics
from kvbench.tasks.taskset import MetricInfo

VERSIONS = Versions(python="3.11.7", kvbench="0.1.0", torch="2.13.0", transformers="5.23.0", lm_eval="0.4.13")
MACHINE = Machine(device="cpu (X)", host="Linux x86_64", num_cpus=2, num_threads=2, omp_wait_policy="PASSIVE")


def command_settings(command: str, root, *words: str) -> DictConfig:
    """The settings of a command over a results folder. Composing takes longer than most of what reads them, so that
    those of the same words are composed once."""
    made = _composed(command, words).copy()
    made.results_dir = str(root)
    return made


@cache
def _composed(command: str, words: tuple[str, ...]) -> DictConfig:
    return compose_command(command, [*words])


def sample(
    number,
    subset,
    score,
    *,
    ratio=0.5,
    bits=4,
    text=None,
    nll=0.1,
    status="ok",
    repeat=0,
    tiers=(40,),
    seconds=0.1,
    meta=None,
    gold=None,
    turns=(),
    finish="eos",
    protocol=None,
    metric="exact",
    **more,
):
    """One journal record; `ratio` is resident bytes over fp16 bytes, `bits` those of a stored element, `turns` are the
    texts of a conversation's earlier answers; `more` are further keys."""
    fp16 = 100_000.0 + 1000 * (number % 7)
    resident, payload = ratio * fp16, sum(tiers) / 100 * bits / 16 * fp16
    ok = status == "ok"
    asked = {} if gold is None else {"gold": list(gold), "prompt": {"sha256": "0" * 64, "tail": "What is it?"}}
    if turns:
        at = {"token_ids": [3], "finish": "eos", "resident_bytes": 10, "fp16_bytes": 20, "tokens_seen": 50}
        asked["turns"] = [{"text": said, "gold": [f"gold of {said}"], "num_turn_tokens": 7, **at} for said in turns]
    return {
        "sample_id": f"{subset}/{number}",
        "subset": subset,
        "repeat": repeat,
        "status": status,
        "text": (f"answer {score}" if text is None else text) if ok else "",
        "token_ids": [1, 2],
        "finish": finish,
        **asked,
        **more,
        "scores": {metric: score} if ok else {},
        "fidelity": {"nll": nll, "nll_full": 0.1, "kl_mean": nll - 0.1, "top1_agreement": 1.0} if ok else None,
        "ledger": {
            "payload_bytes": payload,
            "quant_meta_bytes": 0.5 * (resident - payload),
            "table_bytes": 0.5 * (resident - payload),
            "resident_bytes": resident,
            "average_bytes": 0.9 * resident,
            "average_ratio": 0.9 * ratio,
            "peak_bytes": resident + 50_000,
            "fp16_bytes": fp16,
        },
        "kept": {"tokens_seen": 100, "lists": 1, "slots_per_tier": list(tiers), "slot_ratio": sum(tiers) / 100},
        "num_prompt_tokens": 90,
        "num_prompt_tokens_untruncated": 90,
        "truncated": False,
        "nan_layer": None,
        "protocol": protocol or {},
        "meta": {"answer": "42"} if meta is None else meta,
        "message": "",
        "timing": {"prefill_s": 1.0, "decode_share_s": seconds, "decode_tokens": 5},
    }


def store(root, method, scores, *, settings=None, status="complete", total=None, message="", **changes):
    """Write one run, and give its folder.

    The run has a sample for each score of a subset, of `total` that it should have had. `changes` are `task`, `model`,
    `backend`, `batch_size`, `harness`, `method_code`, `code` (more of the code's identity), `fingerprint`, `started`,
    `seed`, `length`, `limit`, `store`, `weights_bytes`, `revision`, `asked` (more of the protocol), `statuses` (sample
    number -> status); the rest goes to `sample`, where a function is called with the sample's number.
    """
    known = {"task": "toy", "model": "tiny", "backend": "torch", "batch_size": 4, "harness": "a" * 64, "seed": 0}
    known |= {"method_code": "b" * 64, "fingerprint": "f" * 64, "started": "2026-01-01T00:00:00+00:00", "length": 9}
    known |= {
        "statuses": {},
        "code": {},
        "store": {"page_bytes": "auto"},
        "weights_bytes": None,
        "asked": {},
        "limit": None,
        "revision": REVISION,
    }
    known |= {key: changes.pop(key) for key in list(changes) if key in known}
    declared = TASKS.get(known["task"])
    metric = declared.primary if declared else "exact"
    info = MetricInfo(declared.metrics[metric] if declared else True, "the answer is right")
    records = []
    for number, (subset, score) in enumerate((name, score) for name, values in scores.items() for score in values):
        extra = {key: value(number) if callable(value) else value for key, value in changes.items()}
        status_of = known["statuses"].get(number, "ok")
        records.append(sample(number, subset, float(score), status=status_of, metric=metric, **extra))
    identity = {
        "model": {"fingerprint": "w", "dtype": "float32", "device": "cpu"},
        "task": {"name": known["task"], "fingerprint": known["fingerprint"], "limit": known["limit"]}
        | {"protocol": {"query_aware": True, "length": known["length"]} | known["asked"]},
        "method": {"_target_": f"kvbench.methods.{method}.X", "tier": "fp16", **(settings or {})},
        "generation": {"temperature": 0.0},
        "store": known["store"],
        "fidelity": {"max_tokens": 64},
        "batch_size": known["batch_size"],
        "seed": known["seed"],
        "backend": known["backend"],
        "code": {"harness": known["harness"], "method": known["method_code"], "torch": "2", "transformers": "5"}
        | known["code"],
    }
    digest = hash_identity(identity)
    folder = run_folder(Path(root), known["task"], known["model"], method, digest)
    folder.mkdir(parents=True)
    (folder / "samples.jsonl").write_bytes(b"".join(write_line(item, digest) for item in records))
    record = RunRecord(status=status, message=message, task=known["task"], model=known["model"], method=method)
    record.hash, record.identity, record.backend, record.seed = digest, identity, known["backend"], known["seed"]
    record.versions, record.machine, record.git = VERSIONS, MACHINE, Git(commit="c" * 40, dirty=False)
    record.weights_bytes, record.revision = known["weights_bytes"], known["revision"]
    record.started = record.ended = known["started"]
    record.sessions = [Session(started=known["started"], num_done=len(records))]
    record.protocol = identity["task"]["protocol"]
    if status != "running":
        record.counts.total = len(records) if total is None else total
        record.counts.done = len(records)
        record.counts.ok = sum(item["status"] == "ok" for item in records)
        record.metrics = metrics(records, {metric: info}, metric)
        record.ledger = summary.ledger(records)
        record.timing = summary.timing(records, 1.0)
    record.save(folder)
    return folder


def flips(scores, lost, gained):
    """The scores with the first `lost` ones of the last subset's right answers wrong and the first `gained` wrong ones
    right."""
    *_, last = scores
    rights, wrongs = ([i for i, value in enumerate(scores[last]) if value == right] for right in (1, 0))
    changed = dict.fromkeys(rights[:lost], 0) | dict.fromkeys(wrongs[:gained], 1)
    return {**scores, last: [changed.get(i, value) for i, value in enumerate(scores[last])]}


def yes_no(rate, sizes, seed=0):
    """Right and wrong answers of some subsets."""
    rng = np.random.default_rng(seed)
    return {name: (rng.random(size) < rate).astype(int).tolist() for name, size in sizes.items()}
