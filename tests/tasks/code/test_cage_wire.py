"""Values on their way out of the cage: what is written is read back, and nothing else is read."""

import pytest

from kvbench.tasks.code.cage.wire import WireError, decode, encode

VALUES = [
    *(None, True, False, 0, -1, 2**200, -(2**70), 0.1, float("inf"), -0.0, 1 + 2j, "", "\u00e9\ud800\x00", b"\x00:"),
    *([], (), set(), frozenset(), {}, [[1, (2, {3})], {"a": [None], (1, 2): {1.5}}], {1: 2, "1": 3, None: b""}),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_survive_the_way(value):
    """What is written is read back, with its type."""
    back = decode(encode(value, max_bytes=1000))
    assert repr(back) == repr(value) and type(back) is type(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [(object(), "unsupported type object"), ("x" * 200, "too large"), (iter([]), "unsupported type list_iterator")],
)
def test_what_cannot_be_written_is_refused(value, message):
    """Other types and large values are errors, not something similar."""
    with pytest.raises(WireError, match=message):
        encode(value, max_bytes=100)


MALFORMED = [b"", b"X", b"i", b"i3:1", b"i1:g", b"l2:N", b"l9999999999:", b"NN", b"l1:" * 100 + b"N", b"e1:l0:"]
MALFORMED += [b"d1:N", b"s1:\xff", b"cos\nsystem\n(S'x'\ntR.", b"\x80\x04N.", b"f1:x", b"c1:x", b"i-1:", b"l-1:"]


@pytest.mark.parametrize("data", MALFORMED)
def test_malformed_bytes_are_refused(data):
    """Nothing but a complete value is read; in particular no pickle."""
    with pytest.raises(WireError):
        decode(data)


def test_colliding_keys_are_refused():
    """Keys with one hash, which would stall the reader, are an error; as many ordinary ones are not."""
    keys = [number * (2**61 - 1) for number in range(1, 5000)]
    data = encode(keys, max_bytes=1 << 20)
    with pytest.raises(WireError, match="collide"):
        decode(b"e" + data[1:])
    assert len(decode(encode(set(range(5000)), max_bytes=1 << 20))) == 5000
    with pytest.raises(WireError, match="too many parts"):
        decode(data, max_nodes=1000)
