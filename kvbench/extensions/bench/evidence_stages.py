"""Stages of the evidence from a GPU, in order; `evidence_gpu` runs them."""

from dataclasses import dataclass

MODEL = "random preset=llama3-8b dtype=bfloat16"
ATTENTION = "kvbench.kernels.bench.attention out={out} rounds=7 dense=[bf16] scores=[none,return] decodes=[triton,cuda]"
SWEEP = "kvbench.kernels.bench.sweep out={out}"
DECODE = "kvbench.extensions.bench.decode out={out} peak=false quantised=false apart=true"
PREFILL, THROUGHPUT = "kvbench.kernels.bench.prefill out={out}", "kvbench.extensions.bench.throughput out={out}"
SERVE = "kvbench.extensions.bench.serve out={out} rounds=1 peers=false"
ANSWERS = "kvbench.extensions.bench.evidence_answers --out {out}"
DRY = "device=cpu kernels=triton rounds=1 threads=[1]"
DRY_WHOLE = f"{DRY} model='random preset=tiny num_layers=1 dtype=float32' steps=1 context=16"
DRY_ATTENTION = f"kvbench.kernels.bench.attention {DRY} shapes=[2x1x64] lengths=[16] batches=[1] dense=[fp32]"
DRY_ATTENTION += " formats=[K8V4] working_set_mb=1 max_buffers=1 scores=[none] decodes=[triton,host] out={out}"
DRY_METHODS = "kvbench.extensions.bench.check_methods --device cpu --method full"


@dataclass(frozen=True)
class Stage:
    """One stage of the evidence.

    Attributes:
        name: Name of the stage and of its files.
        limit_s: Time limit, s.
        module: Arguments of `python -m`, with `{out}` for its JSON document.
        dry: The same on a CPU, with interpreted kernels and tiny shapes.
    """

    name: str
    limit_s: int
    module: str
    dry: str


# The decisive stages come first: it runs, its results are right, its speed, its answers; then the rest.
STAGES = (
    Stage(
        "probe",
        30,
        "kvbench.extensions.bench.evidence_gpu --describe",
        "kvbench.extensions.bench.evidence_gpu --describe --device cpu",
    ),
    Stage(
        "check-quick",
        90,
        "kvbench.kernels.check_device --quick --jobs 16",
        "kvbench.kernels.check_device --quick --device cpu --only prompts --jobs 2",
    ),
    Stage(
        "sanitize",
        120,
        "kvbench.kernels.sanitize",
        "kvbench.kernels.sanitize --device cpu --only bounds --decode triton",
    ),
    Stage(
        "check-cuda",
        60,
        "kvbench.kernels.check_device --decode cuda --only attention --jobs 16",
        "kvbench.kernels.check_device --quick --device cpu --only bounds --decode host",
    ),
    Stage(
        "check-methods-cuda",
        110,
        "kvbench.extensions.bench.check_methods --decode cuda --dtype bfloat16 --case 'a row that ends early' "
        "--jobs 16",
        f"{DRY_METHODS} --decode host --dtype float16 --case 'one token'",
    ),
    Stage(
        "sweep",
        150,
        f"{SWEEP} rounds=5 lengths=[4096,16384] batches=[1,8]",
        f"{SWEEP} {DRY} shapes=[2x1x64] lengths=[64] batches=[1] formats=[K4V4] decodes=[triton,host] block_slots=[16] "
        "warps=[1] stages=[2] stage_kb=[24] page_slots=[0,64] working_set_mb=1 max_buffers=1 jobs=2",
    ),
    Stage("attention", 270, f"{ATTENTION} shapes=[32x8x128] lengths=[4096,16384] batches=[1,8,32]", DRY_ATTENTION),
    # bf16 queries, with residual buffers (rings) and lists of unlike length.
    Stage(
        "attention-bf16",
        160,
        f"{ATTENTION} queries=bf16 shapes=[32x8x128] lengths=[4096,16384] batches=[1,8] rings=[0,128] "
        "lists=[equal,unlike]",
        f"{DRY_ATTENTION} queries=bf16 lengths=[192] rings=[0,128] lists=[equal,unlike]",
    ),
    Stage(
        "decode-4k",
        160,
        f"{DECODE} model='{MODEL}' context=4096 batches=[1,8] rounds=5 prefill_rounds=2",
        f"{DECODE} {DRY_WHOLE} batches=[1] prefill_rounds=1",
    ),
    Stage(
        "decode-4k-fused",
        200,
        f"{DECODE} model='{MODEL} linear=fused' decode=cuda context=4096 batches=[1,32] rounds=5 prefill_rounds=0",
        f"{DECODE} {DRY_WHOLE} decode=host batches=[1] prefill_rounds=0 methods=[full]",
    ),
    Stage("answers", 480, f"{ANSWERS} --device cuda", f"{ANSWERS} --device cpu --dry"),
    Stage(
        "check-all",
        240,
        "kvbench.kernels.check_device --jobs 16",
        "kvbench.kernels.check_device --quick --device cpu --only bounds",
    ),
    Stage(
        "check-methods", 200, "kvbench.extensions.bench.check_methods --jobs 16", f"{DRY_METHODS} --case 'one token'"
    ),
    Stage(
        "check-graphs",
        100,
        "kvbench.extensions.bench.check_methods --graphs --case 'a row that ends early' --jobs 16",
        f"{DRY_METHODS} --graphs --case 'one token'",
    ),
    Stage(
        "check-methods-bf16",
        160,
        "kvbench.extensions.bench.check_methods --dtype bfloat16 --case 'a row that ends early' --jobs 16",
        f"{DRY_METHODS} --dtype bfloat16 --case 'one token'",
    ),
    Stage(
        "throughput",
        170,
        f"{THROUGHPUT} model='{MODEL}' kv_mb=6000 context=4096 new_tokens=128 max_batch=128 rounds=5",
        f"{THROUGHPUT} {DRY_WHOLE} kv_mb=1 new_tokens=12 max_batch=2",
    ),
    Stage(
        "serve",
        300,
        f"{SERVE} model='{MODEL}' kv_mb=4000 prompts=[1024,3072] answers=[256,768] requests=32 rates=[2,4,8] "
        "max_batch=64 ttft_s=2 tpot_s=0.05",
        f"{SERVE} device=cpu kernels=triton threads=[1] model='random preset=tiny num_layers=1 dtype=float32' kv_mb=1 "
        "prompts=[8,16] answers=[2,4] requests=2 rates=[50]",
    ),
    Stage(
        "decode-4k-32",
        160,
        f"{DECODE} model='{MODEL}' context=4096 batches=[32] rounds=5 prefill_rounds=0",
        f"{DECODE} {DRY_WHOLE} batches=[2] prefill_rounds=0 methods=[full]",
    ),
    Stage(
        "decode-16k",
        240,
        f"{DECODE} model='random preset=llama3.1-8b dtype=bfloat16' context=16384 batches=[1,4] rounds=5 "
        "prefill_rounds=0",
        f"{DECODE} {DRY_WHOLE} batches=[1] prefill_rounds=0 methods=[full]",
    ),
    Stage(
        "prefill",
        60,
        f"{PREFILL} shapes=[32x8x128] dtype=bf16 eager=false lengths=[8192,32768] rounds=3",
        f"{PREFILL} {DRY} shapes=[2x1x16] lengths=[64] windows=[8]",
    ),
    Stage(
        "manager",
        90,
        "kvbench.kernels.bench.manager lists=[8192,32768,262144] out={out}",
        f"kvbench.kernels.bench.manager {DRY} lists=[4] start_tokens=8 tokens_per_page=4 out={{out}}",
    ),
    Stage("attention-32k", 130, f"{ATTENTION} shapes=[32x8x128] lengths=[32768] batches=[1,8,32]", DRY_ATTENTION),
    Stage(
        "attention-64", 130, f"{ATTENTION} shapes=[9x3x64,32x8x64] lengths=[4096,16384] batches=[1,32]", DRY_ATTENTION
    ),
)
