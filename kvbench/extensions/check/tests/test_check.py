"""`kvbench check`: the conformance tests on a method outside of the repository."""

import pytest

from kvbench.cli.main import main

METHOD = '''"""A method of somebody's own."""

from dataclasses import dataclass
from typing import Annotated

from kvbench.policy import EVICT, Number, Policy, PrefillPlan

# lossless: share=1.0


@dataclass(kw_only=True)
class Kept(Policy):
    """Keeps the first part of every prompt."""

    share: Annotated[float, Number(0, 1, above=True)] = 0.5

    def plan_prefill(self, view):
        tier_of = view.filled(0)
        tier_of[..., max(1, int(self.share * view.num_tokens)) :] = EVICT
        return PrefillPlan(tier_of=tier_of)
'''


@pytest.mark.long  # a process with torch
@pytest.mark.parametrize(("share", "code"), [("self.share", 0), ("0.5", 1)])
def test_a_users_method_is_held_to_the_tests(tmp_path, capfd, share, code):
    """A sound one passes; one that drops tokens at the settings that it calls lossless does not."""
    path = tmp_path / "kept_part.py"
    path.write_text(METHOD.replace("int(self.share", f"int({share}"))
    assert main(["check", str(path), "only=lossless"]) == code
    assert ("passed" if code == 0 else "failed") in capfd.readouterr().out


@pytest.mark.smoke
def test_a_folder_without_methods_is_refused(tmp_path, capsys):
    """It says what belongs there."""
    assert main(["check", str(tmp_path)]) == 2
    assert "has no method/NAME.yaml" in capsys.readouterr().err
    assert main(["check"]) == 2
