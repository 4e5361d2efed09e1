"""Programs that try to break out of the cage or to be graded right without an answer.

Each `_attack_*`, and each expression of `ATTACKS`, is one program, called with things outside to aim at (`folder`,
`port`, `abstract`, `pid`); each `_load_*` acts while its program is loaded.
All are bounded in count and time (at most 12 processes, 20 s, a few hundred MB asked for), so that a cage that fails
harms nothing. None gives the right answer by honest means.
"""
