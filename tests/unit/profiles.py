"""Hand-made profiles with closed-form bytes, for tests that must not depend on a tracer.

Import with `from unit.profiles import ...` (pytest puts `tests` on the path).
"""

from __future__ import annotations

from typing import Any

from memfit.core.profile import (
    BlockProfile,
    CallProfile,
    HeldResults,
    Profile,
    StorageProfile,
    TensorProfile,
    TraceProfile,
)
from memfit.core.saved_policies import Saved

PAGE = 4096


def block(name: str, kind: str, *elements: int, trains: bool = True, is_spanning: bool = False) -> BlockProfile:
    """A block of fp32 parameters with that many elements each."""
    return BlockProfile(
        name=name,
        kind=kind,
        parameters=tuple(
            TensorProfile(name=f"{name}.w{i}", shape=(n,), dtype="float32", nbytes=4 * n, requires_grad=trains)
            for i, n in enumerate(elements)
        ),
        is_spanning=is_spanning,
    )


def gpt_profile(
    *,
    layers: int = 4,
    batch_rows: int = 8,
    rows: tuple[int, ...] = (),
    width: int = 64,
    tokens: int = 128,
    vocabulary: int = 2048,
    is_tied: bool = False,
    factor: int = 8,
) -> Profile:
    """A uniform GPT in fp32: embedding, `layers` equal layers, norm, head with loss.

    Per microbatch of r rows with u = 4 * r * tokens * width bytes: a layer saves its argument and `factor` * u inside, its
    output (u) is the next layer's argument; the head's glue (the loss) saves logits of 4 * r * tokens * vocabulary.
    """
    embedding, head = vocabulary * width, vocabulary * width
    blocks = [block("wte", "embedding", embedding)]
    blocks += [block(f"h.{i}", "layer", 12 * width * width, 13 * width) for i in range(layers)]
    blocks.append(block("ln_f", "norm", width, width))
    if not is_tied:
        blocks.append(block("lm_head", "head", head))
    sizes = rows or tuple(r for r in range(1, batch_rows + 1))
    traces = {
        r: _gpt_trace(r, layers, width, tokens, vocabulary, "wte" if is_tied else "lm_head", factor) for r in sizes
    }
    return Profile(
        batch_rows=batch_rows,
        blocks=tuple(blocks),
        traces=traces,
        state_bytes={b.name: 2 * b.weight_bytes for b in blocks},
    )


def _gpt_trace(
    rows: int, layers: int, width: int, tokens: int, vocabulary: int, head: str, factor: int
) -> TraceProfile:
    u = 4 * rows * tokens * width
    logits = 4 * rows * tokens * vocabulary
    n = layers + 3
    storages = [
        StorageProfile(
            index=0, nbytes=8 * rows * tokens, segment=-1, saved_inside=(0,), argument_of=(0,), last_use=0,
            held_until=n - 1, is_input=True,
        )
    ]  # fmt: skip

    def make(nbytes: int, segment: int, **facts: object) -> None:
        storages.append(StorageProfile(index=len(storages), nbytes=nbytes, segment=segment, **facts))  # type: ignore[arg-type]

    make(u, 0, saved_inside=(1,), argument_of=(1,), last_use=1, held_until=0)
    for c in range(1, layers + 1):
        make(factor * u, c, saved_inside=(c,), last_use=c)
        make(u, c, saved_inside=(c + 1,), argument_of=(c + 1,), last_use=c + 1, held_until=c)
    make(
        u, layers + 1, saved_inside=(layers + 2,), argument_of=(layers + 2,), last_use=layers + 2, held_until=layers + 1
    )
    make(logits, layers + 2, saved_outside=(layers + 2,), last_use=layers + 2)
    flops = 2 * rows * tokens * 12 * width * width
    head_flops = 2 * rows * tokens * width * vocabulary

    def call(
        index: int, site: str, block_name: str, kind: str, *, is_repeated: bool = False, **facts: Any
    ) -> CallProfile:
        return CallProfile(
            index=index, site=site, blocks=(block_name,), kind=kind, is_repeated=is_repeated, has_backward=True, **facts
        )

    calls = [
        call(
            0,
            "wte",
            "wte",
            "embedding",
            forward_peak_bytes=u,
            inside_peak_bytes=u,
            output_bytes=u,
            backward_peak_bytes=0,
            backward_leaves_bytes=-u,
        )
    ]
    calls += [
        call(
            i + 1, f"h.{i}", f"h.{i}", "layer", is_repeated=True,
            forward_peak_bytes=(factor + 1) * u, inside_peak_bytes=(factor + 1) * u, output_bytes=u,
            held_results=(HeldResults(saved=Saved.SELECT, nbytes=factor * u // 2),),
            # Its output's and its input's gradient and one more are alive; saved tensors go meanwhile.
            backward_peak_bytes=2 * u, backward_leaves_bytes=-(factor + 1) * u,
            forward_flops=flops, backward_flops=2 * flops,
        )
        for i in range(layers)
    ]  # fmt: skip
    calls.append(
        call(
            layers + 1,
            "ln_f",
            "ln_f",
            "norm",
            forward_peak_bytes=u,
            inside_peak_bytes=u,
            output_bytes=u,
            backward_peak_bytes=u,
            backward_leaves_bytes=-u,
        )
    )
    calls.append(
        call(
            layers + 2, "lm_head", head, "head", forward_peak_bytes=2 * logits, inside_peak_bytes=logits, output_bytes=logits,
            backward_peak_bytes=logits, backward_leaves_bytes=-logits,
            forward_flops=head_flops, backward_flops=2 * head_flops,
        )
    )  # fmt: skip
    # The loss turns its saved logits into their gradient, the head that into u, each layer u into u.
    return TraceProfile(
        rows=rows, calls=tuple(calls), storages=tuple(storages), seed_peak_bytes=logits, seed_leaves_bytes=0
    )


def chain_profile(*, length: int, unit: int = PAGE, batch_rows: int = 1) -> Profile:
    """A chain of calls with outputs of `unit` bytes; each call saves its argument and nothing else; gradients take none.

    The loss saves the last output. `batch_rows` rows cost `unit` bytes; each power of two of microbatches is traced.
    """
    blocks = tuple(block(f"c.{i}", "link", 1024) for i in range(length))
    traces: dict[int, TraceProfile] = {}
    rows = batch_rows
    while rows:
        traces[rows] = _chain_trace(rows, length, unit * rows // batch_rows)
        rows //= 2
    return Profile(batch_rows=batch_rows, blocks=blocks, traces=traces)


def _chain_trace(rows: int, length: int, unit: int) -> TraceProfile:
    storages = [StorageProfile(index=0, nbytes=unit, segment=-1, saved_inside=(0,), argument_of=(0,), last_use=0)]
    for c in range(length):
        is_last = c == length - 1
        storages.append(
            StorageProfile(
                index=c + 1,
                nbytes=unit,
                segment=c,
                saved_inside=() if is_last else (c + 1,),
                argument_of=() if is_last else (c + 1,),
                saved_outside=(c,) if is_last else (),
                last_use=c if is_last else c + 1,
                held_until=-1 if is_last else c,
            )
        )
    calls = tuple(
        CallProfile(
            index=c,
            site=f"c.{c}",
            blocks=(f"c.{c}",),
            kind="link",
            is_repeated=True,
            has_backward=True,
            forward_peak_bytes=unit,
            inside_peak_bytes=unit,
            backward_leaves_bytes=-unit,
            forward_flops=10**9 * rows,
            backward_flops=10**9 * rows,
        )
        for c in range(length)
    )
    return TraceProfile(rows=rows, calls=calls, storages=tuple(storages), seed_leaves_bytes=-unit)
