"""Commands of serving engines, as their documentation writes them: read as a setting of a run, or refused by name."""

import pytest
import yaml
from refusals import refused

from kvbench.config.methods import method_settings
from kvbench.config.settings import as_dict
from kvbench.extensions.advise.engines import engines, flags_of, read_command
from kvbench.methods.kivi import Kivi
from kvbench.methods.uniform import Uniform
from kvbench.policy import Tier
from kvbench.policy.tiers import GGML
from kvbench.runs.parts import make_policy

# From tools/server/README.md, tools/perplexity/README.md and tools/llama-bench/README.md of llama.cpp; vLLM's pages
# Quantized KV Cache, OpenAI-Compatible Server, and its blog on TurboQuant; SGLang's pages Quantized KV Cache and Server
# Arguments. What is in brackets there has a name here.
READ = {
    "llama-server -m model.gguf -ctk q8_0 -ctv q4_0 -fa on": "engine_format tier=q8_0-q4_0 model=gguf",
    "./llama-server -m models/7B/ggml-model.gguf -c 2048": "full model=gguf",
    "llama-perplexity -m model.gguf -f wiki.test.raw --cache-type-k q5_1 --cache-type-v=q5_1": (
        "engine_format tier=q5_1 model=gguf"
    ),
    "LLAMA_ATTN_ROT_DISABLE=1 llama-bench -m model.gguf -ctk iq4_nl -ctv f16 -fa 1": (
        "engine_format tier=iq4_nl-f16 off model=gguf"
    ),
    "vllm serve meta-llama/Llama-3.1-8B-Instruct --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 1 23": (
        "engine_format tier=fp8 tiers_by_layer=0:fp16 1:fp16 23:fp16 model=hf"
    ),
    "vllm serve Qwen/Qwen3-4B --kv-cache-dtype turboquant_4bit_nc --kv-cache-dtype-skip-layers 0,31": (
        "engine_format tier=turboquant_4bit protect_layers=[0,1,-2,-1] tiers_by_layer=0:fp16 31:fp16"
    ),
    "python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-4B --kv_cache_dtype=int4_per_token_head": (
        "engine_format tier=int4_per_token_head model=hf"
    ),
    "vllm serve NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123": "full model=hf",
    "python3 -m sglang.launch_server \\\n  --model-path deepseek-ai/DeepSeek-R1-0528 \\\n --kv-cache-dtype fp8_e5m2": (
        "engine_format tier=fp8_e5m2 model=hf"
    ),
    "python3 -m sglang.launch_server --model-path nvidia/DeepSeek-R1-0528-NVFP4 --kv-cache-dtype fp4_e2m1": (
        "engine_format tier=fp4_mx_block16 model=hf"
    ),
    "python -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-8B-Instruct --port 30000": "full model=hf",
}
REFUSED = {
    "llama-server -m model.gguf -ctv q8_0 -fa off": ("unsupported", "q8_0", "-fa off"),
    "vllm serve google/gemma-3-4b-it --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers sliding_window": (
        "unsupported",
        "--kv-cache-dtype-skip-layers sliding_window",
    ),
    "python3 -m sglang.launch_server --model-path m --kv-cache-dtype fp8_e4m3 --quantization-param-path scales.json": (
        "unsupported",
        "--quantization-param-path of sglang",
        "scales of fp8",
    ),
    "python3 -m sglang.launch_server --model-path Qwen/Qwen3-32B --page-size 1 --int8-kv-cache": (
        "unsupported",
        "--int8-kv-cache of sglang",
        "PR 22004",
    ),
    "llama-server -m model.gguf --context-shift": ("unsupported", "--context-shift of llama.cpp"),
    "vllm serve m --kv-cache-dtype fp8_ds_mla": ("unsupported", "--kv-cache-dtype fp8_ds_mla of vllm", "fp8_e4m3"),
    "ollama serve": ("name-unknown", "ollama serve", "llama-server"),
    'llama-server -m "model': ("setting-value", 'llama-server -m "model'),
}


SCALED = {
    "vllm serve Qwen/Qwen3-4B --kv-cache-dtype fp8 --calculate-kv-scales": True,
    "vllm serve Qwen/Qwen3-4B --kv-cache-dtype fp8_e4m3 --calculate_kv_scales --kv-cache-dtype-skip-layers 0": True,
    "vllm serve Qwen/Qwen3-4B --calculate-kv-scales": False,  # of 16 bits
    "vllm serve Qwen/Qwen3-4B --kv-cache-dtype fp8_per_token_head --calculate-kv-scales": False,  # has its own
}


def policy_of(words: list[str]):
    """The method that words of a run make."""
    values = dict(word.split("=", 1) for word in words)
    settings = as_dict(method_settings(values["method"]))
    settings |= {k.removeprefix("method."): yaml.safe_load(v) for k, v in values.items() if k.startswith("method.")}
    if "method.tiers_by_layer" in values:  # 0:fp16 is no mapping
        settings["tiers_by_layer"] = values["method.tiers_by_layer"]
    return make_policy(settings)


@pytest.mark.parametrize(("command", "want"), READ.items(), ids=str)
@pytest.mark.smoke
def test_commands_are_read_right(command: str, want: str):
    """The words of the run; its method can be made."""
    reading = read_command(command)
    said = " ".join(reading.words).replace("method.", "").replace("store.rotation=", "")
    assert want in said.replace("method=", "")
    policy_of(reading.words)
    assert sum(part in reading.words for part in ("method=full", "method=int8", "method=engine_format")) == 1


@pytest.mark.parametrize(("command", "error"), REFUSED.items(), ids=str)
def test_what_has_no_counterpart_is_named(command: str, error: tuple[str, ...]):
    """The part that is missing, and a remedy where there is one."""
    code, *values = error
    with refused(code, "command", *values):
        read_command(command)


@pytest.mark.parametrize(("command", "scaled"), SCALED.items(), ids=str)
def test_scales_that_vllm_finds_itself_are_a_file_here(command: str, scaled: bool):
    """With the command that finds them; of other formats the flag says nothing, there and here."""
    reading = read_command(command)
    assert ("method.scales=scales.tsv" in reading.words) == scaled
    assert any("kvbench calibrate what=scales scales.tokens=random" in note for note in reading.notes) == scaled


def test_scales_of_a_calibration_have_their_flags():
    """Plain fp8 has scales of 1, which these are not."""
    (tensor,) = flags_of(Uniform(tier="fp8", scales=[[0.1, 0.2]] * 4, protect_layers=[-1]), 4)
    assert "--kv-cache-dtype-skip-layers 3 --kv-cache-dtype fp8 (scales of the checkpoint" in tensor
    assert "strategy=tensor" in tensor and "--calculate-kv-scales" in tensor
    (head,) = flags_of(Uniform(tier="fp8", scales=[[0.1, 0.2, 0.3, 0.4]] * 4))
    assert head.startswith("vllm: ") and "strategy=attn_head" in head


def test_five_commands_of_each_engine_are_here():
    """Read or refused."""
    counts = dict.fromkeys(engines(), 0)
    for command in [*READ, *REFUSED]:
        name = next((name for name, known in engines().items() if any(p in command for p in known["programs"])), "")
        counts[name or "llama.cpp"] += 1
    assert all(count >= 5 for count in counts.values()), counts


@pytest.mark.parametrize("engine", engines())
def test_flags_lead_back_to_the_setting(engine: str):
    """Every format that an engine ships names a tier that exists, and its flags are read as that tier again."""
    for name, entry in engines()[engine]["formats"].items():
        tier = Tier.parse(entry["tier"])
        leaves = entry.get("leaves", ())
        lines = [
            line for line in flags_of(Uniform(tier=entry["tier"], protect_layers=leaves)) if line.startswith(engine)
        ]
        assert len(lines) == 1 and (name in lines[0].split() or entry.get("alias"))
        command = lines[0].partition(": ")[2].partition(" (")[0]
        policy = policy_of(read_command(command).words)
        assert policy.tiers[0] == tier and {*policy.protect_layers} == {*leaves}


def test_layers_in_16_bits_are_flags_where_an_engine_has_one():
    """vLLM counts from the first layer; llama.cpp and SGLang have no such flag, other precisions have none."""
    policy = Uniform(tier="fp8", protect_layers=[0, -1])
    assert flags_of(policy, 32) == [
        "vllm: vllm serve MODEL --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 31 (since April 2024 (PR 3290), "
        "with scales of 1)"
    ]
    turbo = Uniform(tier="turboquant_4bit", protect_layers=[0, 1, 30, -1])
    assert [line.partition(" (")[0] for line in flags_of(turbo, 32)] == [
        "vllm: vllm serve MODEL --kv-cache-dtype turboquant_4bit_nc"
    ]
    assert flags_of(Uniform(tier="fp8", tiers_by_layer="0:int8")) == []
    assert flags_of(Uniform(tier="q8_0", protect_layers=[0])) == [] == flags_of(Kivi())
    assert flags_of(Uniform(tier="int4", splits=2)) == []
    assert len(flags_of(Uniform(tier="fp8"))) == 2


def test_llama_cpp_s_types_are_kvbench_s():
    """All that it has for a cache are in the table."""
    assert list(engines()["llama.cpp"]["formats"]) == list(GGML)
    assert flags_of(Uniform(tier="f16-q5_0"))[0].startswith(
        "llama.cpp: llama-server -ctk f16 -ctv q5_0 -fa on (keys since"
    )
