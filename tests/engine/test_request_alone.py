"""An answer depends on its request alone: not on the batch, the order, what a resume or a shard has left to do, or the
number of threads."""

import random

import pytest
import selection
import torch
from engine_helpers import answers, comparable, random_tokens, request
from selection import method_of, per_path

from kvbench.config.files import options
from kvbench.kernels.cpu import products
from kvbench.kernels.cpu.abi import load
from kvbench.kernels.cpu.build import BuildError
from kvbench.models.load import load_model

try:
    load()
    ABSENT = ""
except BuildError as error:
    ABSENT = str(error)
pytestmark = pytest.mark.skipif(bool(ABSENT), reason=ABSENT)

# Widths that no register divides: the ends of rows are worked on otherwise than their beginnings.
ODD = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 140, "intermediate_size": 333}
MODEL = {
    "kind": "random",
    "preset": "tiny",
    "overrides": ODD,
    "dtype": "float32",
    "device": "cpu",
    "linear": "streamed",
}


@pytest.fixture(scope="module")
def streamed():
    """A tiny model that vouches for its rows."""
    loaded = load_model(MODEL | {"linear": "streamed"})
    assert loaded.rows_are_alone
    return loaded


@pytest.fixture
def small_work(monkeypatch):
    """As many threads as are set, for the smallest call; and the set number again at the end."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(products, "WORK_PER_THREAD", 1)
    load().kvb_set_work_per_thread(1.0)
    yield
    torch.set_num_threads(threads)
    load().kvb_set_work_per_thread(1e6)


def some_requests(dice: random.Random) -> list:
    """Six requests of unequal lengths: greedy, drawn in two samples, with a forced answer, and in two parts."""
    lengths = [200, *dice.sample(range(3, 60), 5)]  # torch divides the scores of a long prompt among threads
    dice.shuffle(lengths)
    found = [request(str(i), random_tokens(n), max_new_tokens=dice.randint(1, 8)) for i, n in enumerate(lengths[:3])]
    found.append(request("gold", random_tokens(lengths[3]), gold=random_tokens(4), max_new_tokens=3))
    found.append(request("drawn", random_tokens(lengths[4]), temperature=0.8, num_samples=2, max_new_tokens=5))
    return [*found, request("parts", random_tokens(lengths[5]), random_tokens(4), max_new_tokens=4)]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", per_path(options("method"), part=1))
def test_an_answer_is_the_same_bits_in_any_company(name, streamed, small_work):
    """Tokens, bytes and every number that is measured: random parts of the requests in random orders and batches, by
    another number of threads, as a resume or a shard leaves them."""
    dice, policy = random.Random(name), method_of(name)
    asked = some_requests(dice)
    torch.set_num_threads(1)
    alone = {}
    for some in (asked[::2], asked[1::2]):  # each sized for its own
        alone |= {key: comparable(each) for key, each in answers(streamed, policy, some, batch_size=1).items()}
    for threads in (2, 3, 1) if selection.FULL else (3,):
        torch.set_num_threads(threads)
        part = dice.sample(asked, dice.randint(4, len(asked)))
        sizing = dice.choice([asked, None])
        found = answers(streamed, policy, part, sizing=sizing, batch_size=dice.randint(3, len(part)))
        assert {key: comparable(each) for key, each in found.items()} == {key: alone[key] for key in found}
