"""A signal that arrives in a finalizer, out of which no exception comes, ends the command all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}

PROGRAM = """
import gc, os, signal, sys, time, weakref
from tritonmoe import signals

class Subject:
    def __del__(self):
        if KIND == "destructor":
            send()

def send(*_):
    signal.raise_signal(NUMBER)
    for i in range(1000):  # the handler runs at one of these
        pass
    print("finalized whole", file=sys.stderr)

def drop():
    subject = Subject()
    if KIND == "finalizer":
        weakref.finalize(subject, send)
    elif KIND == "callback":
        kept.append(weakref.ref(subject, send))
    elif KIND == "collection":
        weakref.finalize(subject, send)
        subject.itself = subject

KIND, NUMBER, kept = sys.argv[1], int(sys.argv[2]), []
try:
    with signals.raised():
        drop()
        gc.collect()
        time.sleep(20)  # which the signal ends
        print("lost", file=sys.stderr)
except KeyboardInterrupt:
    sys.exit(130)
"""
AT_EXIT = """
import signal, sys, weakref
# first
from tritonmoe import generate

class Subject:
    pass

subject = Subject()
weakref.finalize(subject, signal.raise_signal, NUMBER)
sys.argv = ["tritonmoe", "--help"]
sys.exit(generate.command())
"""


@pytest.mark.parametrize("kind", ["destructor", "finalizer", "callback", "collection"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_in_a_finalizer(kind: str, number: int, code: int) -> None:
    done = run(PROGRAM, kind, str(int(number)))
    assert (done.returncode, done.stderr) == (code, b"")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_in_a_finalizer_just_before_the_end(number: int, code: int) -> None:
    """The signal that was to be sent again is sent when its handlers are gone."""
    done = run(
        PROGRAM.replace("sleep(20)", "sleep(0)").replace('print("lost", file=sys.stderr)', "pass"),
        "finalizer",
        str(int(number)),
    )
    assert (done.returncode, done.stderr) == (code, b"")


def test_what_is_ignored_stays_ignored() -> None:
    program = AT_EXIT.replace("# first", "signal.signal(NUMBER, signal.SIG_IGN)")
    done = run(program.replace("NUMBER", str(int(signal.SIGINT))))
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_in_a_finalizer_at_exit(number: int) -> None:
    done = run(AT_EXIT.replace("NUMBER", str(int(number))))
    assert (done.returncode, done.stderr) == (-number, b"")
    assert b"exit codes" in done.stdout


def test_other_exceptions_in_finalizers_are_shown() -> None:
    program = PROGRAM.replace("signal.raise_signal(NUMBER)", 'raise ValueError("ours")')
    program = program.replace("sleep(20)", "sleep(0)")
    done = run(program, "destructor", "0")
    assert done.returncode == 0
    assert b"ValueError: ours" in done.stderr
    assert b"lost" in done.stderr, "the check on the checks: nothing was raised"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, env=ENVIRONMENT, timeout=60, check=False
    )
