"""Python in processes of its own, which a test starts and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def begin(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Run `code` on this checkout, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], sent: signal.Signals) -> str:
    """Send a signal, SIGINT to the whole group as a terminal does; returns standard error."""
    try:
        os.killpg(process.pid, sent) if sent == signal.SIGINT else process.send_signal(sent)
        return process.communicate(timeout=20)[1]
    finally:
        process.kill()
