"""The harness itself: a stand-in that trains plainly passes; one that is wrong by a rounding anywhere does not."""

from __future__ import annotations

import pytest
import torch

from equivalence import plans, zoo
from equivalence.compare import assert_equal_training, describe, same_bits, ulp_distance, within_roundings
from equivalence.plain import adamw, sgd, split_rows
from equivalence.stand_in import StandIn
from memfit.core.profile import BlockProfile, CallProfile, Profile, TraceProfile
from memfit.core.saved_policies import Saved


@pytest.mark.parametrize("name", sorted(zoo.ZOO))
def test_a_job_that_trains_plainly_is_found_equal(name: str) -> None:
    case = zoo.ZOO[name]
    options = {"microbatches": 1 if name in zoo.WHOLE_BATCH_ONLY else 3, "max_grad_norm": 0.05}
    report = assert_equal_training(case, adamw(), lambda c, o: StandIn(c, o, "", options), steps=2, **options)
    assert not report.reordered
    assert all(0 < loss < 20 for loss in report.losses)


@pytest.mark.parametrize(
    ("defect", "message"),
    [
        ("gradient", r"gradient .*exit\.bias: 1 of .* = 1 ulp"),
        ("loss", r"step 0 loss: "),
        ("skip", r"weight entry\.weight: 1 of .* differ"),
        ("state", r"state of entry\.weight: exp_avg: "),
        ("draws", r"losses of microbatches|generator"),
    ],
)
def test_a_job_that_is_wrong_by_the_least_amount_is_caught(defect: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_equal_training(zoo.ZOO["kwargs"], adamw(), lambda c, o: StandIn(c, o, defect, {}))


def test_a_shared_weight_may_be_off_by_a_rounding_only_where_that_is_allowed() -> None:
    def build() -> zoo.Case:
        case = zoo.ZOO["kwargs"]()
        return zoo.Case(model=case.model, loss=case.loss, batch=case.batch, shared=frozenset({"exit.bias"}))

    options = {"microbatches": 2}
    report = assert_equal_training(build, sgd(0.1), lambda c, o: StandIn(c, o, "gradient", options), microbatches=2)
    assert report.reordered == {"exit.bias"}
    with pytest.raises(AssertionError, match=r"exit\.bias"):
        assert_equal_training(
            build, sgd(0.1), lambda c, o: StandIn(c, o, "gradient", options), microbatches=2, may_reorder=False
        )


def test_distances_count_representable_numbers_across_zero() -> None:
    tiny = torch.tensor([2.0**-149, 1.0])
    assert ulp_distance(tiny, torch.tensor([-(2.0**-149), 1.0])) == 2
    assert ulp_distance(tiny, tiny) == 0
    assert ulp_distance(torch.tensor([1.0]), torch.tensor([1.0 + 2**-23])) == 1
    assert not same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert same_bits(torch.tensor(torch.nan), torch.tensor(torch.nan))
    assert "sign of a zero" in describe(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert within_roundings(torch.tensor([4.0, 0.0]), torch.tensor([4.0, 2 * 2.0**-21]))
    assert not within_roundings(torch.tensor([4.0, 0.0]), torch.tensor([4.0, 3 * 2.0**-21]))


def test_microbatches_differ_by_at_most_one_row_and_larger_ones_come_first() -> None:
    batch = {"x": torch.arange(8)}
    assert [part["x"].tolist() for part in split_rows(batch, 3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]


def _profile(repeated: str) -> Profile:
    """Calls named by a letter each: upper-case ones are repeated, equal letters are of one kind."""
    calls = tuple(
        CallProfile(index=i, site=f"s{i}", blocks=(f"b{i}",), kind=c, is_repeated=c.isupper(), has_backward=True)
        for i, c in enumerate(repeated)
    )
    blocks = tuple(BlockProfile(name=f"b{i}", kind=c, parameters=()) for i, c in enumerate(repeated))
    return Profile(batch_rows=8, blocks=blocks, traces={8: TraceProfile(rows=8, calls=calls, storages=())})


@pytest.mark.parametrize("repeated", ["eAAAh", "AAAA", "eAAABBBBnh", "abc", "AbA"])
@pytest.mark.parametrize("variant", plans.VARIANTS, ids=lambda v: v.name)
def test_plans_made_from_a_profile_are_legal(repeated: str, variant: plans.Variant) -> None:
    profile = _profile(repeated)
    plan = variant.plan(profile)
    plan.check([block.name for block in profile.blocks], len(repeated))
    assert (plan.microbatches, plan.order) == (variant.microbatches, variant.order)


def test_pairs_join_neighbours_of_one_kind_and_the_tail_begins_behind_the_last_repeated_call() -> None:
    profile = _profile("eAAABBh")
    assert plans.BY_NAME["pairs"].plan(profile).segments(7) == ((0, 0), (1, 2), (3, 3), (4, 5), (6, 6))
    assert plans.tail(profile) == 6
    assert plans.tail(_profile("AAA")) is None
    assert [call.saved for call in plans.BY_NAME["select"].plan(profile).calls].count(Saved.SELECT) == 5
