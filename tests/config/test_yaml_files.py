"""YAML files that may be anybody's: values and nothing that stands for others, or one sentence that names the file."""

import os

import pytest

from kvbench.config.settings import MAX_DATA_BYTES, read_data

LAUGHS = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 10)}]\n" for n in range(9))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LAUGHS, "its line 1 has an alias; write the value itself"),
        ("a: &x [*x]\n", "its line 1 has an alias"),
        ("seed: 1\nname: ${oc.env:SECRET}\n", r"its line 2 has an interpolation, \$\{...\}"),
        ("${oc.env:SECRET}: 1\n", "its line 1 has an interpolation"),
        ("a: ${", "its line 1 has an interpolation"),
        (f"a: {'[' * 100_000}", "its line 1 is nested too deeply"),
        ("a: 1\n" * 2, "found duplicate key a"),
        ("a: !!python/object:os.stat_result {}\n", "could not determine a constructor"),
        ("a: [1\n", "expected ',' or ']'"),
        ("a: {b: 1, c}\n? [a]\n: 1\n", "found unhashable key"),
        ("- 1\n", "holds a list and not keys with values"),
        (f"a: {'9' * 5000}\n", "Exceeds the limit"),
        ("a: \x00\n", "special characters are not allowed"),
        ("a: x\n" + "#" * MAX_DATA_BYTES, f"it has more than {MAX_DATA_BYTES} bytes"),
    ],
)
def test_what_is_more_than_values_is_refused(tmp_path, monkeypatch, text, said):
    """At once, by its line, and without a look at the environment."""
    monkeypatch.setenv("SECRET", "hunter2")
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config.yaml .*{said}") as caught:
        read_data(tmp_path / "config.yaml")
    assert "hunter2" not in str(caught.value)


def test_only_regular_files_are_read(tmp_path):
    """A pipe, a folder, what is not there and what is no text end in one sentence; nothing waits."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, why in (
        ("pipe", "it is no regular file"),
        ("gone", "No such file"),
        (".", "a directory"),
        ("binary", ""),
    ):
        with pytest.raises(ValueError, match=f"{name} cannot be read.*{why}"):
            read_data(tmp_path / name, name)


def test_values_are_read_as_everywhere(tmp_path):
    """Numbers, texts and nested groups are what the configuration library makes of them; keys are texts."""
    (tmp_path / "a.yaml").write_text("a: 1e-3\n'on': {b: [1, 2.0, null, yes], c: '~'}\n7: ???\n")
    assert read_data(tmp_path / "a.yaml") == {"a": 0.001, "on": {"b": [1, 2.0, None, True], "c": "~"}, "7": "???"}
