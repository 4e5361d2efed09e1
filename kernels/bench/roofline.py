"""Roofline of the attention bench: bytes over bandwidth, instructions over issue rate, whichever takes longer.

Instructions are counted afterwards, without a GPU (`kernels.bench.instructions`).
"""

from typing import Any

import torch

SCHEDULERS = 4  # of a multiprocessor of NVIDIA's, each of which issues a warp instruction per cycle


def peaks(device: torch.device | str) -> dict[str, Any]:
    """Peak rates of an NVIDIA GPU by its clocks: `target`, `peak_bytes_per_s`, `peak_instructions_per_s` of warps.

    `target` is a name such as sm_90. Values that the driver does not report are absent; empty for other devices.
    """
    if torch.device(device).type != "cuda" or torch.version.hip is not None:
        return {}
    properties = torch.cuda.get_device_properties(device)
    clock, memory_clock, bits = (
        getattr(properties, name, 0) for name in ("clock_rate", "memory_clock_rate", "memory_bus_width")
    )  # kHz, kHz, and bits that go twice in a cycle
    known = {
        "peak_bytes_per_s": 2 * 1e3 * memory_clock * bits / 8,
        "peak_instructions_per_s": 1e3 * clock * properties.multi_processor_count * SCHEDULERS,
    }
    return {"target": f"sm_{properties.major}{properties.minor}"} | {
        name: value for name, value in known.items() if value
    }


def limits(row: dict, cell: dict, environment: dict) -> dict[str, float]:
    """Least seconds of a row's call: by its `bytes`, and by its `instructions` where they were counted.

    Bytes are taken at the device's bandwidth or, where that is unknown, at the bandwidth of the cell's probe.
    """
    least = {}
    rate = environment.get("peak_bytes_per_s") or (cell.get("probe") or {}).get("bytes_per_s")
    if rate and row.get("bytes_per_call"):
        least["bytes"] = row["bytes_per_call"] / rate
    if (rate := environment.get("peak_instructions_per_s")) and row.get("instructions_per_call"):
        least["instructions"] = row["instructions_per_call"] / rate
    return least


def share(row: dict, cell: dict, environment: dict) -> str:
    """Share of a row's time that the larger of its `limits` takes, with that limit's name, such as `62 % (bytes)`."""
    known = limits(row, cell, environment)
    if not known:
        return "-"
    name = max(known, key=lambda each: known[each])
    return f"{100 * known[name] / row['median']:.0f} % ({name})"
