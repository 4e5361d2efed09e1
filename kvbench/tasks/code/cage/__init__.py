"""The cage that runs programs written by a model.

`run` is its one entry point: it requires the user's consent, and a `probe` of the cage on this machine; if that fails,
the error has a remedy. `mechanism` has the ways to build one, and each starts with `jail`. `process` talks to the
process inside, which is `child`, in the values of `wire`.
"""
