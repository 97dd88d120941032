"""Processes for tests of many ranks: started once, used by test after test.

In: a function of a module beside this one, as "module:name", and its arguments. Out: what it returned on each rank, or the first rank's error.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

TIMEOUT_S = 120.0
IMPORTED = [
    "memfit.api",
    "memfit.communicator",
    "memfit.parameter_server",
    "torch._dynamo",
    "torch._decomp",
    "torch.distributed.fsdp",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "distributed.training",
    "distributed.storing",
    "distributed.serving",
]


class RankFailedError(AssertionError):
    """What a function raised on a rank, with its traceback there."""


class Ranks:
    """Processes that become the ranks of one process group after another."""

    def __init__(self) -> None:
        # Forked from a process that has imported everything and computed nothing: started in milliseconds.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(IMPORTED)
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        # As torchrun has it: a store that outlives each rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._serial = 0

    def run(self, size: int, function: str, *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Calls a function on ranks 0 to size - 1 of a new Gloo group; returns what each gave.

        Args:
            timeout_s: of the group's collectives.
        """
        self.begin(size, function, *args, timeout_s=timeout_s)
        answers = [self.answer(rank) for rank in range(size)]
        failed = [f"rank {rank}: {text}" for rank, (is_good, text) in enumerate(answers) if not is_good]
        if failed:
            raise RankFailedError("\n".join(failed))
        return [value for _, value in answers]

    def begin(self, size: int, function: str, *args: Any, timeout_s: float = 60.0) -> None:
        """Begins a call; `answer` ends it for each rank."""
        self._start(size)
        self._serial += 1
        for rank in range(size):
            self._pipes[rank].send((function, args, rank, size, self._store.port, str(self._serial), timeout_s))

    def answer(self, rank: int, timeout_s: float = TIMEOUT_S) -> tuple[bool, Any]:
        """Returns (True, result) or (False, text of the error) of a rank's call."""
        if not wait([self._pipes[rank]], timeout_s):
            self.close()
            return False, f"gave no answer for {timeout_s} s"
        try:
            return self._pipes[rank].recv()
        except EOFError:
            process = self._processes[rank]
            process.join(5.0)
            return False, f"the process ended with {process.exitcode}"

    @property
    def port(self) -> int:
        """Port of the store."""
        return self._store.port

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def _start(self, size: int) -> None:
        for rank, process in enumerate(self._processes):
            if not process.is_alive():
                self._processes[rank], self._pipes[rank] = self._spawn()
        while len(self._processes) < size:
            process, pipe = self._spawn()
            self._processes.append(process)
            self._pipes.append(pipe)

    def _spawn(self) -> tuple[ForkServerProcess, Connection]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        there.close()
        return process, here

    def close(self) -> None:
        """Ends all processes."""
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes.clear()
        self._pipes.clear()


def _serve(pipe: Connection) -> None:
    """The life of a process: one call after another."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    torch.set_num_threads(1)
    while True:
        try:
            function, args, rank, size, port, prefix, timeout_s = pipe.recv()
        except EOFError:
            return
        try:
            module, _, name = function.partition(":")
            begin_group(port, prefix, rank, size, timeout_s)
            try:
                answer: tuple[bool, Any] = True, getattr(importlib.import_module(module), name)(rank, size, *args)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        except BaseException as error:  # noqa: BLE001, told to the test
            answer = False, f"{error!r}\n{traceback.format_exc()}"
        pipe.send(answer)


def begin_group(port: int, prefix: str, rank: int, size: int, timeout_s: float) -> None:
    """Makes the default process group, over the store at a port of this machine."""
    store = PrefixStore(prefix, TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def same(found: Sequence[Any]) -> Any:
    """The value that all ranks gave."""
    assert all(value == found[0] for value in found), found
    return found[0]
