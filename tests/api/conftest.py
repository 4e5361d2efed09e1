"""What the tests of `import kvbench` have in common."""

from collections.abc import Callable
from functools import partial

import pytest

from kvbench.models.load import LoadedModel


@pytest.fixture(scope="session")
def tiny_model(tiny_model: Callable[..., LoadedModel]) -> Callable[..., LoadedModel]:
    """The factory of small random models, which are narrow here, as for the tests of methods."""
    return partial(tiny_model, narrow=True)
