"""A save or an export does not replace another model's configuration, and is not described by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memfit
from memfit.core.errors import UsageError
from memfit.runs.exporting import export_run
from memfit.runs.saving import check_save


def llama(width: int = 16) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config: Any = LlamaConfig(
        vocab_size=40, hidden_size=width, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=8,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def job_of(model: nn.Module, **arguments: Any) -> Any:
    if isinstance(model, nn.Linear):
        return memfit.fit(model, torch.optim.SGD(model.parameters()), _plain, torch.randn(2, 4), **arguments)
    tokens = torch.arange(12).reshape(2, 6)
    return memfit.fit(model, torch.optim.SGD(model.parameters()), _language, tokens, **arguments)


def _plain(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def _language(model: Any, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def test_another_models_directory_is_refused_and_left_alone_and_the_models_own_is_replaced(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    llama(32).save_pretrained(theirs)
    before = contents(theirs)
    mine = llama()
    mine.save_pretrained(tmp_path / "mine")
    for model in (mine, nn.Linear(4, 4)):
        with pytest.raises(UsageError, match=r"config\.json is of another model.*LlamaForCausalLM.*another directory"):
            check_save(theirs, model)
        job = job_of(model)
        with pytest.raises(UsageError, match=r"config\.json is of another model"):
            job.save(theirs)
        if model is mine:
            job.save(tmp_path / "mine")
        job.close()
        assert contents(theirs) == before
    assert json.loads((tmp_path / "mine" / "config.json").read_text())["hidden_size"] == 16


def test_a_configuration_that_describes_no_model_stays_or_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"rate": 3}')
    plain = nn.Linear(4, 4)
    with job_of(plain) as job:
        job.save(tmp_path)
    assert (tmp_path / "config.json").read_text() == '{"rate": 3}'
    with pytest.raises(UsageError, match="not of a model of transformers"):
        check_save(tmp_path, llama())


def test_an_export_over_another_model_is_refused_and_over_its_own_is_not(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    llama(32).save_pretrained(theirs)
    before = contents(theirs)
    for name, model in (("language", llama()), ("plain", nn.Linear(4, 4))):
        job = job_of(model, store=tmp_path / name)
        job.step(torch.arange(12).reshape(2, 6) if name == "language" else torch.randn(2, 4))
        job.close()
        with pytest.raises(UsageError, match=r"config\.json is of another model"):
            export_run(tmp_path / name, theirs)
        assert contents(theirs) == before
        for _ in range(2):  # the second over the first
            export_run(tmp_path / name, tmp_path / f"{name} out")
