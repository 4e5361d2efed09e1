"""Errors about stored results that a user can act on, except those of a journal and a record."""

from kvbench.errors import KvbenchError


class NoResults(KvbenchError, code="results-missing"):
    """No stored run fits the filters, or those that do hold nothing of what was to be shown."""


class OtherRun(KvbenchError, code="run-differs"):
    """Stored answers, parts or requests are of another run than the one that is to use them."""


class NotMeasured(KvbenchError, code="not-measured"):
    """Samples or workers failed, so that there is no number."""
