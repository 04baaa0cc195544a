"""Worker processes for tests with several ranks, started once and kept.

A process that imports torch takes seconds to start, so that tests share them::

    def work(rank: int, x: float) -> float: ...        # at module level: it is sent by name

    def test_work(pool: Pool) -> None:
        assert pool.run(work, 2.0) == [4.0, 5.0]       # one result of each rank

Each call of ``run`` has a process group (gloo) of its own, so that nothing of one test is left for
the next. What a rank raises is raised in the test as ``RankFailedError``; a rank that waits for it
in a collective fails at once, as its connection is closed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.ranks import worker

IMPORTED = [
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]
"""What takes long to import, and one process does for all ranks."""

GRACE = 5.0  # seconds that the others have left, once a rank has raised


class RankFailedError(Exception):
    """At least one rank raised, died or did not answer in time.

    Attributes:
        failures: What happened, by rank. The earliest one's exception is ``__cause__``.
    """

    def __init__(self, failures: dict[int, worker.Failure]) -> None:
        self.failures = failures
        told = [f"rank {rank}: {each.text}" for rank, each in sorted(failures.items())]
        super().__init__("\n".join(told))

    def original(self, rank: int) -> BaseException | None:
        """Return what the rank raised; None if it did not raise or could not be pickled."""
        return self.failures[rank].original if rank in self.failures else None


class Pool:
    """Ranks, each a process; started at the first ``run``, and again after they were killed."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.num_ranks = num_ranks
        self._ranks: list[_Rank] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._num_runs = 0

    def run(
        self,
        work: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        group_timeout: float = 20.0,
    ) -> list[Any]:
        """Call ``work(rank, *args)`` on all ranks and return their results.

        Args:
            work: A function at module level, with the default process group ready.
            *args: What pickle takes; the same for all.
            timeout: Seconds after which all workers are killed.
            group_timeout: Seconds after which a collective of the process group gives up.

        Raises:
            RankFailedError: A rank raised, died or took too long.
        """
        __tracebackhide__ = True  # the failed test shows the ranks' tracebacks
        if not self._ranks:
            self._ranks = [_Rank(rank, self.num_ranks) for rank in range(self.num_ranks)]
            for rank in self._ranks:  # so that the time limit counts the work alone
                rank.connection.recv_bytes()
        self._num_runs += 1
        task = worker.Task(
            work, args, str(Path(self._folder.name, f"store{self._num_runs}")), group_timeout
        )
        message = pickle.dumps(task)
        for rank in self._ranks:
            # One that has died is found when its answer is read.
            with contextlib.suppress(OSError):
                rank.connection.send_bytes(message)
        answers = self._answers(time.monotonic() + timeout)
        failures = {
            rank: each for rank, each in answers.items() if isinstance(each, worker.Failure)
        }
        if failures:
            earliest = min(failures.values(), key=lambda each: each.when)
            raise RankFailedError(failures) from earliest.original
        return [answers[rank].value for rank in range(self.num_ranks)]

    def _answers(self, deadline: float) -> dict[int, worker.Done | worker.Failure]:
        answers: dict[int, worker.Done | worker.Failure] = {}
        begun = time.monotonic()
        while len(answers) < self.num_ranks:
            waiting = {rank.connection: rank for rank in self._ranks if rank.number not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                answer = answers[rank.number] = rank.answer()
                if isinstance(answer, worker.Failure):
                    deadline = min(deadline, time.monotonic() + GRACE)
        late = [rank for rank in self._ranks if rank.number not in answers]
        seconds = time.monotonic() - begun
        for rank in late:
            where = rank.where()
            text = f"no answer after {seconds:.0f} s, killed\n{where}"
            answers[rank.number] = worker.Failure(text, None, time.monotonic())
        if late or not all(rank.process.is_alive() for rank in self._ranks):
            self._kill()
        return answers

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks = []

    def close(self) -> None:
        """End the workers."""
        self._kill()
        self._folder.cleanup()


class _Rank:
    """The parent's side of one worker."""

    def __init__(self, number: int, num_ranks: int) -> None:
        self.number = number
        self.connection: Connection[Any, Any]
        forking = multiprocessing.get_context("forkserver")
        forking.set_forkserver_preload(IMPORTED)
        self.connection, theirs = forking.Pipe()
        self._stack = tempfile.NamedTemporaryFile(prefix="stack", mode="r")  # noqa: SIM115
        self.process = forking.Process(
            target=worker.serve, args=(theirs, number, num_ranks, self._stack.name), daemon=True
        )
        self.process.start()
        theirs.close()

    def answer(self) -> worker.Done | worker.Failure:
        try:
            answer: worker.Done | worker.Failure = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            text = f"the process died with exit code {self.process.exitcode}\n{self._stack.read()}"
            return worker.Failure(text.strip(), None, time.monotonic())
        return answer

    def where(self) -> str:
        """Return the Python stack at which the process stands."""
        if self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, worker.TELL_STACK)
        deadline, stack = time.monotonic() + 5.0, ""
        while not stack.endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.1)
            stack += self._stack.read()
        return stack

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self._stack.close()
