"""Batches of vision-language models are cut between rows, each row with its own images and videos: gradients are those of accumulation by hand."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import memfit
from equivalence import vision_models
from equivalence.vision_models import CLIP, LONG_CLIP, SMALL, TALL, WIDE, Item
from memfit.core.plan import Order, Plan

pytest.importorskip("transformers")
# What each row holds; cut into two and into four.
CONTENTS: dict[str, list[list[Item]]] = {
    "several images in a row, and none": [[SMALL, WIDE], [], [TALL], [SMALL]],
    "a half without images": [[WIDE, SMALL], [SMALL], [], []],
    "videos in one half only": [[CLIP], [LONG_CLIP], [SMALL], [TALL, SMALL]],
    "images beside videos": [[SMALL, CLIP], [], [CLIP, LONG_CLIP], [WIDE]],
}
LENGTH = 60
FAST = {("Qwen2VL", "several images in a row, and none", 2), ("Qwen2_5_VL", "videos in one half only", 2)}


def assert_equal_to_accumulation(kind: str, contents: list[list[Item]], plan: Plan, directory: Path) -> None:
    ours = vision_models.build(kind)
    reference = copy.deepcopy(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.0)
    rows = vision_models.rows_of(kind, contents, 5, LENGTH)
    size = len(rows) // plan.microbatches
    with memfit.fit(
        ours, optimizer, vision_models.loss_of, vision_models.together(rows), plan=plan, keep_gradients=True, directory=directory
    ) as job:  # fmt: skip
        for seed in (5, 6):  # the sample, and other numbers in the same places
            reference.zero_grad()
            rows = vision_models.rows_of(kind, contents, seed, LENGTH)
            parts = [vision_models.together(rows[start : start + size]) for start in range(0, len(rows), size)]
            losses = []
            for part in parts:
                loss = vision_models.loss_of(reference, part)
                (loss / plan.microbatches).backward()
                losses.append(float(loss.detach()))
            result = job.step(vision_models.together(rows))
            assert list(result.losses) == losses
            for name, parameter in reference.named_parameters():
                found = job.gradient(name)
                if parameter.grad is None:
                    assert found is None, name
                else:
                    assert found is not None and torch.equal(found, parameter.grad), name
            # In this the batch of halves is the whole batch as well.
            whole = vision_models.loss_of(reference, vision_models.together(rows))
            assert sum(losses) / len(losses) == pytest.approx(float(whole.detach()), rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "content", "microbatches"),
    [
        pytest.param(
            kind, content, microbatches, marks=() if (kind, content, microbatches) in FAST else pytest.mark.slow
        )
        for kind in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v")
        for content in CONTENTS
        for microbatches in (2, 4)
        if not (kind == "Glm4v" and "video" in content)  # its videos are written otherwise
    ],
)
def test_gradients_are_those_of_accumulation_over_rows_with_their_images(
    kind: str, content: str, microbatches: int, tmp_path: Path
) -> None:
    # The vision layers run twice, for images and for videos: layer-major, their gradients add up in another order, as those of all shared weights do.
    is_shared = content == "images beside videos"
    plan = Plan(microbatches=microbatches, order=Order.MICROBATCH_MAJOR if is_shared else Order.LAYER_MAJOR)
    assert_equal_to_accumulation(kind, CONTENTS[content], plan, tmp_path)
