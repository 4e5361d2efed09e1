"""Short forms of settings: without their group, and a model by its path."""

import pytest
from refusals import refused

from kvbench.config.compose import compose
from kvbench.config.shorthand import every_setting, long_form


@pytest.mark.parametrize(
    ("words", "name", "long"),
    [
        ("method=snapkv budget=0.5", "config", "method=snapkv method.budget=0.5"),
        ("budget=0.5 method=snapkv", "config", "method.budget=0.5 method=snapkv"),
        ("-m method=full,snapkv budget=0.5,0.25", "config", "-m method=full,snapkv method.budget=0.5,0.25"),
        ("method=glob(s*) budget=0.5", "config", "method=glob(s*) method.budget=0.5"),
        ("length=512 items=2", "config", "task.length=512 task.items=2"),
        ("task=ruler length=512", "config", "task=ruler length=512"),  # which has lengths
        ("preset=tiny model=random", "config", "model.preset=tiny model=random"),
        ("temperature=0.5 rotation=hadamard", "config", "protocol.temperature=0.5 store.rotation=hadamard"),
        ("allocation=ada method=snapkv", "config", "method.allocation=ada method=snapkv"),
        ("limit=3 seed=1 method.budget=0.5 +x=1", "config", "limit=3 seed=1 method.budget=0.5 +x=1"),
        ("method=kivi budget=0.5", "config", "method=kivi budget=0.5"),  # which has none
        ("method=snapkv budget=0.5 length=64", "command/bytes", "method=snapkv method.budget=0.5 length=64"),
        ("method=snapkv --cfg job -p task length=600", "config", "method=snapkv --cfg job -p task task.length=600"),
    ],
)
def test_a_setting_needs_no_group_where_one_alone_has_it(words, name, long):
    """The choices that the words make say which group has it; a setting of the command itself stays one."""
    assert long_form(words.split(), name) == long.split()


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("name=x", ("setting-unknown", "name", "task.name", "model.name")),
        ("chunk=4", ("setting-unknown", "chunk", "method.chunk")),
    ],
)
def test_a_setting_of_several_groups_is_refused(word, named):
    """It says which there are."""
    with refused(*named):
        long_form([word, "method=snapkv"])


def test_a_model_by_its_path(tmp_path):
    """A folder, a hub id and a .gguf file are chosen as `model.path`; a path that is not there is named."""
    folder = tmp_path / "some model"
    folder.mkdir()
    assert long_form(["model=Qwen/Qwen2.5-0.5B"]) == ["model=hf", "model.path=Qwen/Qwen2.5-0.5B"]
    assert compose([f"model={folder}", "dtype=float32"]).model.path == str(folder)
    assert compose([f"model={folder}"]) == compose(["model=hf", f"model.path='{folder}'"])
    assert long_form(["model=a/b.gguf"]) == ["model=gguf", "model.path=a/b.gguf"]
    assert long_form(["model=smollm2-135m"]) == ["model=smollm2-135m"]
    with refused("file-missing", "model"):
        long_form([f"model={tmp_path}/nothing"])


def test_an_unknown_setting_names_the_nearest_inside_a_group():
    """The settings of the choices that were made are candidates."""
    assert {"method.budget", "task.length", "limit"} <= set(every_setting(["method=snapkv"]))
    with refused("setting-unknown", "bitts", "method.bits"):
        compose(["method=kivi", "bitts=2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["++hydra.sweeper.params.KEY=3"], ("command-line", None, "hydra.sweeper.params.KEY=3")),
        (["model=Qwen/x,b"], ("setting-value", "model", "model=Qwen/x,b")),
    ],
)
def test_the_librarys_own_faults_are_explained(words, message):
    """An assertion of the configuration library names the word; its search path is not shown."""
    with refused(*message) as raised:
        compose(words, with_choices=True)
    assert "provider=" not in str(raised.value)
