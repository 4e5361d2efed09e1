"""The cage that runs programs written by a model.

`run` is its one door: it asks for the user's consent, and `probe` whether the cage holds on this machine; where it does
not, it says what to do. `mechanism` has the ways to build one, and each starts with `jail`. `process` talks to the
process inside, which is `child`, in the values of `wire`.
"""
