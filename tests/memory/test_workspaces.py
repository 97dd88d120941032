"""What operations take inside themselves: as foretold, beside what memfit's allocator counts while they run in a plain step.

Independent roads: the prediction comes from the table or from runs on small tensors of its own; the measurement is of each operation of plain PyTorch,
at its own size, with the model's numbers.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import memfit
from memfit.core.limits import KERNELS_KEPT, MIB, PRODUCT_KERNEL_BYTES, TILED_PRODUCT_KERNEL_BYTES
from memfit.devices.binding import Allocator, install
from memfit.engine.causal_loss import chunked_cross_entropy
from memfit.tensors.product_scratch import has_products, has_tiles
from memfit.trace import measuring
from memfit.trace.measuring import Workspaces
from memfit.trace.operation_facts import KernelsUsed, facts_of
from memfit.trace.traced_trees import operator_tensors

# Operations on less than 64 KiB are not looked at, and what they take beyond their arguments is small too.
SLACK_BYTES = 192 << 10
aten = torch.ops.aten


class Walk(TorchDispatchMode):
    """Compares each operation that is run under it; keeps those that took more than was foretold, and of each operator the largest."""

    def __init__(self, allocator: Allocator, workspaces: Workspaces) -> None:
        super().__init__()
        self.low: list[str] = []
        self.seen: dict[str, tuple[int, int]] = {}
        self._allocator, self._workspaces = allocator, workspaces

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        results: list[Any] = []
        taken = self._allocator.hidden_bytes(lambda: results.append(func(*args, **kwargs)))
        foretold = self._workspaces.bytes_of(func, args, kwargs, results[0])
        if taken > foretold * 1.05 + SLACK_BYTES:
            shapes = [tuple(t.shape) for t in operator_tensors((args, kwargs))]
            self.low.append(f"{func} of {shapes}: {taken} bytes taken, {foretold} foretold")
        self.seen[str(func)] = max(self.seen.get(str(func), (0, 0)), (taken, foretold))
        return results[0]


def walk(run: Callable[[], Tensor]) -> Walk:
    allocator = install()
    found = Walk(allocator, Workspaces(allocator.hidden_bytes))
    with found:
        run().backward()
    return found


def model_step(config: str, head: str, batch: Callable[[], dict[str, Tensor]], **settings: Any) -> Callable[[], Tensor]:
    def run() -> Tensor:
        import transformers

        model = getattr(transformers, head)(getattr(transformers, config)(**settings)).train()
        return model(**batch()).loss

    return run


def text(vocabulary: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, vocabulary, (4, 64))
    return {"input_ids": tokens, "labels": tokens}


def pictures(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(0, 9, (2,))}


_TEXT: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 4000}
_SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}

STEPS: dict[str, Callable[[], Tensor]] = {
    "llama": model_step("LlamaConfig", "LlamaForCausalLM", lambda: text(4000), **_TEXT, **_SPECIAL, intermediate_size=256, num_key_value_heads=2),
    "eager": model_step("LlamaConfig", "LlamaForCausalLM", lambda: text(4000), **_TEXT, **_SPECIAL, intermediate_size=256, attn_implementation="eager"),
    "mixtral": model_step(
        "MixtralConfig", "MixtralForCausalLM", lambda: text(4000), **_TEXT, **_SPECIAL, intermediate_size=256, num_local_experts=4,
        num_key_value_heads=2, output_router_logits=True,
    ),
    "t5": model_step(
        "T5Config", "T5ForConditionalGeneration", lambda: text(2000), d_model=128, d_kv=32, num_heads=4, num_layers=1, d_ff=256, vocab_size=2000,
        use_cache=False, decoder_start_token_id=0,
    ),
    "bert": model_step("BertConfig", "BertForMaskedLM", lambda: text(4000), **_TEXT, intermediate_size=256),
    "vit": model_step(
        "ViTConfig", "ViTForImageClassification", lambda: pictures(128), hidden_size=128, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=256, image_size=128, patch_size=8, num_labels=10,
    ),
    "resnet": model_step(
        "ResNetConfig", "ResNetForImageClassification", lambda: pictures(96), embedding_size=32, hidden_sizes=[64, 128], depths=[1, 1], num_labels=10
    ),
    "convnext": model_step(
        "ConvNextConfig", "ConvNextForImageClassification", lambda: pictures(96), hidden_sizes=[64, 128], depths=[1, 1], num_stages=2, num_labels=10
    ),
    "mamba": model_step(
        "MambaConfig", "MambaForCausalLM", lambda: {k: v[:, :16] for k, v in text(2000).items()}, hidden_size=128, num_hidden_layers=1, state_size=16,
        vocab_size=2000, use_cache=False, use_mambapy=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_no_operation_of_a_plain_step_takes_more_inside_than_is_foretold(name: str) -> None:
    torch.manual_seed(0)
    found = walk(STEPS[name])
    assert not found.low, "\n".join(found.low)
    assert len(found.seen) > 20


class Assorted(nn.Module):
    """Operators that common models do not have; each takes something inside itself, for some layout or dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.GroupNorm(8, 64), nn.Conv1d(256, 64, 3, padding=1)
        self.up, self.bilinear = nn.ConvTranspose2d(64, 32, 2, 2), nn.Bilinear(64, 64, 32)

    def forward(self, x: Tensor) -> Tensor:
        turned = x.transpose(1, 2)
        mixed = self.norm(self.mix(turned))
        image = self.up(mixed.reshape(len(x), 64, 8, -1))
        found = [
            x.logsumexp(1), x.logcumsumexp(1), x.std(1), x.sort(-1)[0], x.topk(8, 1)[0], x.cumsum(1), (x.tanh() + 1.1).cumprod(-1), x.norm(dim=1), x.prod(-1),
            (x.double() * x).float(), x.bfloat16() + x, x * (x > 0), turned.roll(3, 1), functional.gelu(turned), functional.glu(x), x.softmax(1),
            torch.cdist(x, x), torch.einsum("btd,bsd->bts", turned, turned), functional.layer_norm(turned, (turned.shape[-1],)), functional.mish(turned),
            functional.interpolate(image, scale_factor=2, mode="bilinear"), functional.unfold(image, 3), functional.adaptive_avg_pool2d(image, 4),
            self.bilinear(x[..., :64].contiguous(), x[..., 64:128].contiguous()), functional.pad(x, (2, 2), mode="reflect"), x[x > 0], x.median(1)[0],
            torch.fft.irfft(torch.fft.rfft(x, dim=1), n=x.shape[1], dim=1), functional.dropout(x, 0.3),
            x.index_select(1, torch.arange(100)), x.quantile(0.5, dim=-1), functional.grid_sample(image, torch.zeros(4, 40, 40, 2), align_corners=False),
            functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.1), torch.linalg.cholesky(x @ turned + 300 * torch.eye(128)),
            torch.linalg.qr(x[..., :64])[0], functional.cross_entropy(turned, torch.zeros(len(x), 128, dtype=torch.long)),
        ]  # fmt: skip
        return sum((one.float().mean() for one in found), x.new_zeros(()))


def test_operators_that_copy_for_some_layout_or_dtype_are_foretold_too() -> None:
    torch.manual_seed(0)
    model = Assorted()
    x = torch.randn(4, 128, 256, requires_grad=True)
    found = walk(lambda: model(x))
    assert not found.low, "\n".join(found.low)
    takers = [name for name, (taken, _) in found.seen.items() if taken > SLACK_BYTES]
    assert len(takers) > 12, "the operators chosen do not take anything"


@pytest.mark.parametrize("vocabulary", [1000, 20_000])
def test_the_loss_in_chunks_is_foretold(vocabulary: int) -> None:
    hidden, weight = (torch.randn(n, 64, requires_grad=True) for n in (96, vocabulary))
    found = walk(lambda: chunked_cross_entropy(hidden, weight, torch.randint(0, vocabulary, (96,)), chunk_tokens=64))
    assert not found.low, "\n".join(found.low)
    assert found.seen["aten.logsumexp.default"][0] > 64 * vocabulary * 4


@pytest.mark.parametrize("size", [64, 300, 1100])
def test_a_small_run_tells_of_a_large_operation(size: int) -> None:
    allocator = install()
    workspaces = Workspaces(allocator.hidden_bytes)
    wide = torch.randn(8, size, size)
    cases: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.logcumsumexp.default, (wide, 1)),
        (aten.add.Tensor, (wide, wide.double())),
        (aten.gelu.default, (wide.transpose(1, 2),)),
        (aten.bmm.default, (wide[:, ::2].transpose(0, 1)[:8].expand(8, -1, -1)[:, :8, ::2], wide[:, ::2, ::2][:, : (size + 1) // 2])),
        (aten.sum.dim_IntList, (wide > 0, [1])),
        (aten._euclidean_dist.default, (wide, wide)),
    ]  # fmt: skip
    for func, args in cases:
        results: list[Any] = []
        taken = allocator.hidden_bytes(lambda f=func, a=args, r=results: r.append(f(*a)))
        foretold = workspaces.bytes_of(func, args, {}, results[0])
        assert taken <= foretold * 1.02 + SLACK_BYTES, func
        assert foretold <= taken * 1.3 + SLACK_BYTES, func


def test_a_measurement_draws_no_random_numbers_and_holds_nothing() -> None:
    allocator = install()
    x = torch.ones(1 << 20)
    out = torch.ops.aten.native_dropout.default(x, 0.5, True)
    before, live = torch.get_rng_state(), allocator.stats().live_bytes
    peak = allocator.stats().peak_bytes
    Workspaces(allocator.hidden_bytes).bytes_of(torch.ops.aten.native_dropout.default, (x, 0.5, True), {}, out)
    assert torch.equal(before, torch.get_rng_state())
    assert allocator.stats().live_bytes == live
    assert allocator.stats().peak_bytes <= max(peak, live + (8 << 20))


LARGE_CONVOLUTIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int, int, int]] = {
    "depthwise": ((33, 96, 48, 48), (96, 1, 7, 7), 1, 3, 96),
    "narrower by two": ((33, 96, 24, 24), (192, 96, 2, 2), 2, 0, 1),
    "patches": ((33, 3, 96, 96), (96, 3, 4, 4), 4, 0, 1),
    "of one point": ((33, 64, 24, 24), (256, 64, 1, 1), 1, 0, 1),
    # From 16 rows on another kernel than below.
    "of one point, to few": ((33, 24, 64, 64), (3, 24, 1, 1), 1, 0, 1),
}
"""Shapes of input and weight, stride, padding, groups: larger than what is run as it is."""


@pytest.mark.parametrize("name", LARGE_CONVOLUTIONS)
def test_large_convolutions_take_what_runs_on_few_rows_say(name: str) -> None:
    shape, kernel, stride, padding, groups = LARGE_CONVOLUTIONS[name]
    allocator = install()
    workspaces = Workspaces(allocator.hidden_bytes)
    x, weight = torch.randn(shape), torch.randn(kernel)
    settings = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)

    def check(func: Any, args: tuple[Any, ...]) -> Any:
        results: list[Any] = []
        taken = allocator.hidden_bytes(lambda: results.append(func(*args)))
        foretold = workspaces.bytes_of(func, args, {}, results[0])
        assert taken - SLACK_BYTES <= foretold <= 1.1 * taken + MIB, (taken, foretold)
        return results[0]

    out = check(aten.convolution.default, (x, weight, None, *settings))
    back = (torch.ones_like(out), x, weight, None, *settings, [True, True, False])
    check(aten.convolution_backward.default, back)


VARIED_SHAPES = """
import torch
from memfit.devices.binding import install
from memfit.devices import procfs
from memfit.machine.machine import prepare_process
prepare_process()
torch.set_num_threads(1)
weight, rows = torch.randn(768, 256).bfloat16(), torch.randn(300, 256).bfloat16()
rows[:1] @ weight.t()
before = procfs.read_status().anonymous_bytes
for count in range(2, 300):
    rows[:count] @ weight.t()
print(procfs.read_status().anonymous_bytes - before)
"""


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_drawn_products_in_half_precision_take_no_more_than_was_foretold(threads: int) -> None:
    """Sizes on both sides of the blocks in which operands are reordered, by each thread for itself."""
    allocator, before, drawn = install(), torch.get_num_threads(), random.Random(threads)
    sizes = [1, 3, 8, 31, 33, 48, 62, 64, 65, 100, 128, 192, 300, 500, 512, 1024, 2048]
    shapes = [(1, 32, 8192, 8), (1, 192, 500, 64), (1, 250, 2048, 1024), (8, 250, 500, 32)]
    shapes += [(drawn.choice([1, 1, 3, 8]), *(drawn.choice(sizes) for _ in range(3))) for _ in range(12)]
    low: list[str] = []
    torch.set_num_threads(threads)
    try:
        for batch, rows, depth, columns in shapes:
            for dtype, is_turned in itertools.product([torch.bfloat16, torch.float16], [False, True]):
                left = (
                    torch.ones(batch, depth, rows, dtype=dtype).mT
                    if is_turned
                    else torch.ones(batch, rows, depth, dtype=dtype)
                )
                right = torch.ones(batch, depth, columns, dtype=dtype)
                out = torch.bmm(left, right)
                foretold = Workspaces(allocator.hidden_bytes).bytes_of(aten.bmm.default, (left, right), {}, out)
                taken = allocator.hidden_bytes(partial(torch.bmm, left, right))
                if taken > foretold + (16 << 10):
                    low.append(f"{dtype} {(batch, rows, depth, columns)}: {taken} bytes taken, {foretold} foretold")
    finally:
        torch.set_num_threads(before)
    assert low == []


@pytest.mark.slow
def test_products_in_bf16_of_ever_other_shapes_do_not_make_the_process_grow_for_ever() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(memfit.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", VARIED_SHAPES], check=True, capture_output=True, text=True, env=environment
    )
    assert int(done.stdout) <= 1.1 * KERNELS_KEPT * TILED_PRODUCT_KERNEL_BYTES  # 200 MiB where nothing bounds them


def test_an_operator_that_the_table_knows_runs_once_in_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small, so that its code is in memory when a limit's base is measured; what it takes is still the table's."""
    monkeypatch.setattr(measuring, "_have_run", set())
    runs: list[int] = []

    def watch(run: Callable[[], object]) -> int:
        before = torch.get_rng_state()
        run()
        runs.append(int(not torch.equal(before, torch.get_rng_state())))
        return 1 << 30

    workspaces, random = Workspaces(watch), torch.get_rng_state()
    for dtype in (torch.float32, torch.float32, torch.bfloat16):
        values = torch.empty(4096, 4096, dtype=dtype, device="cpu")
        assert workspaces.bytes_of(aten.tanh.default, (values,), {}, values) == 0
    assert len(runs) == 2
    drawn = torch.empty(8)
    assert workspaces.bytes_of(aten.uniform_.default, (drawn,), {}, drawn) == 0
    assert torch.equal(random, torch.get_rng_state())
    view = torch.empty(8, 8)
    workspaces.bytes_of(aten.view.default, (view, [64]), {}, view.view(64))
    # Small ones would divide by 0: eight heads of keys for four of queries; a whole number.
    query, key = torch.empty(1, 64, 4096, 16), torch.empty(1, 8, 4096, 16)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    workspaces.bytes_of(attention, (query, key, key, 0.0, True), {}, query)
    whole = torch.ones(64, dtype=torch.int64)
    workspaces.bytes_of(aten.remainder.Tensor, (whole, whole), {}, whole)
    assert len(runs) == 2, "neither views, nor what trusts sizes or values, nor random numbers"


def test_experts_in_fp32_compile_nothing_and_in_bf16_any_sizes() -> None:
    """The sizes of their products follow the tokens; only oneDNN, in bf16, keeps a kernel for each."""
    kernel = TILED_PRODUCT_KERNEL_BYTES if has_tiles(torch.bfloat16) else PRODUCT_KERNEL_BYTES
    kernel = kernel if has_products(torch.bfloat16) else 0  # torch computes them itself
    for dtype, kept in ((torch.float32, 0), (torch.bfloat16, KERNELS_KEPT * kernel)):
        used = KernelsUsed()
        rows, weight = torch.empty(16, 64, dtype=dtype), torch.empty(2, 64, 64, dtype=dtype)
        out = torch.empty(16, 64, dtype=dtype)
        func, offsets = aten._grouped_mm.default, torch.tensor([8, 16], dtype=torch.int32)
        used.note(func, facts_of(func, (rows, weight, offsets), {}, [rows, weight, offsets], out, Workspaces()))
        assert used.nbytes == kept


CHILD_OF_THREADS = """
import sys, torch
from memfit.devices.binding import install
from memfit.devices.compiled_kernels import compute_once, panels_to_come
from memfit.machine.meters import ProcessMeter

torch.set_num_threads(int(sys.argv[1]))
allocator, process = install(), ProcessMeter()
left, right = torch.zeros(512, 768), torch.zeros(768, 40_000)
result = torch.empty(512, 40_000).zero_()
torch.zeros(64, 64) @ torch.zeros(64, 64)
names = ["blas, 512 columns", "blas, 10368 columns"]
compute_once(names)


def outside():
    return process.resident_bytes().whole_bytes - allocator.stats().mapped_bytes


before = outside()
torch.mm(left, right, out=result)
print(outside() - before - panels_to_come(names, torch.get_num_threads()))
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_what_the_blas_keeps_is_there_or_told_before_the_widest_product_of_a_step(threads: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD_OF_THREADS, str(threads)], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) <= 4 << 20
