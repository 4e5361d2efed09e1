"""Hostile programs for the cage, and something outside for them to aim at."""

import ast
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.tasks.code.cage.probe import check_isolation

_MISSING = "; ".join(check_isolation().missing)
needs_cage = pytest.mark.skipif(check_isolation().mechanism is None, reason=f"no isolation here: {_MISSING}")
HOSTILE = Path(__file__).parent / "tasks" / "code" / "hostile"
# The answer depends on what each call is given, so that no constant is right.
ROW = {
    "task_id": "Hostile/0",
    "prompt": "def attack(folder, port, abstract, pid):\n",
    "entry_point": "attack",
    "canonical_solution": "    return f'{len(folder)}:{port * 7919 % 10007}:{pid ^ 1234}'\n",
    "atol": 0,
}


def hostile_programs() -> dict[str, str]:
    """Every program of the folder, by name: a file and the call of one of its functions."""
    programs = {}
    for path in sorted(HOSTILE.glob("[a-z]*.py")):
        text = path.read_text()
        for node in ast.parse(text).body:
            name = getattr(node, "name", "")
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ATTACKS":
                for key, expression in ast.literal_eval(node.value).items():
                    end = f"\ndef attack(folder, port, abstract, pid):\n    return {expression}\n"
                    programs[f"{path.stem}-{key}"] = text + end
            elif name.startswith("_attack_"):
                end = f"\ndef attack(*arguments):\n    return {name}(*arguments)\n"
                programs[f"{path.stem}-{name[8:]}"] = text + end
            elif name.startswith("_load_"):
                end = f"\n{name}()\ndef attack(*arguments):\n    pass\n"
                programs[f"{path.stem}-at-load-{name[6:]}"] = text + end
    return programs


class Target:
    """Things outside for hostile programs to aim at, and whether they were hit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "precious").write_text("kept")
        (folder / "precious").chmod(0o666)
        folder.chmod(0o777)
        self.tcp, self.udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.port = self.tcp.getsockname()[1]
        self.udp.bind(("127.0.0.1", self.port))
        self.local = socket.socket(socket.AF_UNIX)
        self.abstract = f"kvbench-target-{os.getpid()}-{self.port}"
        self.local.bind("\0" + self.abstract)
        self.local.listen()
        self.victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        for link in (self.tcp, self.udp, self.local):
            link.setblocking(False)

    def row(self) -> dict:
        arguments = [[str(self.folder), self.port + extra, self.abstract, self.victim.pid] for extra in (0, 1, 2)]
        # Only the first call aims at the real port; the others keep a constant answer from being right.
        return {**ROW, "base_input": arguments[:2], "plus_input": arguments[2:]}

    def hits(self) -> list[str]:
        found = []
        if self.folder.stat().st_mode & 0o7777 != 0o777 or os.listdir(self.folder) != ["precious"]:
            found.append("folder changed")
        if (self.folder / "precious").read_text() != "kept":
            found.append("file changed")
        for name, link in (("tcp", self.tcp), ("local", self.local)):
            try:
                link.accept()
                found.append(f"{name} connected")
            except BlockingIOError:
                pass
        try:
            self.udp.recv(1)
            found.append("udp received")
        except BlockingIOError:
            pass
        if self.victim.poll() is not None:
            found.append("victim killed")
        return found

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for link in (self.tcp, self.udp, self.local):
            link.close()
