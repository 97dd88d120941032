"""The field's techniques by name, as plans: what a person would set up by hand.

In: a profile, the tiers there are. Out: `Candidate`s of one technique, or of all. Each is a point
of the space that memfit searches, and is a candidate of every search: no chosen plan is predicted
to be slower than a technique that fits.

What is free in a technique is the number of microbatches. Nested recomputation (Griewank and
Walther 2000, "Revolve") is not in the space: a call is run again once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from memfit.core.errors import UsageError
from memfit.core.hardware import Hardware
from memfit.core.plan import BlockPlan, CallPlan, Order, Plan, UpdateTime
from memfit.core.profile import Profile, TraceProfile
from memfit.core.saved_policies import Saved
from memfit.core.storage_formats import ComputeDtype
from memfit.core.tiers import Tier, is_processor
from memfit.core.work_kinds import summed
from memfit.planner.search.candidates import Candidate, find_tail, update_time
from memfit.planner.search.mixed_units import Mixture, Units, find_units, mixed_plan
from memfit.step.clock import work_seconds


@dataclass(frozen=True, kw_only=True)
class ClassicSetting:
    """Model and machine that a technique is applied to.

    Attributes:
        profile: of the model.
        trace: of a microbatch.
        hardware: priced on.
        units: of the model.
        near: the tier next to the device; None: there is none.
        far: the tier with most room; None likewise.
        waits: gradients wait for other microbatches or for the norm.
    """

    profile: Profile
    trace: TraceProfile
    hardware: Hardware
    units: Units
    near: Tier | None
    far: Tier | None
    waits: bool

    @property
    def has_host(self) -> bool:
        """True if the host's cores may update beside an accelerator."""
        is_beside = self.near is Tier.HOST and not is_processor(self.hardware.device)
        return is_beside and not self.profile.host_update_obstacle and not self.profile.read_gradients


@dataclass(frozen=True, kw_only=True)
class ClassicRecipe:
    """Decisions of a technique; each may be refused by a block or a call
    (`planner.search.mixed_units`).

    Attributes:
        policies: by unit.
        homes: of all blocks.
        takes_turns: several microbatches pass a layer before the next one begins.
        updates_at_end: all blocks are updated after backward.
    """

    policies: tuple[CallPlan, ...] = ()
    homes: BlockPlan = field(default_factory=BlockPlan)
    takes_turns: bool = False
    updates_at_end: bool = False


@dataclass(frozen=True, kw_only=True)
class Classic:
    """A technique.

    Attributes:
        says: it in one line.
        source: where it comes from.
        recipe: its decisions; None: it cannot be had there.
    """

    says: str
    source: str
    recipe: Callable[[ClassicSetting], ClassicRecipe | None]


def _all(setting: ClassicSetting, policy: CallPlan) -> tuple[CallPlan, ...]:
    return (policy,) * len(setting.units.calls)


def _plain(_: ClassicSetting) -> ClassicRecipe:
    return ClassicRecipe(updates_at_end=True)


def _fused(_: ClassicSetting) -> ClassicRecipe:
    return ClassicRecipe()


def _checkpointed(setting: ClassicSetting) -> ClassicRecipe:
    return ClassicRecipe(policies=_all(setting, CallPlan(saved=Saved.RECOMPUTE)), updates_at_end=True)


def _selective(setting: ClassicSetting) -> ClassicRecipe | None:
    held = [setting.trace.calls[i].held(Saved.SELECT) for i in setting.units.calls]
    if any(results is None for results in held):
        return None
    return ClassicRecipe(policies=_all(setting, CallPlan(saved=Saved.SELECT)), updates_at_end=True)


def _square_root(setting: ClassicSetting) -> ClassicRecipe:
    """Segments of about sqrt(N) of N calls; calls apart from each other are not joined."""
    calls = setting.units.calls
    length = max(1, round(math.sqrt(len(calls))))
    tail = find_tail(setting.trace)
    policies = [
        CallPlan(
            saved=Saved.RECOMPUTE,
            joins_previous=place % length > 0 and calls[place - 1] == call - 1 and call != tail,
        )
        for place, call in enumerate(calls)
    ]
    return ClassicRecipe(policies=tuple(policies), updates_at_end=True)


def _swapped(setting: ClassicSetting) -> ClassicRecipe | None:
    if setting.near is None:
        return None
    swap = CallPlan(saved=Saved.OFFLOAD, saved_home=setting.near)
    return ClassicRecipe(policies=_all(setting, swap), updates_at_end=True)


def _swapped_where_hidden(setting: ClassicSetting) -> ClassicRecipe | None:
    """A call's tensors leave where that takes no longer than its forward; else it runs again."""
    if setting.near is None:
        return None
    link = setting.hardware.link(setting.near)
    slower = min(link.read_bytes_per_s, link.write_bytes_per_s)
    policies: list[CallPlan] = []
    for index in setting.units.calls:
        call = setting.trace.calls[index]
        computed_s = work_seconds(summed([(call.forward_work, 1.0)]), setting.hardware) if call.forward_work else 0.0
        computed_s = computed_s or call.forward_flops / setting.hardware.flops_per_s
        is_hidden = setting.trace.saved_bytes(index) / slower <= computed_s
        swap = CallPlan(saved=Saved.OFFLOAD, saved_home=setting.near)
        policies.append(swap if is_hidden else CallPlan(saved=Saved.RECOMPUTE))
    return ClassicRecipe(policies=tuple(policies), updates_at_end=True)


def _states_on_host(setting: ClassicSetting) -> ClassicRecipe | None:
    if not setting.has_host:
        return None
    homes = BlockPlan(gradient_home=Tier.HOST, state_home=Tier.HOST, update_on=Tier.HOST)
    return ClassicRecipe(policies=_all(setting, CallPlan(saved=Saved.RECOMPUTE)), homes=homes)


def _sharded_offload(setting: ClassicSetting) -> ClassicRecipe | None:
    if not setting.has_host:
        return None
    homes = BlockPlan(weight_home=Tier.HOST, gradient_home=Tier.HOST, state_home=Tier.HOST, update_on=Tier.HOST)
    return ClassicRecipe(policies=_all(setting, CallPlan(saved=Saved.RECOMPUTE)), homes=homes)


def _infinity(setting: ClassicSetting) -> ClassicRecipe | None:
    """Weights and states on disk, arguments of recomputed layers on the host, updates there."""
    if setting.far is None or setting.near is None:
        return None
    policy = CallPlan(saved=Saved.RECOMPUTE, boundary_home=setting.near)
    homes = BlockPlan(weight_home=setting.far, state_home=setting.far)
    if setting.has_host:
        homes = replace(homes, gradient_home=Tier.HOST, update_on=Tier.HOST)
    elif setting.waits:
        homes = replace(homes, gradient_home=setting.far)
    return ClassicRecipe(policies=_all(setting, policy), homes=homes)


def _layer_to_layer(setting: ClassicSetting) -> ClassicRecipe | None:
    """Layer by layer, all microbatches through each; weights and states, and what layers are run
    again from, on the host.
    """
    if setting.near is None:
        return None
    policy = CallPlan(saved=Saved.RECOMPUTE, boundary_home=setting.near)
    homes = BlockPlan(weight_home=setting.near, state_home=setting.near)
    return ClassicRecipe(policies=_all(setting, policy), homes=homes, takes_turns=True)


CLASSICS: Mapping[str, Classic] = {
    "accumulate": Classic(
        says="the batch in microbatches, one after the other; everything kept and updated at the end",
        source="plain PyTorch",
        recipe=_plain,
    ),
    "fused-update": Classic(
        says="the same, each block updated in backward as soon as its gradient is complete",
        source='Lv et al. 2023, "Full Parameter Fine-tuning for Large Language Models with Limited Resources"',
        recipe=_fused,
    ),
    "checkpoint-every-block": Classic(
        says="every repeated block runs again in backward",
        source="torch.utils.checkpoint on each layer",
        recipe=_checkpointed,
    ),
    "sqrt": Classic(
        says="segments of sqrt(N) blocks run again in backward",
        source='Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4',
        recipe=_square_root,
    ),
    "selective": Classic(
        says="blocks run again but for matrix products and attention",
        source='Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 5',
        recipe=_selective,
    ),
    "vdnn": Classic(
        says="what blocks save for backward leaves, and comes back",
        source='Rhu et al. 2016, "vDNN", vDNN-all',
        recipe=_swapped,
    ),
    "capuchin": Classic(
        says="what blocks save leaves where its way is hidden by their forward, else they run again",
        source='Peng et al. 2020, "Capuchin", section 4.4; by block, not by tensor',
        recipe=_swapped_where_hidden,
    ),
    "zero-offload": Classic(
        says="gradients and states on the host, updated there; every block runs again",
        source='Ren et al. 2021, "ZeRO-Offload", section 4',
        recipe=_states_on_host,
    ),
    "fsdp-offload": Classic(
        says="weights too rest on the host and are fetched block by block; every block runs again",
        source="torch.distributed.fsdp, CPUOffloadPolicy, with checkpointed layers",
        recipe=_sharded_offload,
    ),
    "zero-infinity": Classic(
        says="weights and states on disk, updated by the host; blocks run again from arguments that leave",
        source='Rajbhandari et al. 2021, "ZeRO-Infinity", section 5',
        recipe=_infinity,
    ),
    "layer-to-layer": Classic(
        says="all microbatches through one block before the next; weights, states and arguments away",
        source='Pudipeddi et al. 2020, "Training Large Neural Networks with Constant Memory using a New Execution Algorithm"',
        recipe=_layer_to_layer,
    ),
}
"""Techniques by name."""


def list_classics(
    profile: Profile,
    hardware: Hardware,
    *,
    microbatches: int,
    tiers: Sequence[Tier],
    clips_norm: bool,
    compute: ComputeDtype,
    drops_masters: bool = False,
    only: str | None = None,
) -> Iterator[Candidate]:
    """Yields the techniques with one number of microbatches, those that can be had there.

    Args:
        profile: with a trace of that many.
        hardware: they are priced on.
        microbatches: into which the batch is cut.
        tiers: beside the device.
        clips_norm: gradients are clipped by their global norm.
        compute: the dtype that the profile was made for.
        drops_masters: there are none.
        only: name of the one that is wanted; None: all.
    """
    rows = -(-profile.batch_rows // microbatches)
    trace = profile.traces[rows]
    near = Tier.HOST if Tier.HOST in tiers else next(iter(tiers), None)
    setting = ClassicSetting(
        profile=profile,
        trace=trace,
        hardware=hardware,
        units=find_units(profile),
        near=near,
        far=Tier.DISK if Tier.DISK in tiers else near,
        waits=clips_norm or compute.scales_losses or microbatches > 1,
    )
    for name, classic in CLASSICS.items():
        if only not in (None, name):
            continue
        recipe = classic.recipe(setting)
        if recipe is None or (recipe.takes_turns and profile.keeps_order):
            continue
        plan = _plan(recipe, setting, microbatches=microbatches, clips_norm=clips_norm, compute=compute)
        if drops_masters:
            plan = replace(plan, drops_masters=True)
        count = "1 microbatch" if microbatches == 1 else f"{microbatches} microbatches"
        yield Candidate(name=f"{name}, {count}", plan=plan, classic=name)


def check_classic(name: str, profile: Profile, hardware: Hardware, tiers: Sequence[Tier]) -> None:
    """Refuses a technique that cannot be had with these tiers.

    Raises:
        UsageError: it names those that can.
    """
    given = ComputeDtype.GIVEN
    count = next(k for k in range(1, profile.batch_rows + 1) if -(-profile.batch_rows // k) in profile.traces)
    found = [
        candidate.classic
        for candidate in list_classics(
            profile, hardware, microbatches=count, tiers=tiers, clips_norm=False, compute=given
        )
    ]
    if name not in found:
        raise UsageError(
            f"plan={name!r} ({CLASSICS[name].says}) cannot be had here: it needs a tier, or a processor beside the device, that is not there; "
            f"there are {', '.join(found)}"
        )


def _plan(
    recipe: ClassicRecipe, setting: ClassicSetting, *, microbatches: int, clips_norm: bool, compute: ComputeDtype
) -> Plan:
    profile, units = setting.profile, setting.units
    turns = recipe.takes_turns and microbatches > 1
    update = UpdateTime.AFTER_BACKWARD if recipe.updates_at_end else update_time(profile, clips_norm=clips_norm)
    frame = Plan(
        microbatches=microbatches,
        order=Order.LAYER_MAJOR if turns or microbatches == 1 else Order.MICROBATCH_MAJOR,
        tail=find_tail(setting.trace) if turns else None,
        update=update,
        compute_dtype=compute,
    )
    policies = recipe.policies or _all(setting, CallPlan())
    homes = _waiting(recipe.homes, setting, turns=turns)
    mixture = Mixture(policies=policies, homes=(homes,) * len(units.calls), ends=(homes,) * len(units.ends))
    return mixed_plan(frame, profile, units, mixture)


def _waiting(homes: BlockPlan, setting: ClassicSetting, *, turns: bool) -> BlockPlan:
    """Sends gradients that wait for other microbatches where the states are."""
    is_here = homes.gradient_home is Tier.DEVICE and homes.weight_home is not Tier.DEVICE
    waits = setting.waits and not turns and not setting.profile.read_gradients
    return replace(homes, gradient_home=homes.state_home) if is_here and waits else homes
