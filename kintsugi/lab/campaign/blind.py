"""Blind diagnosis: a process of its own that receives a run folder and no other information.

`python -m kintsugi.lab.campaign.blind RUN_DIR PIPE` diagnoses repeatedly and writes every diagnosis to standard output,
one JSON object a line, until the pipe that it inherited ends. `BlindDiagnosis` is the laboratory's side.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path
from typing import IO

import msgspec

from kintsugi.diagnosis.verdict import Diagnosis
from kintsugi.errors import DeadlineExceeded, KintsugiError, ProcessDied
from kintsugi.runtime.clock import SYSTEM_CLOCK
from kintsugi.runtime.processes import Processes, SystemProcesses
from kintsugi.runtime.waits import wait

EVERY_S = 0.5
REST = 2.0
"""Pause after a diagnosis, in multiples of its duration: the diagnosis must not become the load that it finds."""
END_DEADLINE_S = 5.0


class Look(msgspec.Struct, frozen=True):
    """One diagnosis with its time."""

    t: float
    diagnosis: Diagnosis | None
    problem: str = ""
    """Reason why there is none, for example that the run has written nothing yet."""


def main(run_dir: Path, *, lifeline: int, out: IO[bytes]) -> int:
    """Body of the process."""
    from kintsugi.diagnosis import Follower

    follower: Follower | None = None
    encoder = msgspec.json.Encoder()
    poller = select.poll()
    poller.register(lifeline, select.POLLIN | select.POLLHUP)
    while True:
        before = SYSTEM_CLOCK.monotonic()
        try:
            follower = follower or Follower(run_dir)
            diagnosis, problem = follower.look(), ""
        except KintsugiError as error:
            diagnosis, problem = None, str(error)
        took_s = SYSTEM_CLOCK.monotonic() - before
        out.write(encoder.encode(Look(SYSTEM_CLOCK.wall(), diagnosis, problem)) + b"\n")
        out.flush()
        if _ended(poller, within_s=max(EVERY_S - took_s, REST * took_s)):
            return 0


def _ended(poller: select.poll, *, within_s: float) -> bool:
    """Whether the laboratory closed its end of the pipe; nothing is ever written to it."""
    try:
        wait(
            lambda remaining_s: poller.poll(remaining_s * 1000) or None,
            whom="the laboratory",
            what="the next look",
            timeout_s=within_s,
        )
    except DeadlineExceeded:
        return False
    return True


class BlindDiagnosis:
    """Diagnoses a run from now on; `looks` returns the results since the last call."""

    def __init__(self, run_dir: Path, *, folder: Path, processes: Processes | None = None) -> None:
        """Start the process; `folder` gets `blind.jsonl` with every result and `blind.log` with its errors, both
        appended to."""
        self._log = folder / "blind.log"
        self._decoder = msgspec.json.Decoder(Look)
        self.all: list[Look] = []
        path = folder / "blind.jsonl"
        lifeline_read, self._lifeline = os.pipe2(os.O_CLOEXEC)
        try:
            with path.open("ab") as said, self._log.open("ab") as errors:
                self._process = (processes or SystemProcesses()).spawn(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "kintsugi.lab.campaign.blind",
                        str(run_dir),
                        str(lifeline_read),
                    ],
                    pass_fds=(lifeline_read,),
                    stdout=said,
                    stderr=errors,
                    new_session=True,
                )
        finally:
            os.close(lifeline_read)
        self._said = path.open("rb")
        self._said.seek(0, os.SEEK_END)
        self._unread = b""

    def looks(self) -> list[Look]:
        """Return new results; ProcessDied when the process has ended."""
        ended = self._process.ended()
        *lines, self._unread = (self._unread + self._said.read()).split(b"\n")
        new = [self._decoder.decode(line) for line in lines]
        if ended and not new:
            raise ProcessDied(f"the blind diagnosis ended: {self._log.read_text(errors='replace')[-500:]}")
        self.all += new
        return new

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait_ended(whom="the blind diagnosis", timeout_s=END_DEADLINE_S)

    def close(self) -> None:
        os.close(self._lifeline)
        try:
            self._process.wait_ended(whom="the blind diagnosis", timeout_s=END_DEADLINE_S)
        except DeadlineExceeded:
            self.kill()
        self._process.close()
        self._said.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), lifeline=int(sys.argv[2]), out=sys.stdout.buffer))
