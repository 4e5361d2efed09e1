"""The cage in other surroundings: a container with few users, kvbench as its first process, no user namespaces."""

import os
import re
import sys
import time
from dataclasses import replace

import pytest
from cage_users import CASES, require, somebody
from selection import FULL

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make these surroundings")
_NEW_USER, _NEW_PID = 0x10000000, 0x20000000
# A container: namespaces, the ids 0 to 65535 where users are among them, a user, and how many namespaces may be made.
CONTAINER = """
import ctypes, os, sys
spaces, user, most = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
ready, tell = os.pipe()
wait, go = os.pipe()
child = os.fork()
if child == 0:
    if ctypes.CDLL(None).unshare(spaces):
        os._exit(70)
    os.write(tell, b"+")
    os.read(wait, 1)
    if most:
        with open("/proc/sys/user/max_user_namespaces", "w") as stream:
            stream.write(most)
    inner = os.fork()
    if inner:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1]))
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.execv(sys.argv[4], sys.argv[4:])
os.close(tell)
if os.read(ready, 1) and spaces & 0x10000000:
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{child}/{name}", "w") as stream:
            stream.write("0 0 65536")
os.write(go, b"+")
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
"""


def container(user, spaces, most=""):
    """Somebody in a container of its own."""
    number = 0 if user == "root" else 65534
    start = (sys.executable, "-I", "-S", "-c", CONTAINER, str(spaces), str(number), str(most))
    return replace(somebody(user), surroundings=start)


@pytest.fixture
def mark():
    """Text on the command lines of a test's cages."""
    return f"kvbench-places-{os.getpid()}-{time.monotonic_ns()}"


OWN = [case for case in CASES if FULL or case.values in [("nobody", "user namespaces"), ("root", "namespaces by root")]]
BY_ROOT = [case for case in CASES if FULL or case.values[1].endswith("by root")]
PROBE = """
import os
print(json.dumps([os.getpid(), what_is_missing(mechanisms()[given["name"]])]))
"""


@pytest.mark.parametrize(("user", "name"), OWN)
def test_kvbench_is_the_first_process_of_a_container(user, name, mark):
    """Its number is then that of the first process in every cage too, which is not taken for an escape."""
    require(user, name)
    number, missing = container(user, _NEW_PID).run(PROBE, mark, name=name)
    assert (number, missing) == (1, [])


@pytest.mark.parametrize(("user", "name"), BY_ROOT)
def test_the_cage_holds_in_a_container_with_few_users(user, name, mark):
    """The root of a container that has 65536 users gives each cage one of them."""
    require(user, name)
    _, missing = container(user, _NEW_USER).run(PROBE, mark, name=name)
    assert missing == []


REFUSED = """
from kvbench.tasks.code.cage.run import CageRefused, run
try:
    run("def f(): pass", "f", [[]], allow_code_execution=True)
except CageRefused as error:
    print(json.dumps(str(error)))
"""


def test_where_no_user_namespaces_are_allowed_the_advice_says_so(mark):
    """The setting is named, and bubblewrap, which needs them too, is not recommended; for root there is still a way."""
    require("nobody", "user namespaces")
    message = container("nobody", _NEW_USER, 0).run(REFUSED, mark)
    assert re.search("allows no user namespaces, which bubblewrap needs as well.*max_user_namespaces=16384", message)
    assert not re.search("[Ii]nstall bubblewrap|Docker", message)
    require("root", "namespaces by root")
    _, missing = container("root", _NEW_USER, 0).run(PROBE, mark, name="namespaces by root")
    assert missing == []
