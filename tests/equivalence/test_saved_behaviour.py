"""Frames of saved tensors: what they hold, when they let go, and what they refuse."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from equivalence.saved_harness import (
    BOUNDARY_AWAY,
    CPU,
    HIDDEN_BYTES,
    JOINED,
    POLICIES,
    RECOMPUTE,
    ROWS,
    SELECT,
    TO_DISK,
    WIDTH,
    Block,
    Driver,
    blocks,
    make_offloader,
    run_driven,
    run_plain,
    under,
)
from memfit.core.errors import UnsupportedError, UsageError
from memfit.core.plan import CallPlan
from memfit.engine import frames
from memfit.engine.frames import CallSite, make_frame
from memfit.engine.offload import Offloader
from memfit.engine.recompute import SegmentGroup

SINGLE = ["recompute", "select", "offload to disk", "boundary away"]


@pytest.fixture
def offloader(tmp_path: Path) -> Iterator[Offloader]:
    with make_offloader(tmp_path) as made:
        yield made


def squares(values: torch.Tensor) -> Callable[[nn.Module], torch.Tensor]:
    return lambda model: model(values).pow(2).sum()


# ---- what the user's own hooks and checkpoints do


def _non_reentrant(inside: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    return checkpoint(inside, hidden, use_reentrant=False)


def _reentrant(inside: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    return checkpoint(inside, hidden, use_reentrant=True)


def _on_cpu(inside: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        return inside(hidden)


def _halved(inside: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    # Hooks that change values: the result must be theirs, with and without a plan.
    with saved_tensors_hooks(lambda t: t * 0.5, lambda t: t):
        return inside(hidden)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("run", [_non_reentrant, _reentrant, _on_cpu, _halved])
def test_checkpoints_and_hooks_inside_a_call_are_served(run: Any, policy: str, offloader: Offloader) -> None:
    model = nn.Sequential(nn.Linear(8, 8), *blocks(3, run=run))
    loss = squares(torch.randn(4, 8))
    plain = run_plain(model, loss)
    run_driven(model, loss, under(POLICIES[policy], model, offloader)).assert_equal(plain)


@pytest.mark.parametrize("policy", ["keep", *SINGLE, "segments of 2"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_calls_is_served_or_refused(policy: str, use_reentrant: bool, offloader: Offloader) -> None:
    model = blocks(3)
    values = torch.randn(4, 8, requires_grad=True)

    def loss(made: nn.Module) -> torch.Tensor:
        return checkpoint(made, values, use_reentrant=use_reentrant).pow(2).sum()

    plain = run_plain(model, loss)
    values.grad = None
    driver = under(POLICIES[policy], model, offloader)
    run_driven(model, loss, driver).assert_equal(plain)


def test_saving_on_the_cpu_around_calls_changes_no_value(offloader: Offloader) -> None:
    model, values = blocks(2), torch.randn(4, 8)

    def loss(made: nn.Module) -> torch.Tensor:
        with save_on_cpu():
            return made(values).pow(2).sum()

    plain = run_plain(model, loss)
    run_driven(model, loss, under([RECOMPUTE, TO_DISK], model, offloader)).assert_equal(plain)


def test_hooks_of_the_user_around_a_call_are_refused() -> None:
    model = blocks(1)
    with (
        under([RECOMPUTE], model),
        saved_tensors_hooks(lambda t: t * 0.5, lambda t: t),
        pytest.raises(UnsupportedError, match=r"test_saved_behaviour.*do not compose"),
    ):
        model(torch.randn(2, 8))


def test_a_managed_call_inside_a_managed_call_is_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)))
    with (
        Driver(model, ["0", "0.0"], [RECOMPUTE]),
        pytest.raises(UnsupportedError, match=r"0\.0 is called inside another call"),
    ):
        model(torch.randn(2, 8))


# ---- refusals


@dataclass
class Changing:
    """A function that does something else each time it is called."""

    variants: list[Callable[..., torch.Tensor]]
    calls: int = 0
    caught: list[Exception] = field(default_factory=list)

    def __call__(self, inside: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        variant = self.variants[min(self.calls, len(self.variants) - 1)]
        self.calls += 1
        try:
            return variant(inside, hidden)
        except Exception as error:  # noqa: BLE001 (user code that catches all must not hide a difference)
            self.caught.append(error)
            return hidden


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        ([lambda f, h: f(h), lambda f, h: f(h[:1])], r"saved tensor \d+ was torch.float32 \[4, 8\].*is.*\[1, 8\]"),
        ([lambda f, h: f(h), lambda f, h: h], r"saved \d+ tensors for backward at first, and now"),
        ([lambda f, h: f(h).bfloat16().sin().float(), lambda f, h: f(h).double().sin().float()], "bfloat16.*float64"),
    ],
)
@pytest.mark.parametrize("policy", [RECOMPUTE, SELECT])
def test_a_call_that_does_something_else_when_run_again_is_refused(
    variants: list[Any], message: str, policy: CallPlan
) -> None:
    run = Changing(variants)
    model = blocks(1, run=run)
    with under([policy], model) as driver:
        loss = squares(torch.randn(4, 8))(model)
        with pytest.raises(UnsupportedError, match=rf"(?s)^0 .*({message}|other operations)"):
            driver.backward(loss)
    assert not run.caught


def test_more_saved_tensors_than_at_first_are_seen_where_the_call_runs_to_its_end() -> None:
    def with_one_more(inside: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        mixed = inside(hidden)
        torch.sin(hidden + mixed)  # saves what the block itself saves next
        return mixed

    run = Changing([lambda f, h: f(h), lambda f, h: f(h), with_one_more])
    model = blocks(2, run=run)
    with under([RECOMPUTE, JOINED], model) as driver:
        loss = squares(torch.randn(4, 8))(model)
        with pytest.raises(UnsupportedError, match="more tensors"):
            driver.backward(loss)


def test_autograd_inside_a_forward_is_refused() -> None:
    def penalty(inside: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(inside(hidden).sum(), hidden, create_graph=True)
        return gradient

    model = nn.Sequential(nn.Linear(8, 8), Block(run=penalty))
    with Driver(model, ["1"], [RECOMPUTE]), pytest.raises(UnsupportedError, match="runs autograd inside"):
        model(torch.randn(2, 8))


@pytest.mark.parametrize("policy", SINGLE)
def test_a_second_backward_works_until_the_call_is_finished_and_is_refused_after(
    policy: str, offloader: Offloader
) -> None:
    model = blocks(2)
    values = torch.randn(4, 8, requires_grad=True)
    torch.manual_seed(3)
    model(values).sum().backward()
    plain, values.grad = values.grad, None
    torch.manual_seed(3)
    with under(POLICIES[policy], model, offloader) as driver:
        loss = model(values).sum()
        driver.end_forward()
        driver.backward(loss, retain_graph=True)
        assert plain is not None
        assert values.grad is not None
        assert torch.equal(values.grad, plain)
        loss.backward(retain_graph=True)
        assert torch.equal(values.grad, plain * 2)
        driver.finish()
        with pytest.raises(UnsupportedError, match="retain_graph"):
            loss.backward()


def test_an_argument_that_is_changed_later_is_refused_and_not_used() -> None:
    model = blocks(2)
    with under([RECOMPUTE], model) as driver:
        values = nn.functional.relu(torch.randn(4, 8, requires_grad=True)) * 2
        loss = model(values).sum()
        with torch.no_grad():
            values += 1
        with pytest.raises(UnsupportedError, match="argument of 0 .* changed in place"):
            driver.backward(loss)


@pytest.mark.parametrize("policy", ["keep", "offload to disk"])
def test_a_saved_tensor_that_is_changed_in_place_is_an_error_as_in_plain_pytorch(
    policy: str, offloader: Offloader
) -> None:
    class Spoils(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            saved = values.exp()
            saved += 1
            return saved * 2

    model = nn.Sequential(Spoils())
    for leaves_early in (False, True):
        with under(POLICIES[policy], model, offloader) as driver:
            loss = model(torch.randn(8, 64, requires_grad=True)).sum()
            if leaves_early:
                driver.end_forward()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                driver.backward(loss)


def test_a_policy_without_its_store_is_refused() -> None:
    site = CallSite(name="x", module=nn.Identity(), call=lambda: None, device=CPU, stays=lambda storage: False)
    with pytest.raises(UsageError, match="no offloader"):
        make_frame(TO_DISK, site, (), {})
    with pytest.raises(UsageError, match="no offloader"):
        make_frame(BOUNDARY_AWAY, site, (), {})
    model = blocks(1)
    with under([TO_DISK], model, Offloader({}, device=CPU, minimum_bytes=0)), pytest.raises(UsageError, match="disk"):
        model(torch.randn(2, 8))


def test_a_call_that_raises_leaves_the_hooks_as_they_were(offloader: Offloader) -> None:
    def fails(inside: Callable[..., torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        inside(hidden)
        raise KeyError("of the user")

    for name in ("recompute", "select", "offload to disk"):
        model = blocks(1, run=fails)
        with under(POLICIES[name], model, offloader), pytest.raises(KeyError, match="of the user"):
            model(torch.randn(2, 8))
        assert frames._default_hooks._top_saved_tensors_default_hooks(True) is None
        assert _get_current_dispatch_mode() is None


# ---- exactness in corners


def test_attention_with_dropout_draws_the_same_numbers_under_selection() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.dropout = nn.Linear(8, 24), nn.Dropout(0.5)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(hidden).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            dropped = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
            flash = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.dropout(torch.sin(dropped + flash)).transpose(1, 2).flatten(2)

    model = nn.Sequential(Attention(), Attention())
    loss = squares(torch.randn(2, 6, 8))
    run_driven(model, loss, under([SELECT], model)).assert_equal(run_plain(model, loss))


def test_products_that_are_changed_in_place_are_made_again_under_selection() -> None:
    class Glue(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)) for _ in range(3)
            )

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                made = layer(hidden)
                made += hidden  # changes, from outside, the result of the call's last product
                hidden = made
            return hidden

    model = Glue()
    names = [f"layers.{i}" for i in range(3)]
    loss = squares(torch.randn(4, 8))
    plain = run_plain(model, loss)
    for policies in ([SELECT], [RECOMPUTE], POLICIES["select, segments of 2"], POLICIES["segments of 3"]):
        run_driven(model, loss, Driver(model, names, policies)).assert_equal(plain)


@pytest.mark.parametrize("policy", [*SINGLE, "segments of 2"])
def test_settings_of_the_forward_hold_when_it_runs_again(policy: str, offloader: Offloader) -> None:
    class Sensitive(Block):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            made = super().forward(hidden) * torch.ones(())  # its dtype is the default
            made = made * (random.random() + 0.5)
            q = made.unflatten(-1, (2, 4)).transpose(-2, -3)
            attended = nn.functional.scaled_dot_product_attention(q, q, q)
            return torch.sin(made.float() + attended.float().mean())

    model, values = nn.Sequential(*(Sensitive() for _ in range(4))), torch.randn(2, 3, 8)

    def loss(made: nn.Module) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            with torch.autocast("cpu", dtype=torch.bfloat16), sdpa_kernel(SDPBackend.MATH), torch.device("cpu"):
                return made(values).pow(2).sum()
        finally:
            torch.set_default_dtype(torch.float32)

    random.seed(5)
    plain = run_plain(model, loss)
    state = random.getstate()
    random.seed(5)
    run_driven(model, loss, under(POLICIES[policy], model, offloader)).assert_equal(plain)
    assert random.getstate() == state
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_module_notes_on_itself_happens_once(policy: str, offloader: Offloader) -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.word, self.seen, self.history = 0, "", None, []

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "scale"):
                self.scale = 2.0  # made by the first call; it adds to that call's result
                hidden = hidden + 1
            self.calls += 1
            self.word += "x"
            made = super().forward(hidden * (self.scale + self.calls * 0.25)) + len(self.word)
            self.seen = made
            self.history.append(made.detach())
            return made

    found: list[tuple[Any, ...]] = []
    outcomes = []
    for is_driven in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(Counting() for _ in range(4)))
        layers: list[Any] = list(model)
        kept: list[torch.Tensor] = []

        def loss(made: nn.Module, layers: list[Any] = layers, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            result = made(torch.ones(4, 8)).pow(2).sum()
            kept.extend(layer.seen for layer in layers)
            return result

        if is_driven:
            driver = Driver(model, list("0123"), POLICIES[policy], offloader=offloader)
            outcomes.append(run_driven(model, loss, driver, steps=3))
            assert all(layer.seen is own for layer, own in zip(layers, kept[-4:], strict=True))
        else:
            outcomes.append(run_plain(model, loss, steps=3))
        found.append(tuple((m.calls, m.word, m.scale, len(m.history)) for m in layers))
    outcomes[1].assert_equal(outcomes[0])
    assert found[0] == found[1] == ((3, "xxx", 2.0, 3),) * 4


def test_objects_that_a_call_fills_are_filled_once(offloader: Offloader) -> None:
    @dataclass
    class Notes:
        losses: list[torch.Tensor]
        cache: dict[str, torch.Tensor]

    class Noting(Block):
        def forward(self, hidden: torch.Tensor, notes: Notes) -> torch.Tensor:  # type: ignore[override]
            made = super().forward(hidden + notes.cache.get("last", torch.zeros(())))
            notes.losses.append(made.pow(2).mean())
            notes.cache["last"] = made
            return made

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Noting() for _ in range(4))

        def forward(self, hidden: torch.Tensor) -> Notes:
            notes = Notes([], {})
            for layer in self.layers:
                hidden = layer(hidden, notes)
            return notes

    model, values, lengths = Model(), torch.randn(4, 8), []

    def loss(made: nn.Module) -> torch.Tensor:
        notes = made(values)
        lengths.append(notes)
        return torch.stack(notes.losses).sum()

    plain = run_plain(model, loss)
    names = [f"layers.{i}" for i in range(4)]
    for policy in POLICIES.values():
        run_driven(model, loss, Driver(model, names, policy, offloader=offloader)).assert_equal(plain)
    assert {len(notes.losses) for notes in lengths} == {4}


def _swish(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.sigmoid(hidden)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_call_that_ends_in_a_scripted_function_is_recomputed(offloader: Offloader) -> None:
    swish = torch.jit.script(_swish)

    class Scripted(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return swish(super().forward(hidden))

    model = nn.Sequential(Scripted(8, 8), Scripted(8, 8))
    loss = squares(torch.randn(4, 8))
    for _ in range(3):  # TorchScript rounds otherwise until it has seen a few runs, in plain PyTorch too
        run_plain(model, loss)
    plain = run_plain(model, loss)
    for policy in ("recompute", "segments of 2"):
        run_driven(model, loss, under(POLICIES[policy], model, offloader)).assert_equal(plain)


@pytest.mark.parametrize("last", [lambda h: h, torch.tanh])
@pytest.mark.parametrize("policy", ["recompute", "select"])
def test_a_call_that_computes_other_values_when_it_is_recomputed_is_refused(
    last: Callable[..., torch.Tensor], policy: str, offloader: Offloader
) -> None:
    """As many saved tensors, of the same shapes: nothing but their values tells."""
    heat = [1.0]
    model = blocks(2, dropout=0.0, run=lambda inner, hidden: last(inner(hidden) * heat[0]))
    with under(POLICIES[policy], model, offloader) as driver:
        loss = squares(torch.randn(4, 8))(model)
        heat[0] = 1.5
        with pytest.raises(UnsupportedError, match=r"other values.*a number that other code changes"):
            driver.backward(loss)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch's compiler itself, with and without us
def test_compiled_insides_are_recomputed_bit_for_bit(offloader: Offloader) -> None:
    model = blocks(2, dropout=0.0)
    for block in model:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    loss = squares(torch.randn(4, 8))
    plain = run_plain(model, loss)
    for policy in ("recompute", "offload to disk", "segments of 2"):
        run_driven(model, loss, under(POLICIES[policy], model, offloader)).assert_equal(plain)
    with under([SELECT], model), pytest.raises(UnsupportedError, match="0 is compiled"):
        loss(model)


@pytest.mark.compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by torch's compiler itself, with and without us
def test_a_call_that_is_compiled_anew_when_it_is_recomputed_is_refused_as_such(offloader: Offloader) -> None:
    model = blocks(1, dropout=0.0)
    model[0].forward = torch.compile(model[0].forward, backend="aot_eager")
    with under(POLICIES["recompute"], model, offloader) as driver:
        value = squares(torch.randn(4, 8))(model)
        torch._dynamo.reset()  # as where its guards fail
        with pytest.raises(UnsupportedError, match="0 was compiled anew"):
            driver.backward(value)


@dataclass
class Cache:
    """As a key-value cache: every layer gets all of it and looks at its own part."""

    parts: list[torch.Tensor]


class Caching(Block):
    def __init__(self, reads: Callable[[Cache], list[torch.Tensor]]) -> None:
        super().__init__(WIDTH)
        self.reads = reads

    def forward(self, hidden: torch.Tensor, cache: Cache) -> torch.Tensor:  # type: ignore[override]
        assert all(part.shape == hidden.shape for part in cache.parts)  # looking at a shape is no reading
        for part in self.reads(cache):
            hidden = hidden + part
        made = super().forward(hidden)
        cache.parts.append(made * 2)
        return made


def _with_cache(layers: Sequence[Caching], values: torch.Tensor) -> torch.Tensor:
    cache = Cache([])
    for layer in layers:
        values = layer(values, cache)
    return values.pow(2).sum()


@pytest.mark.parametrize(("reads", "parts_held"), [(lambda cache: [], 0), (lambda cache: cache.parts[-1:], 1)])
def test_of_an_object_only_the_tensors_that_a_call_reads_are_held(reads: Any, parts_held: int) -> None:
    model = nn.ModuleList(Caching(reads) for _ in range(4))
    values = torch.randn(ROWS, WIDTH)
    plain = run_plain(model, lambda m: _with_cache(list(m), values))  # type: ignore[arg-type]
    driver = Driver(model, ["0", "1", "2", "3"], [RECOMPUTE])
    run_driven(model, lambda m: _with_cache(list(m), values), driver).assert_equal(plain)  # type: ignore[arg-type]
    with driver:
        _with_cache(list(model), values)  # type: ignore[arg-type]
        held = [frame.held_bytes() // HIDDEN_BYTES for frame in driver.frames]
        assert held == [1] + [1 + parts_held] * 3


def test_reading_what_was_not_read_at_first_is_refused() -> None:
    counts: list[int] = []

    def reads(cache: Cache) -> list[torch.Tensor]:
        counts.append(1)
        return cache.parts if len(counts) > 2 else []

    model = nn.ModuleList(Caching(reads) for _ in range(2))
    with Driver(model, ["0", "1"], [RECOMPUTE]) as driver:
        loss = _with_cache(list(model), torch.randn(ROWS, WIDTH))  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match="1 reads a tensor inside an object"):
            driver.backward(loss)


@pytest.mark.parametrize("policy", POLICIES)
def test_microbatches_may_be_interleaved_call_by_call(policy: str, offloader: Offloader) -> None:
    model = blocks(4, dropout=0.0)  # the order of draws would differ from that of a plain loop
    batches = [torch.randn(3, 8) for _ in range(3)]
    for batch in batches:
        model(batch).pow(2).sum().backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    plans = [POLICIES[policy][i % len(POLICIES[policy])] for i in range(4)]
    there = {t.untyped_storage()._cdata for t in model.parameters()}
    # Segments are the units of switching.
    hidden, made, at = list(batches), [], 0
    while at < 4:
        end = at + 1
        while end < 4 and plans[end].joins_previous:
            end += 1
        for m in reversed(range(3)):
            group = SegmentGroup()
            for index in range(at, end):
                block = model[index]
                site = CallSite(
                    name=str(index), module=block, call=block, device=CPU, stays=lambda s: s._cdata in there
                )
                frame = make_frame(plans[index], site, (hidden[m],), {}, offloader=offloader, group=group)
                frame.enter()
                hidden[m] = block(hidden[m])
                frame.leave(hidden[m])
                frame.offload()
                made.append(frame)
        at = end
    for frame in made:
        frame.drop()
    torch.stack([h.pow(2).sum() for h in hidden]).sum().backward()
    for ours, expected in zip(model.parameters(), plain, strict=True):
        assert ours.grad is not None
        assert expected is not None
        assert torch.equal(ours.grad, expected)
    for frame in made:
        frame.finish()
        assert frame.held_bytes() == 0
