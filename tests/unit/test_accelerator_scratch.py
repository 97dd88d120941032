"""Memory inside an accelerator's kernels: by arithmetic, and the same for every machine that is described."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memfit
from memfit.core.errors import UsageError
from memfit.core.hardware import Hardware, machine_names, read_hardware
from memfit.core.limits import DEVICE_RESERVE_BYTES, LIBRARY_BYTES, MIB
from memfit.core.tiers import is_processor
from memfit.planner.advise import advise
from memfit.trace.workspaces import accelerator_table

aten = torch.ops.aten
SIDE = 512
# Two workspaces each: for the thread of the forward and for autograd's.
WORKSPACES = {
    "sm_75": 2 * 8320 * 1024,
    "sm_89": 2 * 8320 * 1024,
    "sm_90": 64 * MIB,
    "sm_120": 64 * MIB,
    "gfx942": 256 * MIB,
}


class Scores(nn.Module):
    """A softmax whose backward is the peak of its step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIDE, 8))

    # (SIDE, 8) -> (SIDE, SIDE) -> (SIDE, 8)
    def forward(self, rows: Tensor) -> Tensor:
        return functional.softmax(rows @ self.weight.t(), dim=-1) @ rows


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).square().sum()


def asked() -> tuple[nn.Module, torch.optim.Optimizer, Any, Tensor]:
    torch.manual_seed(0)
    model = Scores()
    return model, torch.optim.SGD(model.parameters(), 0.1), loss_of, torch.randn(SIDE, 8)


def described(name: str) -> Hardware:
    found = read_hardware(name)
    assert found is not None
    return found


@pytest.mark.parametrize("name", machine_names())
def test_a_softmax_on_a_described_accelerator_takes_its_scores_once_more_in_backward(name: str) -> None:
    here, there = memfit.profile(*asked()), memfit.profile(*asked(), hardware=name)
    more = there.traces[SIDE].plain_peak_bytes - here.traces[SIDE].plain_peak_bytes
    assert more == (0 if is_processor(described(name).device) else 4 * SIDE * SIDE)


@pytest.mark.parametrize("architecture", sorted(WORKSPACES))
def test_the_workspaces_of_the_blas_are_the_architectures(architecture: str) -> None:
    found = memfit.profile(*asked(), hardware=replace(described("h200"), architecture=architecture))
    assert sum(LIBRARY_BYTES[name] for name in found.libraries) == WORKSPACES[architecture]
    assert found.kernel_bytes == 0


def test_an_unknown_accelerator_counts_as_the_newest_and_another_makers_has_no_such_library() -> None:
    newest, unknown, other = (
        memfit.profile(*asked(), hardware=replace(described("h200"), architecture=name))
        for name in ("sm_90", "", "xe2")
    )
    assert unknown == newest
    assert other.libraries == ()


def test_a_plan_for_a_described_accelerator_keeps_its_scratch_free() -> None:
    """The peak that plans are held to has the softmax's scratch, and the reserve the part of cuBLAS'
    workspaces that it was not made for.
    """
    found = {name: advise(*asked(), hardware=name) for name in ("h200", "rtx-4090")}
    profile = memfit.profile(*asked(), hardware="h200")
    assert found["h200"].profile.traces[SIDE].plain_peak_bytes == profile.traces[SIDE].plain_peak_bytes
    assert found["h200"].budget.reserve_bytes == DEVICE_RESERVE_BYTES + 32 * MIB
    assert found["rtx-4090"].budget.reserve_bytes == DEVICE_RESERVE_BYTES


def test_the_architecture_of_a_hardware_file_is_a_line_of_text() -> None:
    text = described("h200").to_json()
    assert Hardware.from_json(text).architecture == "sm_90"
    with pytest.raises(UsageError, match="'architecture' of the hardware file is a line of text, not 90"):
        Hardware.from_json(text.replace('"sm_90"', "90", 1))
    with pytest.raises(UsageError, match="no machine is called 'h201'"):
        memfit.profile(*asked(), hardware="h201")


def attention(dtype: torch.dtype, columns: int, *, key_heads: int = 4) -> tuple[Any, list[Tensor]]:
    rows = torch.empty(2, 64, 4, columns, dtype=dtype, device="meta").transpose(1, 2)
    keys = torch.empty(2, 64, key_heads, columns, dtype=dtype, device="meta").transpose(1, 2)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward.default, [rows, rows, keys, keys, rows]


@pytest.mark.parametrize(
    ("architecture", "dtype", "columns", "nbytes"),
    [
        # Efficient: sums for queries in fp32 (rows and columns to 64), and a number a row.
        ("sm_75", torch.float16, 64, 4 * 8 * 64 * (64 + 1)),
        ("sm_90", torch.float32, 64, 4 * 8 * 64 * (64 + 1)),
        # Heads above 64 in 16 bits: keys' and values' sums, too, of the one block of keys.
        ("sm_75", torch.float16, 128, 4 * 8 * 64 * (3 * 128 + 1)),
        # Flash: rows to 128, columns to 32.
        ("sm_90", torch.bfloat16, 48, 4 * 8 * 128 * (64 + 1)),
    ],
)
def test_backward_of_attention_sums_in_fp32(architecture: str, dtype: torch.dtype, columns: int, nbytes: int) -> None:
    func, args = attention(dtype, columns)
    assert accelerator_table(architecture).workspace_bytes(func, args, None) == nbytes


def test_flash_attention_makes_gradients_of_shared_keys_for_each_head() -> None:
    table = accelerator_table("sm_90")
    own, shared = (table.workspace_bytes(*attention(torch.bfloat16, 64, key_heads=heads), None) for heads in (4, 1))
    assert own is not None
    assert shared == own + 2 * (2 * 2 * 4 * 64 * 64)


def test_dtypes_are_converted_inside_of_kernels_and_matrices_with_gaps_are_copied() -> None:
    table, x = accelerator_table("sm_90"), torch.empty(64, 64, dtype=torch.bfloat16)
    wide = x.float()
    assert table.workspace_bytes(aten.add.Tensor, [x, wide], x + wide) == 0
    assert table.workspace_bytes(aten.sum.dim_IntList, [x, [0]], x.sum(0)) == 0
    gaps = torch.empty(64, 64)[:, ::2]
    assert table.workspace_bytes(aten.mm.default, [wide, gaps], wide[:, ::2]) == 4 * 64 * 32


def test_a_large_embedding_sorts_its_indices() -> None:
    table = accelerator_table("sm_75")
    few, many = torch.zeros(3072, dtype=torch.long), torch.zeros(4000, dtype=torch.long)
    func, out = aten.embedding_dense_backward.default, torch.empty(100, 16)
    assert table.workspace_bytes(func, [torch.empty(3072, 16), few, 100, -1, False], out) == 0
    partial_sums = (4000 // 10 + 100) * 16 * 4
    assert (
        table.workspace_bytes(func, [torch.empty(4000, 16), many, 100, -1, False], out) == 6 * 8 * 4000 + partial_sums
    )
