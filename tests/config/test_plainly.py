"""Words that compose without Hydra, and Hydra's reading of them."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from kvbench.config import files
from kvbench.config.compose import choices, compose
from kvbench.config.plainly import NeedsGrammar, compose_plainly, plain_choices, plain_value

VALUES = (
    "1 0 -1 1.5 -0.5 abc a-b a/b.c /a/x ./x ../x 32k null None true on yes 8GiB llama3.1-8b [1,2] [a,b.c] [[1]] a. "
    "q8_0-q4_0 1-2 1.2.3 0x10 1/2 _x 0.50 nanx [true,null]"
).split()
GRAMMAR = "01 1. 1e5 1_000 NULL True nan inf [] -a 50%seen a:b ~ 9999999999999999999 .5 -0 {a:1} 'a' a,b $x".split()


@pytest.mark.parametrize("text", [*VALUES, "[a, b]"])
def test_a_plain_value_is_what_hydra_reads(text):
    """The value and its type."""
    value, theirs = plain_value(text), OverridesParser.create().parse_override(f"key={text}").value()
    assert value == theirs and type(value) is type(theirs)


@pytest.mark.parametrize("text", GRAMMAR)
def test_what_needs_a_grammar_is_left_to_hydra(text):
    """Numbers in other forms, quotes, mappings, several values."""
    with pytest.raises(NeedsGrammar):
        plain_value(text)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bytes", []),
        ("bytes", ["method=kivi", "method.bits=2", "length=[1,2]", "answer=3"]),
        ("bytes", ["bits=2", "method=kivi", "store.windows=method"]),
        ("bytes", ["method=snapkv", "budget=0.5", "out=x.csv"]),
        ("advise", ["context=32k", "batch=16", "rows=null", "why=true", "margin=0.05", "results_dir=a/b"]),
        ("engine", []),
        ("bench", ["what=all"]),
    ],
)
def test_plain_words_compose_as_hydra_composes_them(name, words):
    """Every setting, the choice of the method and its defaults."""
    plain = compose_plainly(name, words)
    theirs = compose(words, name=f"command/{files.full_command(name)}", with_choices=True)
    assert plain is not None and OmegaConf.to_container(plain) == OmegaConf.to_container(theirs)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bytes", ["nope=1"]),
        ("bytes", ["method=nope"]),
        ("bytes", ["method.nope=1"]),
        ("bytes", ["store=1"]),
        ("bytes", ["method=full", "method=int4"]),
        ("bytes", ["+length=1"]),
        ("bytes", ["method=int4", "method.protect_layers=[0,1]"]),
        ("advise", ["metric='a b'"]),
        ("calibrate", []),
    ],
)
def test_other_words_and_files_are_left_to_hydra(name, words):
    """Which says what is wrong with them, or reads them."""
    assert compose_plainly(name, words) is None


@pytest.mark.parametrize("words", [[], ["method=a"], ["method=a,b", "length=5"], ["method=[a,b]"]])
def test_plain_choices_are_hydras(words):
    """One, several, none."""
    assert plain_choices(words, "method") == choices(words, "method")


def test_choices_of_a_pattern_are_left_to_hydra():
    """A glob needs the list of what there is."""
    assert plain_choices(["method=glob(a*)"], "method") is None
