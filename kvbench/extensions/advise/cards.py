"""Cards that a model may run on: their memory, and about how long they take, from what their makers say of them."""

from dataclasses import dataclass
from pathlib import Path

from kvbench.config.settings import as_dict, read_config
from kvbench.errors import NameUnknown, unknown_name
from kvbench.sizing.shapes import NamedShape

REACHED = 0.4  # of a card's peak: what large products and plain copies reach; a guess, and said to be one


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card of cards.yaml."""

    name: str
    source: str
    memory_gb: int
    """In 10^9 bytes."""
    gb_per_s: int
    tflops: int

    @property
    def memory_bytes(self) -> int:
        """Memory of the card."""
        return self.memory_gb * 10**9

    def seconds(self, shape: NamedShape, samples: int, prompt_tokens: int, answer_tokens: int) -> float | None:
        """Time for answers one after another, each reading its own prompt; None where the weights are not known."""
        if shape.parameters is None or shape.weights_bytes is None:
            return None
        attention = 2 * shape.layers * shape.q_heads * shape.head_dim * prompt_tokens**2
        read_s = (2 * shape.parameters * prompt_tokens + attention) / (self.tflops * 1e12)
        write_s = answer_tokens * shape.weights_bytes / (self.gb_per_s * 1e9)
        return samples * (read_s + write_s) / REACHED


def find_card(name: object) -> Card:
    """The card of a name in any case; ValueError where there is none."""
    listed = as_dict(read_config(Path(__file__).with_name("cards.yaml")))
    match = next((known for known in listed if known.lower() == str(name).lower()), None)
    if match is None:
        raise NameUnknown(f"{unknown_name('gpu', name, listed)} memory=24GiB takes any other card.", setting="gpu")
    return Card(name=match, **listed[match])
