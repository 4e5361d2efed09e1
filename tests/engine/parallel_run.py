"""One of the processes of `test_tensor_parallel.py`: leads or follows, and the first one writes what came out.

python parallel_run.py MODEL_FOLDER OUT
"""

import pickle
import sys
from pathlib import Path

import pytest
from engine_helpers import answers, comparable, random_tokens, request
from open_settings import open_settings

from kvbench.engine.tensor_parallel import follow
from kvbench.errors import NotForModel
from kvbench.methods.diffkv import DiffKV
from kvbench.methods.full import Full
from kvbench.methods.kivi import Kivi
from kvbench.methods.kv_compress import KVCompress
from kvbench.methods.kvquant import KVQuant
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.think import ThinK
from kvbench.methods.tova import TOVA
from kvbench.methods.triattention import TriAttention
from kvbench.methods.uniform import Uniform
from kvbench.models.load import load_model
from kvbench.models.processes import started

METHODS = {
    "full": Full(),
    "snapkv": SnapKV(budget=0.5, window=8, decode_every=4),
    "snapkv, ada": SnapKV(budget="40KiB", window=8, allocation="ada"),
    "kivi": Kivi(group=8, residual_tokens=16),
    "diffkv": DiffKV(alpha_h=2.0, alpha_l=0.5, window=16),
    "kv_compress": KVCompress(budget=32, block=8, continual=True),
    "triattention": TriAttention(**open_settings("triattention"), budget=4, decode_every=4),
    "kvquant": KVQuant(**open_settings("kvquant")),
    "uniform, by head": Uniform(tier="int4", tiers_by_layer="fp16/int4,int4"),
    "think": ThinK(window=8, keep_channels=0.5),
    "tova": TOVA(budget=24, per_head=False),
}


def run(folder, processes=None):
    """Answers the same requests with every method; {method: {(sample, repeat): what can be compared}}."""
    settings = {"kind": "hf", "path": str(folder), "device": "cpu", "tensor_parallel": processes}
    loaded = load_model(settings)
    requests = [
        request("a", random_tokens(41), random_tokens(3, seed=1), max_new_tokens=6, num_samples=2),
        request("b", random_tokens(60), gold=random_tokens(6, seed=2), max_new_tokens=6),
    ]
    with pytest.raises(NotForModel, match="2 layers x 1 heads"):  # what all processes refuse, none waits for
        answers(loaded, SnapKV(allocation="table", table=[[1.0], [1.0]]), requests)
    return {
        name: {key: comparable(found) for key, found in answers(loaded, policy, requests).items()}
        for name, policy in METHODS.items()
    }


if __name__ == "__main__":
    if started()[0]:
        follow()
    else:
        Path(sys.argv[2]).write_bytes(pickle.dumps(run(sys.argv[1], started()[1])))
