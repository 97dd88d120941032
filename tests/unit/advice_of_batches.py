"""Cures that refusals of `memfit.batches` name, followed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import memfit
from memfit.core.plan import Plan
from unit.advice import BATCH, Scene, follows, loss

TWO, EIGHT = Plan(microbatches=2), Plan(microbatches=8)
Parts = memfit.Parts


def plain(model: nn.Module) -> None:
    loss(model, BATCH).backward()


def by_parts(model: nn.Module, count: int) -> None:
    for _ in range(count):
        loss(model, BATCH).backward()


def of_rows(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The second tensor is the same for all rows."""
    return loss(model, batch[0]) + batch[1].sum()


def cut_rows(batch: tuple[Tensor, Tensor], count: int) -> list[tuple[Tensor, Tensor]]:
    return [(rows, batch[1]) for rows in batch[0].tensor_split(min(count, len(batch[0])))]


@follows("trace/cutting.py", "microbatches, and this one cannot be")
def fewer_microbatches_a_larger_batch_or_a_way_to_cut(s: Scene) -> None:
    odd: Any = (BATCH, torch.ones(3))
    s.refused(lambda: s.fit(of_rows, odd, plan=TWO))
    job = s.fit(of_rows, odd, plan=TWO, split=cut_rows, weight=lambda part: len(part[0]))
    assert job.step(odd).is_finite
    s.begin()
    assert s.fit(of_rows, odd, plan=Plan(microbatches=1)).step(odd).is_finite
    s.begin()
    s.refused(lambda: s.fit(plan=EIGHT))
    assert s.fit(sample=BATCH.repeat(2, 1), plan=EIGHT).step(BATCH.repeat(2, 1)).is_finite
    s.begin()
    assert s.fit(plan=TWO).step(BATCH).is_finite


COLUMNS = BATCH.T.contiguous()


def of_columns(model: nn.Module, batch: Tensor) -> Tensor:
    return loss(model, batch.T)


def summed(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
    return model(batch.T).square().sum(), batch.numel()


def cut_columns(batch: Tensor, count: int) -> list[Tensor]:
    return [*batch.tensor_split(min(count, batch.shape[1]), 1)]


def closely(s: Scene, job: memfit.Job) -> None:
    """Compares two microbatches' gradient step with that of the whole batch."""
    job.step(COLUMNS)
    job.close()
    ours = [p.detach().clone() for p in s.model.parameters()]
    s.begin()
    plain(s.model)
    s.optimizer.step()
    torch.testing.assert_close(ours, [*s.model.parameters()])


@follows("trace/splitting.py", "which tells the rows (or counted tokens) of a part")
def the_columns_of_a_part(s: Scene) -> None:
    s.refused(lambda: s.fit(of_columns, COLUMNS, split=cut_columns, plan=TWO))
    closely(s, s.fit(of_columns, COLUMNS, split=cut_columns, plan=TWO, weight=lambda part: part.shape[1]))


@follows("trace/cutting.py", "then any number above 0 will do")
def any_number_beside_counts_or_what_a_part_has(s: Scene) -> None:
    job = s.fit(summed, COLUMNS, split=cut_columns, plan=TWO)
    s.refused(lambda: job.step(COLUMNS))
    job.close()
    s.begin()
    closely(s, s.fit(summed, COLUMNS, split=cut_columns, plan=TWO, weight=lambda _: 7.0))
    s.begin()
    closely(s, s.fit(of_columns, COLUMNS, split=cut_columns, plan=TWO, weight=lambda part: part.shape[1]))


@follows("trace/cutting.py", "returned an empty batch")
def fewer_parts_than_asked_for(s: Scene) -> None:
    s.refused(lambda: s.fit(split=lambda batch, count: [*batch.tensor_split(count)], plan=TWO))
    s.begin()
    job = s.fit(split=lambda batch, count: [*batch.tensor_split(min(count, len(batch)))], plan=TWO)
    assert job.step(BATCH).is_finite


@follows("trace/batch.py", "memfit.Parts takes a list of batches")
def parts_of_a_list(s: Scene) -> None:
    s.refused(lambda: Parts(BATCH))  # type: ignore[arg-type]
    with s.fit(sample=Parts([BATCH])) as job:
        job.step(Parts([BATCH]))
    s.trains_as(plain)


@follows("trace/batch.py", "memfit.Parts([]) has no batch")
def parts_of_a_step(s: Scene) -> None:
    s.refused(lambda: Parts([]))
    assert s.fit(sample=Parts([BATCH, BATCH])).step(Parts([BATCH])).is_finite


@follows("trace/batch.py", "give a factor of each batch's loss")
def a_share_of_each_part(s: Scene) -> None:
    s.refused(lambda: Parts([BATCH, BATCH], shares=[0.5]))
    window = Parts([BATCH, BATCH], shares=[0.5, 0.5])
    with s.fit(sample=window) as job:
        job.step(window)
    s.trains_as(lambda model: [(loss(model, BATCH) * 0.5).backward() for _ in range(2)])


@follows("trace/batch.py", "give memfit.fit a sample with as many")
def a_sample_of_the_most_parts(s: Scene) -> None:
    job = s.fit(sample=Parts([BATCH, BATCH]))
    s.refused(lambda: job.step(Parts([BATCH] * 3)))
    job.close()
    with s.fit(sample=Parts([BATCH] * 3)) as job:
        job.step(Parts([BATCH] * 3))
    s.trains_as(lambda model: by_parts(model, 3))


@follows("trace/batch.py", "and the batch comes in")
def a_plan_of_as_many_microbatches(s: Scene) -> None:
    s.refused(lambda: s.fit(sample=Parts([BATCH] * 3), plan=TWO))
    with s.fit(sample=Parts([BATCH] * 3), plan=Plan(microbatches=3)) as job:
        job.step(Parts([BATCH] * 3))
    s.trains_as(lambda model: by_parts(model, 3))


@follows("trace/splitting.py", "the loss returned a pair")
def a_loss_alone_and_a_list(s: Scene) -> None:
    s.refused(lambda: s.fit(lambda model, batch: (loss(model, batch), 3)))
    largest: list[float] = []

    def noting(model: nn.Module, batch: Tensor) -> Any:
        result = model(batch)
        if not memfit.is_tracing():
            largest.append(float(result.detach().max()))
        return result.square().mean()

    with s.fit(noting) as job:
        job.step(BATCH)
    assert largest
    s.trains_as(plain)


@follows("trace/splitting.py", "the job was planned for whole batches")
def a_sample_of_parts_for_steps(s: Scene) -> None:
    window = Parts([BATCH, BATCH])
    with s.fit(lines=True) as job, job.lines() as lines:
        s.refused(lambda: lines.expect(window))
    s.begin()
    with s.fit(sample=window) as job:
        job.step(window)
    s.trains_as(lambda model: by_parts(model, 2))


MASK = torch.tensor([[True] * 8, [True] * 8, [False] * 7 + [True], [True] * 8])


def of_counted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(batch[0]).square()[batch[1]].mean()


def counting(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch[0]).square()[batch[1]].sum(), batch[1].sum()


def spread(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean(0).square().sum()


@follows("trace/splitting.py", "this loss does not add up over microbatches")
def counts_of_a_mean_or_a_declared_change(s: Scene) -> None:
    batch = (BATCH, MASK)
    s.refused(lambda: s.fit(of_counted, batch, plan=TWO))
    for function, wishes in ((of_counted, {"weight": lambda part: int(part[1].sum())}), (counting, {})):
        s.begin()
        with s.fit(function, batch, plan=TWO, **wishes) as job:
            job.step(batch)
        ours = [p.detach().clone() for p in s.model.parameters()]
        s.begin()
        of_counted(s.model, batch).backward()
        s.optimizer.step()
        torch.testing.assert_close(ours, [*s.model.parameters()])
    s.begin()
    with s.fit(spread, plan=TWO, allow={"nonadditive-loss"}) as job:
        job.step(BATCH)
    s.trains_as(lambda model: [(spread(model, half) / 2).backward() for half in BATCH.split(2)])


def of_text(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch["text"])


def cut_refused(s: Scene, function: Any, sample: Any) -> None:
    """Meets the refusal of a plan with two microbatches; without a plan such a batch is trained whole."""
    s.begin()
    s.refused(lambda: s.fit(function, sample, plan=TWO))


def cuts(s: Scene, function: Any, sample: Any, **wishes: Any) -> None:
    s.begin()
    assert s.fit(function, sample, plan=TWO, **wishes).step(sample).is_finite


class Carrier:
    """Holds a tensor where nothing looks."""

    def __init__(self, text: Tensor) -> None:
        self.text = text


@dataclass
class Record:
    text: Tensor


def of_record(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch.text)


@follows("trace/batch.py", "which holds data that cannot be cut into rows")
def a_dict_a_dataclass_or_a_tensor_of_an_array(s: Scene) -> None:
    cut_refused(s, of_record, Carrier(BATCH))
    cuts(s, of_record, Record(BATCH))
    cuts(s, of_text, {"text": BATCH})
    cuts(s, loss, torch.from_numpy(BATCH.numpy()))


@follows("trace/batch.py", "so it has no rows to count or slice")
def a_dict_with_rows(s: Scene) -> None:
    cut_refused(s, lambda model, batch: model(batch["text"].expand(4, 8)).mean(), {"text": torch.tensor(1.0)})
    cuts(s, of_text, {"text": BATCH})


class ReadOnly(Mapping[str, Tensor]):
    def __init__(self, text: Tensor, *, source: str) -> None:
        self.text, self.source = text, source

    def __getitem__(self, key: str) -> Tensor:
        return {"text": self.text}[key]

    def __iter__(self) -> Iterator[str]:
        return iter(("text",))

    def __len__(self) -> int:
        return 1


@follows("trace/batch.py", "that cannot be rebuilt from a dict")
def a_dict_of_a_mapping(s: Scene) -> None:
    batch = ReadOnly(BATCH, source="a file")
    cut_refused(s, of_text, batch)
    cuts(s, of_text, dict(batch))


@follows("trace/batch.py", "is a nested or sparse tensor")
def a_padded_tensor(s: Scene) -> None:
    texts = [BATCH[:3], BATCH[:2]]
    nested = torch.nested.nested_tensor(texts, layout=torch.jagged)
    cut_refused(s, lambda model, batch: loss(model, batch.values()), nested)
    cuts(s, loss, pad_sequence(texts, batch_first=True))


class Reader(nn.Module):
    """Reads texts of several lengths, which come padded."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.RNN(8, 8, batch_first=True)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.reader(pack_padded_sequence(*batch, batch_first=True))[0].data


@follows("trace/batch.py", "is a PackedSequence")
def a_batch_that_is_packed_inside_the_model(s: Scene) -> None:
    texts = (torch.randn(4, 3, 8), torch.tensor([3, 3, 2, 1]))
    packed = pack_padded_sequence(*texts, batch_first=True)
    s.begin(Reader)
    cut_refused(s, lambda model, batch: model.reader(batch)[0].data.square().mean(), packed)
    cuts(s, loss, texts, weight=lambda part: int(part[1].sum()))


@follows("trace/batch.py", "the batch is empty")
def batches_with_rows(s: Scene) -> None:
    job = s.fit()
    s.refused(lambda: job.step(BATCH[:0]))
    for batch in (BATCH[:0], BATCH):
        if len(batch):
            job.step(batch)
    job.close()
    s.trains_as(plain)


@follows("trace/trace.py", "What counts rows in the batch was not found")
def a_stack_a_way_to_cut_or_a_whole_batch(s: Scene) -> None:
    cut_refused(s, of_columns, COLUMNS)
    cuts(s, of_columns, COLUMNS, split=cut_columns, weight=lambda part: part.shape[1])
    s.begin()
    with s.fit(of_columns, COLUMNS, plan=Plan(microbatches=1)) as job:
        job.step(COLUMNS)
    s.trains_as(lambda model: of_columns(model, COLUMNS).backward())
    cuts(s, loss, torch.stack([*BATCH]))


class Levels(nn.Module):
    """Passes its layer once for each level of a batch of shape (levels, rows, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, batch: Tensor) -> Tensor:
        return torch.stack([self.layer(level) for level in batch])


@follows("trace/assemble.py", "a part of the batch is not computed by the calls")
def levels_that_are_cut_by_rows_or_not(s: Scene) -> None:
    levels = torch.stack([BATCH, BATCH + 1, BATCH + 2])
    s.begin(Levels)
    s.refused(lambda: memfit.profile(s.model, s.optimizer, loss, levels, microbatches=(1, 3)))
    cuts(
        s,
        loss,
        levels,
        split=lambda batch, count: [*batch.tensor_split(min(count, batch.shape[1]), 1)],
        weight=lambda part: part.shape[1],
    )
    s.begin()
    with s.fit(sample=levels, plan=Plan(microbatches=1)) as job:
        job.step(levels)
    s.trains_as(lambda model: loss(model, levels).backward())


def counted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return (model(batch[0]).square() * batch[1]).sum(), batch[1].sum()


@follows("engine/backward.py", "there is no mean. Skip a batch without targets")
def batches_with_targets(s: Scene) -> None:
    targets, none = (BATCH, torch.ones(4, 8)), (BATCH, torch.zeros(4, 8))
    job = s.fit(counted, targets)
    s.refused(lambda: job.step(none))
    for batch in (none, targets):
        if batch[1].any():
            assert job.step(batch).is_finite
    assert job.steps == 1
