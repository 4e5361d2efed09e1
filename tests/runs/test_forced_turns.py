"""Which answers another run is forced to give: those of every turn, from the records of the full cache."""

import dataclasses

from fake_parts import FakeTask

from kvbench.engine.requests import Request, Turn
from kvbench.runs.experiment import Experiment


def test_every_turn_is_forced_with_its_own_answer():
    """Of the first repeat; a sample without an answer is forced to give none, in no turn."""
    turns = (Turn(tokens=(7, 8), gold=(1,)), Turn(tokens=(9,), gold=(2,)))
    asked = [
        Request(sample_id="talk", subset="a", segments=((1, 2),), gold=(3,), turns=turns),
        Request(sample_id="plain", subset="a", segments=((1,),), gold=(3,)),
        Request(sample_id="failed", subset="a", segments=((1,),), gold=(3,), turns=turns),
    ]
    fields = {item.name: None for item in dataclasses.fields(Experiment)} | {"task": FakeTask(asked)}
    records = [
        {"sample_id": "talk", "repeat": 0, "turns": [{"token_ids": [4]}, {"token_ids": [5, 5]}], "token_ids": [6]},
        {"sample_id": "talk", "repeat": 1, "turns": [{"token_ids": [0]}, {"token_ids": [0]}], "token_ids": [0]},
        {"sample_id": "plain", "repeat": 0, "token_ids": [6, 6]},
        {"sample_id": "failed", "repeat": 0, "turns": [], "token_ids": []},
    ]
    forced = {request.sample_id: request for request in Experiment(**fields).forcing(records).task.requests}
    golds = {name: [request.gold, *(turn.gold for turn in request.turns)] for name, request in forced.items()}
    assert golds == {"talk": [(4,), (5, 5), (6,)], "plain": [(6, 6)], "failed": [(), (), ()]}
    assert [turn.tokens for turn in forced["talk"].turns] == [(7, 8), (9,)]
