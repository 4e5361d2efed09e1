"""The cage that runs programs written by a model.

`run` is its one door: it asks for the user's consent, and `probe` whether the cage holds on this machine. `mechanism`
has the ways to build one (`jail` is ours), `process` talks to the process inside, which is `child`, in the values of
`wire`.
"""
