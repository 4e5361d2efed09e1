"""Which stored runs a command reads."""

import pytest

from kvbench.evidence.load import fits_settings


@pytest.mark.parametrize(
    ("settings", "where", "fits"),
    [
        ({"budget": 0.5}, {"budget": 0.5}, True),
        ({"budget": 0.5}, {"budget": [0.25, 0.5]}, True),
        ({"budget": 0.5}, {"budget": [0.25, None]}, False),
        ({"bits": 2}, {"budget": [0.25, None]}, True),
        ({"bits": 2}, {"budget": [0.25]}, False),
        ({"bits": 2}, {"budget": None}, False),
        ({"budget": None}, {"budget": None}, True),
        ({"budget": "50%seen"}, {"budget": "50%seen"}, True),
    ],
)
def test_where(settings, where, fits):
    """One value, one of several, and runs without the setting where a list has a null."""
    assert fits_settings(settings, where) is fits
