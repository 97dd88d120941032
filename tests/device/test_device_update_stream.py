"""Updates by the device whose pieces come and go: they have a stream of the updates' own, so that the caller's stream waits for none of their copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from memfit import devices
from memfit.core.tiers import Tier
from memfit.homes import MemoryHome
from memfit.homes.gradients import GradientHomes
from memfit.homes.home import DONE, TransferHandle
from memfit.homes.optimizer_states import BlockStates
from memfit.homes.update_pieces import PieceUpdates
from memfit.homes.updates import UpdateWorker
from memfit.homes.weights import BlockWeights
from memfit.optimizers import OptimizerDriver

NUMBERS, PIECE = 20_003, 4096


class Resting:
    """A block of one parameter whose states rest on the host and whose gradient is on the device, without an engine.

    Args:
        device: of the update.
        weights: where the weight is at home.
    """

    def __init__(self, device: torch.device, weights: Tier) -> None:
        torch.manual_seed(0)
        self.device = device
        self.twin = nn.Parameter(torch.randn(NUMBERS, device=device))
        self.plain = torch.optim.AdamW([self.twin], lr=0.1)
        self.weight = nn.Parameter(self.twin.detach().clone())
        self.driver = OptimizerDriver(torch.optim.AdamW([self.weight], lr=0.1), {"weight": self.weight})
        self.block = BlockWeights(0, "block", [("weight", self.weight)])
        self.comes, self.leaves = (devices.of(device).new_stream(device) for _ in range(2))
        self.homes: list[MemoryHome] = []
        self.block.move_in(self._home(self.block.nbytes, weights), None)
        self.gradients = GradientHomes([self.block], {}, keeps_norms=False)
        self.states = BlockStates(self.block, {"weight": self.driver.state_layout("weight", torch.float32)})
        self.states.home = self._home(self.states.nbytes, Tier.HOST)
        self.worker = UpdateWorker(PieceUpdates(self.driver, {0: self.states}, self.gradients))

    def _home(self, nbytes: int, tier: Tier) -> MemoryHome:
        self.homes.append(MemoryHome(nbytes, tier=tier, device=self.device, stream=self.comes, writes=self.leaves))
        return self.homes[-1]

    def begin(self, after: TransferHandle = DONE) -> Any:
        """Computes a gradient and begins the update."""
        self.block.fetch()
        self.block.wait()
        self.weight.grad = self.weight.detach() * 2 + 1
        self.gradients.begin_step()
        self.gradients.accumulate(self.block)
        self.driver.begin_step()
        return self.worker.submit(self.block, after)

    def end(self, transfer: Any) -> torch.Tensor:
        """Returns the weight that the next kernel sees."""
        transfer.wait()
        self.driver.end_step()
        self.gradients.clear(self.block)
        self.block.release()
        self.block.fetch()
        self.block.wait()
        found = self.weight.detach() * 1
        self.block.release()
        return found

    def step_of_plain(self) -> torch.Tensor:
        """The same step of plain PyTorch on the device."""
        self.twin.grad = self.twin.detach() * 2 + 1
        self.plain.step()
        return self.twin.detach()

    def close(self) -> None:
        self.worker.close()
        for home in self.homes:
            home.close()


@pytest.fixture(params=["device", "host"])
def resting(device: torch.device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Resting]:
    monkeypatch.setattr("memfit.homes.update_pieces.PIECE_ELEMENTS", PIECE)
    made = Resting(device, Tier(request.param))
    yield made
    torch.accelerator.synchronize(device)
    made.close()


def test_steps_of_one_block_whose_pieces_travel_are_those_of_plain_pytorch(resting: Resting) -> None:
    for _ in range(3):
        transfer = resting.begin()
        # What is computed meanwhile on the caller's stream takes memory and gives it back.
        beside = [torch.full((PIECE,), float("nan"), device=resting.device) for _ in range(4)]
        del beside
        found = resting.end(transfer)
        assert torch.equal(found, resting.step_of_plain())


def test_the_callers_stream_waits_for_no_copy_of_an_update_before_it_asks_for_it(resting: Resting) -> None:
    if resting.device.type != "late":
        pytest.skip("copies of a CUDA device take a time that others change")
    from accelerator import late

    resting.end(resting.begin())
    clock, here = late.native.now_s, torch.zeros(8, device=resting.device)
    nbytes = 2 * NUMBERS * 4  # two moments each way, at least
    torch.accelerator.synchronize(resting.device)
    with late.links(float(nbytes), pace="counted"):
        began_s = clock()
        transfer = resting.begin()
        computed_s = clock() - began_s  # the weight may come first: another second's half
        transfer._done.wait()  # all of it is enqueued
        here.add_(1)
        torch.accelerator.current_stream(resting.device).synchronize()
        beside_s = clock() - began_s - computed_s
        resting.end(transfer)
        torch.accelerator.current_stream(resting.device).synchronize()
        whole_s = clock() - began_s - computed_s
    assert beside_s < 0.6 and whole_s > 1.0


def test_an_update_that_depends_on_what_the_caller_still_enqueues_stays_in_its_order(resting: Resting) -> None:
    """A gate may be opened behind kernels that the caller has enqueued since."""
    streams: list[torch.Stream] = []

    class Opened(TransferHandle):
        def wait(self) -> None:
            streams.append(torch.accelerator.current_stream(resting.device))

    resting.end(resting.begin())
    resting.end(resting.begin(Opened()))
    assert streams and {s.stream_id for s in streams} == {torch.accelerator.current_stream(resting.device).stream_id}
