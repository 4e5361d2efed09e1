"""The cage that runs programs written by a model.

`run` is its one door: it asks for the user's consent, and `probe` whether the cage holds on this machine; where it does
not, it says what to do. `mechanism` has the ways to build one (`jail` is ours) and `needs` what a cage shows of the
file system. Each starts with `keeper`, which ties it to kvbench's life. `process` talks to the process inside, which
is `child`, in the values of `wire`.
"""
