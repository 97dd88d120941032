"""Many architectures of transformers, three steps under two plans: bit for bit plain PyTorch's; those with a reason not to be are named, each with its own check."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from equivalence import architectures, plans, zoo
from equivalence.compare import assert_equal_training
from equivalence.plain import adamw
from equivalence.with_memfit import fit_case, fit_with, profile_of
from memfit.core.errors import UnsupportedError
from memfit.core.plan import Order, Plan
from memfit.engine.caches import asks_for_caches

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")

_BATCH_NORMS = ("efficientnet", "mobilevit", "regnet", "resnet")
WHOLE_BATCH = {**dict.fromkeys(_BATCH_NORMS, "statistics over the batch"), "ibert": "changes its buffer"}
"""Microbatches would be another model: refused in these words; the whole batch is bitwise."""

NO_RECOMPUTE = {"flaubert": "puts tensors into an object", "xlm": "puts tensors into an object"}
"""They hand a dictionary to their attention, and write in it, even with the cache off: recompute is refused; without it they are bitwise."""

MADE_BY_THE_FIRST_FORWARD = ("big_bird", "bigbird_pegasus")
"""Their first forward of short rows exchanges the attention modules, with random numbers for weights that are then thrown away: they need one before `fit`."""

SEVERAL_USES = {
    "albert": ("albert_layer_groups",),
    "xmod": ("output.LayerNorm",),
    "prophetnet": ("decoder.position_embeddings", "self_attn.out_proj", "self_attn.relative_pos_embeddings"),
    "sew-d": ("self.query_proj", "self.key_proj"),
    "rwkv": ("time_first", "time_decay", "time_mix"),
    "layoutlm": ("_position_embeddings",),
    "pegasus_x": ("encoder.layers",),
    "hrm_text": ("L_module.", "H_module."),
}
"""Parts of the names of weights that are used more than once (RWKV's over time, Pegasus-X's for local and for global tokens, HRM's in cycles of layers,
ALBERT's in every layer, X-MOD's norms before and after an adapter, ProphetNet's in every stream, SEW-D's for contents and for positions).

With several microbatches that take turns their gradients are off by roundings of the sum, like those of every weight with several uses; where microbatches
run one after the other they are not."""


def build(name: str) -> zoo.Case:
    case = architectures.build(name)
    if name in MADE_BY_THE_FIRST_FORWARD:
        case.loss(case.model, case.batch(0))
    uses = SEVERAL_USES.get(name)
    if uses is None:
        return case
    several = frozenset(n for n, _ in case.model.named_parameters() if any(part in n for part in uses))
    return replace(case, shared=case.shared | several)


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_an_architecture_trains_bit_for_bit_on_disk_with_recompute_and_microbatches(name: str, tmp_path: Path) -> None:
    profile = profile_of(build(name))
    blocks, calls = plans.on_disk(profile), plans.fates(profile, plans.RECOMPUTE)
    plan = Plan(microbatches=4, blocks=blocks, calls=calls, tail=plans.tail(profile))
    if name in WHOLE_BATCH:
        with pytest.raises(UnsupportedError, match=WHOLE_BATCH[name]):
            fit_case(build(name), plan=plan)
        plan = Plan(blocks=blocks, calls=calls)
    if name in NO_RECOMPUTE:
        case = build(name)
        job = fit_with(plan, tmp_path)(case, adamw()(case.model))
        with contextlib.closing(job), pytest.raises(UnsupportedError, match=NO_RECOMPUTE[name]):
            job.step(case.batch(0))
        plan = replace(plan, calls=())
    train(name, plan, tmp_path)


@pytest.mark.parametrize("name", architectures.ARCHITECTURES)
def test_an_architecture_trains_bit_for_bit_with_everything_on_the_device(name: str, tmp_path: Path) -> None:
    train(name, Plan(), tmp_path)


@pytest.mark.parametrize("name", sorted(SEVERAL_USES))
def test_weights_with_several_uses_are_bit_for_bit_where_microbatches_run_one_after_the_other(
    name: str, tmp_path: Path
) -> None:
    profile = profile_of(build(name))
    calls = plans.fates(profile, plans.RECOMPUTE)
    plan = Plan(microbatches=4, order=Order.MICROBATCH_MAJOR, blocks=plans.on_disk(profile), calls=calls)
    train(name, plan, tmp_path, may_reorder=False)


DECODERS = sorted(set(architectures.ARCHITECTURES) - set(NO_RECOMPUTE) - set(WHOLE_BATCH))


def with_caches(name: str) -> zoo.Case:
    """The same with the default of transformers' decoders: they make key-value caches, also in training."""
    case = build(name)
    for name_of, module in case.model.named_modules():
        config: Any = getattr(module, "config", None)
        if "encoder" not in name_of and getattr(config, "use_cache", None) is False:
            config.use_cache = True
    return case


@pytest.mark.parametrize("name", DECODERS)
def test_an_architecture_that_asks_for_caches_trains_bit_for_bit(name: str, tmp_path: Path) -> None:
    if not asks_for_caches(with_caches(name).model):
        return  # its configuration knows no caches: the test before is the same
    profile = profile_of(with_caches(name))
    plan = Plan(blocks=plans.on_disk(profile), calls=plans.fates(profile, plans.RECOMPUTE))
    train(name, plan, tmp_path, with_caches)


def train(
    name: str,
    plan: Plan,
    directory: Path,
    built: Callable[[str], zoo.Case] = build,
    *,
    may_reorder: bool | None = None,
) -> None:
    assert_equal_training(
        lambda: built(name),
        adamw(),
        fit_with(plan, directory, keep_gradients=True),
        microbatches=plan.microbatches,
        may_reorder=may_reorder,
        by_terms=True,
    )
