"""Which methods keep whatever follows the prompt whole: streams and whole texts say so, or refuse them."""

from engine_helpers import open_settings

from kvbench.config import files
from kvbench.config.methods import method_settings
from kvbench.config.settings import as_dict
from kvbench.runs.parts import make_policy

# By the papers: these choose among the prompt's tokens once, and store all tokens in 16 bits.
PROMPT_ONLY = {
    *("cake", "fastgen", "headkv", "pyramid_infer"),
    *("ada_pyramidkv", "ada_snapkv", "chunkkv", "critical", "expected_attention", "full", "h2o_factory", "keydiff"),
    *("knorm", "kv_compress", "kvpress", "kvzip", "lagkv", "pyramidkv", "random", "snapkv", "think", "vatp"),
}


def made(name, **changes):
    """The policy of a method's own file."""
    return make_policy(as_dict(method_settings(name)) | open_settings(name) | changes)


def test_which_methods_act_on_the_prompt_alone() -> None:
    """Evicting while decoding, lower precision, a buffer before it, and reading in part are all more than that."""
    assert {name for name in files.options("method") if made(name).prompt_only} == PROMPT_ONLY


def test_settings_decide_too() -> None:
    """The same method acts on the answer once it evicts every so many steps, or stores it at a lower precision."""
    assert made("snapkv", tier="native").prompt_only and not made("snapkv", tier="k8v4").prompt_only
    assert not made("snapkv", decode_every=64).prompt_only and not made("kv_compress", continual=True).prompt_only
    assert made("h2o", one_shot=True).prompt_only and not made("full", tier="int8").prompt_only
