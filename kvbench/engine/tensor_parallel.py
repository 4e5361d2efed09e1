"""One model in several processes: the first one leads, the others follow its calls.

The first process has the tasks, the journal and the requests. It broadcasts the model to load and every call of its
`Runner`, and all processes make the call, since each holds some of the heads. Errors of a call itself (a bad setting,
logits that are not finite) are raised by all alike, and the others wait for the next call. After any other error, such
as one of them lacking memory, the processes are out of step: the process ends, and torchrun ends the others.
"""

import weakref
from collections.abc import Callable
from typing import Any

from kvbench.engine.runner import NotFinite, Runner
from kvbench.kernels.memory import is_out_of_memory
from kvbench.models import processes
from kvbench.models.load import LoadedModel, load_model

# Collective calls; all other methods of a runner are made of these, or are local.
COLLECTIVE_CALLS = (
    "reserve",
    "read",
    "full_logits",
    "append",
    "try_step",
    "compact",
    "fork",
    "close",
    "bytes",
    "report",
)


class OneProcessFailed(RuntimeError):
    """A process of several could not do its part, and the others wait for it."""


class LeadingRunner(Runner):
    """`Runner` of the first process, which replays no prompts.

    Without memory in this process smaller groups cannot be tried, unlike in a single process.
    """

    _alive: "weakref.WeakSet[LeadingRunner]" = weakref.WeakSet()
    _count = 0

    def __init__(self, model: LoadedModel, *args: Any, **named: Any) -> None:
        named.pop("prompts", None)  # others would have to replay them, too
        LeadingRunner._count += 1
        self._number, self._leads = LeadingRunner._count, False
        processes.tell(("runner", self._number, [one._number for one in self._alive], args, named))
        super().__init__(model, *args, **named)
        self._alive.add(self)


def _led(name: str) -> Callable[..., Any]:
    """Call of a `Runner` that is broadcast to the other processes, unless it is part of one that was."""
    method = getattr(Runner, name)

    def call(self: LeadingRunner, *args: Any, **named: Any) -> Any:
        if self._leads:
            return method(self, *args, **named)
        processes.tell(("call", self._number, name, args, named))
        self._leads = True
        try:
            return method(self, *args, **named)
        except Exception as error:
            if name == "reserve" or not is_out_of_memory(error):
                raise
            raise OneProcessFailed(
                f"process 0 of {self.shape.ranks.size} could not {name}, since its device is full, and the others "
                "wait for it; give the command again with a smaller batch_size or more processes"
            ) from error
        finally:
            self._leads = False

    call.__name__, call.__doc__ = name, method.__doc__
    return call


for _name in COLLECTIVE_CALLS:
    setattr(LeadingRunner, _name, _led(_name))


def make_runner(model: LoadedModel, *args: Any, **named: Any) -> Runner:
    """A runner of a model: of one in several processes, the one that leads them."""
    return (LeadingRunner if model.tensor_parallel > 1 else Runner)(model, *args, **named)


def follow() -> None:
    """Does the part of every process but the first one, until that one ends."""
    processes.connect()
    model: LoadedModel | None = None
    runners: dict[int, Runner] = {}
    while True:
        kind, *message = processes.hear()
        if kind == "end":
            return
        try:
            if kind == "load":
                model = None
                runners.clear()
                model = load_model(message[0])
            elif kind == "runner":
                number, alive, args, named = message
                runners = {each: runners[each] for each in alive if each in runners}
                assert model is not None, "a model is loaded before anything runs it"
                runners[number] = Runner(model, *args, **named)
            else:
                number, name, args, named = message
                getattr(runners[number], name)(*args, **named)
        except (ValueError, NotFinite):
            continue  # the first process says so
        except Exception as error:
            if kind == "call" and message[1] == "reserve" and is_out_of_memory(error):
                continue  # it may take less
            raise
