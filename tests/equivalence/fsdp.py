"""The reference for bf16: torch's own FSDP2 mixed precision on one rank, written without a line of memfit.

In: a case of the zoo. Out: a `PlainTrainer` whose model is wrapped by `fully_shard` (each layer, then the whole; T5 only whole), parameters bf16, reduce fp32.

Accumulation is FSDP2's: gradients of all but the last microbatch stay unsharded (`set_requires_gradient_sync(False)`), and are added in fp32, because the
reduce dtype is; within a microbatch autograd adds a weight's uses in bf16. On one rank the reduction itself changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from equivalence.plain import MakeOptimizer, PlainTrainer
from equivalence.zoo import Batch, Case

# Not T5's: FSDP2 puts a node of its own before each unit, at which the gradients of what the unit received are added first. T5's decoder layers all
# receive the encoder's output, and all layers the position bias, so wrapping them groups sums of activations' gradients as plain PyTorch does not
# (one rounding of bf16). T5 is one unit as a whole: the same precision, plain PyTorch's graph.
LAYERS = frozenset({"GPT2Block", "LlamaDecoderLayer", "MixtralDecoderLayer", "BertLayer", "ViTLayer"})


@contextmanager
def one_rank() -> Iterator[None]:
    """A process group of this process alone, over Gloo."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def local(tensor: Tensor) -> Tensor:
    """The whole of a tensor that is sharded over one rank, in memory of its own."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


class FsdpTrainer(PlainTrainer):
    """The plain loop around a model under FSDP2."""

    def __init__(self, case: Case, make_optimizer: MakeOptimizer, **options: Any) -> None:
        model: Any = _shard(case.model)
        count = options.get("microbatches", 1)
        plain_loss, done = case.loss, [0]

        def loss(given: nn.Module, batch: Batch) -> Tensor:
            done[0] += 1
            model.set_requires_gradient_sync(done[0] % count == 0)
            return plain_loss(given, batch)

        super().__init__(replace(case, loss=loss), make_optimizer(model), **options)

    def local_gradients(self) -> dict[str, Tensor | None]:
        """Copies of the fp32 gradients."""
        return {name: None if p.grad is None else local(p.grad) for name, p in self.model.named_parameters()}

    def local_weights(self) -> dict[str, Tensor]:
        """Copies of the fp32 masters."""
        return {name: local(p) for name, p in self.model.named_parameters()}

    def local_states(self) -> dict[str, dict[str, Any]]:
        """Copies of the optimizer's states, by parameter name."""
        found = {name: self.optimizer.state.get(p, {}) for name, p in self.model.named_parameters()}
        return {
            name: {key: local(v) if isinstance(v, Tensor) else v for key, v in state.items()}
            for name, state in found.items()
            if state
        }

    def adopt_local(self, name: str, gradient: Tensor) -> None:
        """Takes this gradient for its own."""
        found = self.model.get_parameter(name).grad
        assert isinstance(found, DTensor)
        found.to_local().copy_(gradient)


def _shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = [module for module in model.modules() if type(module).__name__ in LAYERS]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
