"""The hash of what a method computes: blind to words and names of its own, never to what decides."""

import ast
import copy
import re

import pytest

from kvbench.config.algorithm import algorithm_hash
from kvbench.methods.diffkv import DiffKV
from kvbench.results.provenance import method_files

SOURCE = '''"""A method."""
import torch
import kvbench.policy as kv
from kvbench.policy import Tier

LIMIT = 4


def _mean(scores, count):
    # a mean
    return scores / count


class Own(kv.Policy):
    window: int = 64

    def plan(self, view: kv.View):
        """Plans."""
        if self.window > LIMIT:
            raise ValueError(f"window={self.window} is too long")
        best = _mean(view.score, count=LIMIT).argmin(dim=-1)
        kept = [best + i for i in range(3)]
        return self._pick(kept, lambda value: value - best)

    def _pick(self, kept, rule):
        return torch.where(rule(kept) < 2, kept, Tier.EVICT)
'''

SAME = {
    "a local": (r"\bbest\b", "lowest"),
    "a variable of a comprehension": (r"\bi\b", "number"),
    "a variable of a comprehension, as a local is called": (r"\bi\b", "view_"),
    "a parameter of a lambda": (r"value: value", "v: v"),
    "a helper": (r"\b_mean\b", "_average"),
    "a private method": (r"\b_pick\b", "_choose"),
    "a constant's name": (r"\bLIMIT\b", "MOST"),
    "a docstring": (r"Plans\.", "Chooses the tokens."),
    "a moved comment": (r"    # a mean\n(.*)\n", r"\1  # the mean\n"),
    "an annotation": (r"view: kv.View\b", "view: kv.PrefillView"),
    "a further annotation": (r"best = ", "best: torch.Tensor = "),
    "an alias": (r"kvbench.policy as kv\b|\bkv\.", lambda hit: hit[0].replace("kv.", "p.").replace("as kv", "as p")),
    "a module's path": (r"from kvbench.policy import", "from kvbench.policy.tiers import"),
    "imports for types": ("LIMIT = 4", "if TYPE_CHECKING:\n    import numpy\nLIMIT = 4"),
    "an error": (r"ValueError\(.*\)", "WrongValue('window', self.window) from None"),
}
OTHER = {
    "a constant": ("LIMIT = 4", "LIMIT = 5"),
    "an operator": ("scores / count", "scores * count"),
    "a comparison": (r"rule\(kept\) < 2", "rule(kept) <= 2"),
    "an operation": ("argmin", "argmax"),
    "an exchange of two names": (r"return scores / count", "return count / scores"),
    "a function of another module": (r"torch\.where", "torch.lerp"),
    "an imported name": (r"Tier\b", "Rank"),
    "a setting's name": (r"\bwindow\b", "span"),
    "a setting's default": ("int = 64", "int = 32"),
    "a keyword": (r"dim=-1", "axis=-1"),
    "a condition of an error": ("> LIMIT", ">= LIMIT"),
    "a local in place of a constant": ("< 2, kept", "< LIMIT, kept"),
    "an outer name in place of an inner one": (r"value - best", "best - best"),
    "a private member of another module": (r"\.argmin\(dim=-1\)", "._argmin(dim=-1)"),
}


@pytest.fixture
def hashed(tmp_path):
    """Gives the hash of a source text."""

    def of(text):
        (tmp_path / "own.py").write_text(text)
        return algorithm_hash({"own": tmp_path / "own.py"})

    return of


@pytest.mark.parametrize("change", SAME)
def test_words_and_names_of_its_own_do_not_count(hashed, change):
    """What a file calls its variables, helpers and constants, says of them and raises leaves the hash as it is."""
    changed = re.sub(*SAME[change], SOURCE)
    assert changed != SOURCE and hashed(changed) == hashed(SOURCE)


@pytest.mark.parametrize("change", OTHER)
def test_what_decides_counts(hashed, change):
    """A changed value, operation, setting or exchange of names is another hash."""
    changed = re.sub(*OTHER[change], SOURCE)
    assert changed != SOURCE and hashed(changed) != hashed(SOURCE)


def test_private_names_of_other_modules_count(hashed):
    """Only what a file defines may be renamed: torch's private functions are told apart."""
    one, two = (SOURCE.replace("argmin", name) for name in ("_low", "_high"))
    assert hashed(one) != hashed(two)


def _changed(node):
    """The node with another value, operator or attribute; None where it has none."""
    node = copy.copy(node)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.BinOp):
        node.op = ast.Pow()
    elif isinstance(node, ast.Compare):
        node.ops = [ast.Is(), *node.ops[1:]]
    elif isinstance(node, ast.UnaryOp):
        return node.operand
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        node.attr += "_"
    else:
        return None
    return node


class _Nth(ast.NodeTransformer):
    """Changes one place of a tree where a value is computed."""

    def __init__(self, nth):
        self.left = nth

    def visit_Raise(self, node):
        return node

    def visit_Assert(self, node):
        return node

    def visit_AnnAssign(self, node):
        node.value = self.visit(node.value) if node.value else None
        return node

    def visit_arguments(self, node):
        return node

    def generic_visit(self, node):
        if (changed := _changed(node)) is not None:
            self.left -= 1
            if self.left == -1:
                return changed
        return super().generic_visit(node)


def test_a_change_anywhere_in_a_real_method_counts(hashed):
    """A number, operator or attribute by which DiffKV decides is in the hash: every tenth of them, one by one."""
    text = method_files(DiffKV)["kvbench.methods.diffkv"].read_text()
    before, nth = hashed(text), 0
    while (one := _Nth(nth)) and (changed := one.visit(ast.parse(text))) and one.left < 0:
        assert hashed(ast.unparse(changed)) != before
        nth += 10
    assert nth > 200
