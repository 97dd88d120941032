"""Effect of a plan on the numbers: one table of techniques, each exact, reordered or approximate.

In: `Plan`, `Profile`, what the user allowed. Out: `Numerics`: which sums are regrouped, in words,
for `job.numerics`, the reason, the proof and the docs.

[Note: what exact means]
The user gives one batch a step. *Exact* means the numbers that plain PyTorch gives for it: one
forward of the whole batch, one `backward`, one `step`, bit for bit, on the same device. A batch
that is cut into microbatches is not that, even where each sum is the one of an accumulation loop
over the same microbatches: a user who wrote no such loop did not ask for its rounding. So several
microbatches are *reordered*, and what is said of them is which reference they do equal. Whoever
wants accumulation says so by a plan (`fit(plan=Plan(microbatches=4))`), and reads in `job.numerics`
that it is bitwise that loop, or which weights are off from it. Whoever gives `memfit.Parts` has
written that loop: then exact means its bits, and as many microbatches regroup nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from memfit.core.errors import UsageError
from memfit.core.plan import Order, Plan
from memfit.core.profile import Profile
from memfit.core.storage_formats import FP16_WEIGHTS, WITHOUT_MASTERS, ComputeDtype, FrozenFormat, StateFormat
from memfit.core.tiers import Tier

Wish = Literal["auto", "exact"]
"""Values of `fit(numerics=...)`: "exact" (bitwise plain PyTorch, or refused) or "auto" (sums are
regrouped only where that is much faster; see `GAIN`).
"""

GAIN = 0.1
"""Share of the predicted seconds that a plan which regroups sums must save over one which does not,
to be taken where both fit.
"""

NONADDITIVE = "nonadditive-loss"
"""Name in `fit(allow=...)` that permits cutting a batch whose loss does not add up over its rows.
"""

_NAMED = 4


class Exactness(StrEnum):
    """Relation of a plan's numbers to plain PyTorch's.

    EXACT: equal bit for bit. REORDERED: the same sums in another order, equal up to rounding.
    APPROXIMATE: numbers of fewer bits, or other numbers.
    """

    EXACT = "exact"
    REORDERED = "reordered"
    APPROXIMATE = "approximate"


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One row of the table.

    Attributes:
        name: in `job.numerics` and in the docs.
        exactness: relation of its numbers to plain PyTorch's.
        says: effect on which sums; `{0}` stands for the word that `used` gives for a plan.
        used: gives for a plan the word that fills `{0}`, which may be empty; None if the plan does
            not use the technique.
        allowance: name that `fit(allow=...)` must contain; empty if none is needed.
        is_asked_for: the user asked for it by another keyword, whatever plan is chosen.
    """

    name: str
    exactness: Exactness
    says: str
    used: Callable[[Plan, Profile, Collection[str]], str | None]
    allowance: str = ""
    is_asked_for: bool = False


@dataclass(frozen=True, kw_only=True)
class Change:
    """A technique in a plan that is not exact, with its effect on the sums."""

    technique: str
    exactness: Exactness
    says: str

    def __str__(self) -> str:
        return f"{self.technique} ({self.exactness}): {self.says}"


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Effect of a plan on the numbers. Prints as text.

    Attributes:
        changes: the techniques that are not exact; empty for a plan that gives plain PyTorch's
            bits.
        why: reason why a plan that is not exact was taken; empty for an exact one.
    """

    changes: tuple[Change, ...] = ()
    why: str = ""

    @property
    def exactness(self) -> Exactness:
        """Exactness of the whole: that of the least exact of its changes."""
        order = list(Exactness)
        return max((change.exactness for change in self.changes), key=order.index, default=Exactness.EXACT)

    @property
    def is_exact(self) -> bool:
        """True if losses, gradients and weights equal plain PyTorch's on the whole batch bit for
        bit. See
        [Note: what exact means].
        """
        return not self.changes

    def short(self) -> str:
        """Returns a few words for one line, such as "reordered (several microbatches, loss in
        chunks)".
        """
        named = ", ".join(change.technique for change in self.changes)
        return f"{self.exactness} ({named})" if named else str(self.exactness)

    def sentence(self) -> str:
        """Returns a sentence for the end of a reason."""
        if self.is_exact:
            return "Numerics: exact, the bits of plain PyTorch."
        told = "; ".join(f"{change.technique}: {change.says}" for change in self.changes)
        return f"Numerics: {self.exactness}. {_capital(told)}." + (f" Why: {self.why}." if self.why else "")

    def __str__(self) -> str:
        lines = [f"numerics: {self.short()}", *(f"  {change}" for change in self.changes)]
        if self.why:
            lines.append(f"  why: {self.why}")
        return "\n".join(lines)


def _always(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del plan, profile, allow
    return ""


def _cut(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del allow
    return str(plan.microbatches) if plan.microbatches > 1 and not profile.own_parts else None


def _over_ranks(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del profile, allow
    return str(plan.ranks) if plan.ranks > 1 else None


def _shared(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del allow
    meets = plan.microbatches > 1 and plan.order is Order.LAYER_MAJOR
    if not meets or not profile.shared_weights:
        return None
    first, more = profile.shared_weights[:_NAMED], profile.shared_weights[_NAMED:]
    return ", ".join(first) + (f" and {len(more)} more" if more else "")


def _late_counts(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del allow
    one_by_one = plan.order is Order.MICROBATCH_MAJOR or plan.cut_tail is not None
    return "" if plan.microbatches > 1 and one_by_one and profile.counts_losses else None


def _draws(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del allow
    draws = any(trace.uses_random for trace in profile.traces.values())
    are_own = profile.own_parts and plan.order is Order.MICROBATCH_MAJOR
    return "" if plan.microbatches > 1 and draws and not are_own else None


def _nonadditive(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del profile
    return "" if plan.microbatches > 1 and NONADDITIVE in allow else None


def _chunked(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del profile, allow
    return None if plan.loss_chunk_tokens is None else str(plan.loss_chunk_tokens)


def _bf16(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del profile, allow
    return "" if plan.compute_dtype is ComputeDtype.BFLOAT16 and not plan.drops_masters else None


def _without_masters(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del profile, allow
    return "" if plan.drops_masters else None


def _own_leaves(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    return _shared(plan, profile, allow) if plan.compute_dtype.has_masters else None


def _updated_elsewhere(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del allow
    is_other = any(block.update_on is Tier.HOST for block in plan.blocks.values())
    return "" if is_other and not profile.agrees_on_host else None


def _compiled(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del plan, allow
    return str(len(profile.compiled)) if profile.compiled else None


def _fp16(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del profile, allow
    return "" if plan.compute_dtype is ComputeDtype.FLOAT16 else None


def _fp16_weights(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del profile, allow
    return "" if plan.compute_dtype is ComputeDtype.FLOAT16_WEIGHTS else None


def _low_bit(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del allow
    changes = plan.state_format is not StateFormat.GIVEN and any(profile.encoded_elements.values())
    return str(plan.state_format) if changes else None


def _few_bits(plan: Plan, profile: Profile, allow: Collection[str]) -> str | None:
    del allow
    changes = plan.frozen_format is not FrozenFormat.GIVEN and any(block.encoded for block in profile.blocks)
    return str(plan.frozen_format) if changes else None


_EXACT, _REORDERED, _APPROXIMATE = Exactness.EXACT, Exactness.REORDERED, Exactness.APPROXIMATE

TECHNIQUES = (
    Technique(
        name="homes and visits",
        exactness=_EXACT,
        says="weights, gradients and optimizer states rest elsewhere and come back as they were",
        used=_always,
    ),
    Technique(
        name="recomputation and selection",
        exactness=_EXACT,
        says="a call runs again on the same arguments with the same random numbers",
        used=_always,
    ),
    Technique(
        name="offloaded activations",
        exactness=_EXACT,
        says="saved tensors leave and come back as they were",
        used=_always,
    ),
    Technique(
        name="updates in backward, in pieces",
        exactness=_EXACT,
        says="the user's optimizer on parts of a parameter, where its arithmetic is by element",
        used=_always,
    ),
    Technique(
        name="clipping",
        exactness=_EXACT,
        says="the norm of the gradients' norms, in the model's order, as `torch.nn.utils.clip_grad_norm_` takes it",
        used=_always,
    ),
    Technique(
        name="split masters",
        exactness=_EXACT,
        says="17 bits beside a bf16 weight give its fp32 master back",
        used=_always,
    ),
    Technique(
        name="several microbatches",
        exactness=_REORDERED,
        says="the loss and every gradient are sums over {0} microbatches instead of over the whole batch, bitwise those of plain accumulation over the same "
        "microbatches but for what is named besides",
        used=_cut,
    ),
    Technique(
        name="several ranks",
        exactness=_REORDERED,
        says="the loss and every gradient are sums over the rows of {0} ranks, each rank's own first, then added in rank order (in microbatch-major order: the "
        "ranks' first microbatches, then their second ones): bitwise those of one process that accumulates so. The norm of gradients that are cut over ranks "
        "adds their shares' norms",
        used=_over_ranks,
    ),
    Technique(
        name="weights used several times, layer by layer",
        exactness=_REORDERED,
        says="gradients of {0} add their uses in all microbatches in another order than plain accumulation does",
        used=_shared,
    ),
    Technique(
        name="counts that come late",
        exactness=_REORDERED,
        says="gradients of a loss that returns (sum, count) are divided by the count when all microbatches are through: one rounding more",
        used=_late_counts,
    ),
    Technique(
        name="random numbers of microbatches",
        exactness=_REORDERED,
        says="each microbatch draws from a stream of its own (memfit.microbatch_streams gives a plain loop the same): other draws than the whole batch's",
        used=_draws,
    ),
    Technique(
        name="loss in chunks",
        exactness=_REORDERED,
        says="the loss and the gradient of the head's weight are sums over chunks of {0} tokens",
        used=_chunked,
    ),
    Technique(
        name="updates on the host",
        exactness=_REORDERED,
        says="the optimizer's class runs on the processor, whose compiler may round a product and a sum once where the device's rounds twice, or the other way "
        "round. Exact where a trial of the optimizer gave the same bits on both",
        used=_updated_elsewhere,
    ),
    Technique(
        name="compiled blocks",
        exactness=_REORDERED,
        says="{0} blocks run as torch.compile compiles them, which fuses point-wise operations and rounds otherwise inside of them: the bits of plain PyTorch "
        "with the same layers compiled by `layer.compile()`, with the same budget of torch's for activations (0.9 where the device has a limit)",
        used=_compiled,
        is_asked_for=True,
    ),
    Technique(
        name="leaves of microbatches",
        exactness=_REORDERED,
        says="gradients of weights with masters that several calls use ({0}) add call by call in fp32",
        used=_own_leaves,
    ),
    Technique(
        name="a loss that may not add up, cut",
        exactness=_APPROXIMATE,
        says="the loss of the batch need not be the sum over its microbatches: the contract is plain accumulation",
        used=_nonadditive,
        allowance=NONADDITIVE,
    ),
    Technique(
        name="bf16 weights",
        exactness=_APPROXIMATE,
        says="weights, activations and gradients are rounded to bf16, masters are fp32: bitwise FSDP2's mixed precision on one rank",
        used=_bf16,
        allowance="bf16",
    ),
    Technique(
        name="bf16 weights without masters",
        exactness=_APPROXIMATE,
        says="weights are bf16 and rounded stochastically when they are updated",
        used=_without_masters,
        allowance=WITHOUT_MASTERS,
    ),
    Technique(
        name="fp16",
        exactness=_APPROXIMATE,
        says="the loss runs under autocast to fp16 and is scaled: bitwise `torch.amp.GradScaler`",
        used=_fp16,
        allowance="fp16",
    ),
    Technique(
        name="fp16 weights",
        exactness=_APPROXIMATE,
        says="weights, activations and gradients are rounded to fp16, masters are fp32, and the loss is scaled",
        used=_fp16_weights,
        allowance=FP16_WEIGHTS,
    ),
    *(
        Technique(
            name=f"{chosen} states",
            exactness=_APPROXIMATE,
            says=f"running means of the optimizer rest in {chosen}, rounded at every update",
            used=lambda plan, profile, allow, chosen=chosen: (
                _low_bit(plan, profile, allow) if plan.state_format is chosen else None
            ),
            allowance=chosen.allowance,
        )
        for chosen in StateFormat
        if chosen is not StateFormat.GIVEN
    ),
    *(
        Technique(
            name=f"frozen weights in {chosen}",
            exactness=_APPROXIMATE,
            says=f"weights of linear layers that do not train are rounded to {chosen} once, when they move home: bitwise plain PyTorch on the rounded ones",
            used=lambda plan, profile, allow, chosen=chosen: (
                _few_bits(plan, profile, allow) if plan.frozen_format is chosen else None
            ),
            allowance=chosen.allowance,
        )
        for chosen in FrozenFormat
        if chosen is not FrozenFormat.GIVEN
    ),
)
"""All techniques, the most exact first.
"""

ALLOWANCES = frozenset(technique.allowance for technique in TECHNIQUES if technique.allowance)
"""Names that `fit(allow=...)` accepts.
"""


def declare(plan: Plan, profile: Profile, *, allow: Collection[str] = (), why: str = "") -> Numerics:
    """Returns the effect of a plan on the numbers.

    Args:
        plan: the decisions.
        profile: of the model and the batch.
        allow: what the user allowed.
        why: reason why the plan was taken; used if it is not exact.
    """
    changes: list[Change] = []
    for technique in TECHNIQUES:
        word = technique.used(plan, profile, allow)
        if word is not None and technique.exactness is not Exactness.EXACT:
            changes.append(
                Change(technique=technique.name, exactness=technique.exactness, says=technique.says.format(word))
            )
    return Numerics(changes=tuple(changes), why=why if changes else "")


def regroups_sums(plan: Plan, profile: Profile) -> bool:
    """Tells whether the plan sums in another order than plain PyTorch does on the whole batch.
    Number formats that are allowed do not count, nor what was asked for whatever the plan.
    """
    return any(
        technique.exactness is Exactness.REORDERED
        and not technique.is_asked_for
        and technique.used(plan, profile, ()) is not None
        for technique in TECHNIQUES
    )


def weighed_seconds(seconds: float, *, regroups: bool) -> float:
    """Returns the seconds by which plans are compared: those of a plan that regroups sums are
    raised, so that it must save the share `GAIN`.
    """
    return seconds / (1.0 - GAIN) if regroups else seconds


def check_wish(numerics: str, allow: Collection[str]) -> None:
    """Checks the arguments `numerics` and `allow` of `fit`. Raises `UsageError` for an unknown
    value, an unknown name, or names that cannot take effect under `numerics`.
    """
    if numerics not in get_args(Wish):
        raise UsageError(f"numerics is one of {list(get_args(Wish))}, not {numerics!r:.80}")
    unknown = sorted(set(allow) - ALLOWANCES)
    if unknown:
        hint = " (numerics='exact' of fit asks for bitwise plain PyTorch)" if "exact" in unknown else ""
        raise UsageError(
            f"allow={unknown[0]!r} is not something that can be allowed{hint}; choose from {', '.join(sorted(ALLOWANCES))}"
        )
    if numerics == "exact" and allow:
        raise UsageError(
            f"allow={sorted(allow)} has no effect with numerics='exact', which permits bitwise plain PyTorch only: leave one of the two out"
        )


def check_exact(plan: Plan, profile: Profile, numerics: str) -> None:
    """Checks that a given plan regroups no sums if `numerics` is "exact". Raises `UsageError`."""
    found = declare(plan, profile)
    if numerics == "exact" and not found.is_exact:
        raise UsageError(
            f"numerics='exact' was asked for, and the given plan is {found.short()}: {found.changes[0].says}. Leave numerics='exact' out, or change the plan"
        )


def table() -> str:
    """Returns the table of techniques in Markdown, as docs/architecture.md has it."""
    rows = ["| technique | numbers | what becomes of which sums | `allow=` |", "|---|---|---|---|"]
    for technique in TECHNIQUES:
        allowance = f"`{technique.allowance}`" if technique.allowance else "-"
        says = (
            technique.says.replace("{0} microbatches", "k microbatches")
            .replace("{0} ranks", "n ranks")
            .replace("{0} blocks", "n blocks")
            .replace("chunks of {0}", "chunks of n")
        )
        says = says.replace("gradients of {0} add", "gradients of such weights add").replace(" ({0})", "")
        rows.append(f"| {technique.name} | {technique.exactness} | {_capital(says)} | {allowance} |")
    return "\n".join(rows)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
