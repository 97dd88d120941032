"""Visits of a block's weights that fail or are broken off: what is here, what is held, what comes next."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memfit.core.errors import AwayError
from memfit.core.tiers import Tier
from memfit.homes import MemoryHome
from memfit.homes.home import DONE, TransferHandle
from memfit.homes.weights import BlockWeights


class Broken:
    """A transfer that is broken off in its first wait, and over in the next."""

    def __init__(self, error: BaseException) -> None:
        self._error: BaseException | None = error

    def wait(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


class Failing(MemoryHome):
    """Gives the values, and fails where it is told to."""

    at_start: BaseException | None = None
    at_wait: BaseException | None = None

    def visit(self, into: torch.UntypedStorage, into_offset: int = 0) -> TransferHandle:
        error, self.at_start = self.at_start, None
        if error is not None:
            raise error
        super().visit(into, into_offset).wait()
        error, self.at_wait = self.at_wait, None
        return DONE if error is None else Broken(error)


class Subject:
    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.randn(256))
        self.values = self.weight.detach().clone()
        self.block = BlockWeights(0, "block", [("weight", self.weight)])
        self.home = Failing(self.block.nbytes, tier=Tier.HOST, device=torch.device("cpu"), stream=None)
        self.block.move_in(self.home)

    def assert_away(self) -> None:
        assert not self.block.is_here
        assert self.block.storage.nbytes() == 0
        with pytest.raises(AwayError):
            torch.neg(self.weight)

    def assert_usable(self) -> None:
        self.block.fetch()
        self.block.wait()
        assert torch.equal(self.weight.detach(), self.values)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no staging"), OSError("disk"), KeyboardInterrupt()])
def test_a_visit_that_cannot_begin_holds_no_memory(error: BaseException) -> None:
    subject = Subject()
    subject.home.at_start = error
    with pytest.raises(type(error)):
        subject.block.fetch()
    subject.assert_away()
    subject.assert_usable()


@pytest.mark.parametrize("ends", ["wait", "release"])
def test_a_transfer_that_failed_leaves_nothing_here(ends: str) -> None:
    subject = Subject()
    subject.home.at_wait = OSError("disk")
    subject.block.fetch()
    with pytest.raises(OSError, match="disk"):
        getattr(subject.block, ends)()
    subject.assert_away()
    subject.assert_usable()


@pytest.mark.parametrize("ends", ["wait", "release"])
def test_ctrl_c_in_a_wait_keeps_the_memory_that_the_transfer_still_writes_to(ends: str) -> None:
    subject = Subject()
    subject.home.at_wait = KeyboardInterrupt()
    subject.block.fetch()
    with pytest.raises(KeyboardInterrupt):
        getattr(subject.block, ends)()
    assert subject.block.storage.nbytes() == subject.block.nbytes
    with pytest.raises(AwayError):  # nobody waited for the values to come
        torch.neg(subject.weight)
    subject.block.release()
    subject.assert_away()
    subject.assert_usable()
