"""Golden numbers: small inputs and the results that the methods and the quantisers must give on them."""

import json

from places import TESTS

COMMITTED = TESTS / "golden" / "methods.json"


def golden(group: str) -> dict:
    """One group of the committed golden numbers."""
    return json.loads(COMMITTED.read_text())[group]
