"""Processes for tests that start and kill many: forked from one that has imported and compiled everything already, so
that a start costs milliseconds. Run as a program it is that process; `Zygote` is how a test talks to it.

One JSON object a line: {"call": "module:function", "kwargs": {...}, "output": path} is answered with {"pid": ...}. A child ends
with its zygote, and the zygote when its input ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_DIE_WITH_PARENT = 1


class Zygote:
    """`warm_up` is a "module:function" that it calls before the first fork; it must leave no thread behind."""

    def __init__(self, warm_up: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, warm_up],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._answer()

    def spawn(self, call: str, output: Path, **kwargs: Any) -> int:
        """Process id of a child that runs `call`; what it prints goes to `output`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": call, "kwargs": kwargs, "output": str(output)}) + "\n")
        self._process.stdin.flush()
        return int(self._answer()["pid"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the zygote has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kill(pid: int, *, deadline_s: float = 10.0) -> None:
    """SIGKILL, and wait until the process is gone."""
    end = time.monotonic() + deadline_s
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if not is_alive(pid):
            return
        assert time.monotonic() < end, f"process {pid} is still there"
        time.sleep(0.002)


def _resolve(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _child(request: dict[str, Any], parent: int) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            return
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        random.seed()  # or all children would draw the same numbers
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _resolve(request["call"])(**request["kwargs"])
        code = 0
    except BaseException:  # noqa: BLE001 - printed, and the end of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    sys.path[:0] = [str(ROOT)]
    _resolve(sys.argv[1])()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for: a killed one is gone
    parent = os.getpid()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(request, parent)
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    main()
