"""`memfit train --model`: any causal language model of transformers, built empty, loaded in pieces, trained on text, through the real program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from memfit.cli import app
from memfit.core.limits import format_bytes
from memfit.integrations.recipes.token_batches import write_built_in_tokenizer

OPTIONS = ("--batch", "2", "--sequence", "16", "--steps", "3", "--limit", "8GiB", "--rate", "0.001")


def llama(directory: Path, *, vocabulary: int = 300) -> Any:
    """A saved Llama in bf16, small."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(directory)
    return model


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output + str(result.exception)
    return result.output


def test_the_program_trains_a_saved_directory_on_files_and_saves_what_from_pretrained_reads(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    source = llama(tmp_path / "model")
    write_built_in_tokenizer(300, tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 40, encoding="utf-8")
    arguments = ["train", "--model", str(tmp_path / "model"), "--data", str(text), *OPTIONS, "--allow", "bf16"]
    done = subprocess.run(
        [sys.executable, "-m", "memfit", *arguments, "--save", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        },  # set: the program need not start again
    )
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "weights from its files, 2 sequences of 16 tokens of 1 files by its own tokenizer" in words
    assert "proof: predicted peak" in words
    assert "ran with processors:" in words and "threads: 1 to compute" in words and "allocator:" in words
    trained = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert trained.dtype == torch.float32
    # The tokenizer came along.
    kept = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert kept.decode(kept("To be, or not")["input_ids"]) == "To be, or not"
    for (name, mine), theirs in zip(trained.named_parameters(), source.parameters(), strict=True):
        # Three steps of AdamW at up to 0.001 each, from the values of the files.
        difference = (mine.detach() - theirs.detach().float()).abs().max()
        assert 0 < difference < 0.004, name


@pytest.mark.parametrize("is_built_in", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_configuration_alone_is_initialised_and_trained(is_built_in: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from memfit.integrations.recipes.model_recipe import model_recipe
    from memfit.integrations.recipes.token_batches import read_tokens

    llama(tmp_path, vocabulary=512)
    (tmp_path / "model.safetensors").unlink()
    config = tmp_path / "config.json"
    text = tmp_path / "text.txt"
    text.write_text("for i in range(10):\n    print(i)\n" * 40, encoding="utf-8")
    data = () if is_built_in else ("--data", str(text))
    arguments = ("train", "--model", str(config), *data, *OPTIONS, "--seed", "3", "--save", str(tmp_path / "out"))
    said = " ".join(run(*arguments).split())
    assert "new weights" in said
    assert f"{'Python source' if is_built_in else '1 files'} by 512 built-in tokens" in said
    trained = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    # The built-in tokens that it was trained on lie beside it, and make of text what training made of it.
    kept = AutoTokenizer.from_pretrained(tmp_path / "out")
    if not is_built_in:
        assert kept(text.read_text())["input_ids"] == read_tokens(512, files=[text])[:-1].tolist()
    recipe = model_recipe(config, batch_size=2, sequence_length=16, learning_rate=1e-3, files=[text])
    initial = recipe.build_model(3).state_dict()
    assert sorted(trained) == sorted(initial)
    # Three steps of AdamW at 0.001 from what the seed gives.
    assert all(0 < (tensor - initial[name]).abs().max() < 0.004 for name, tensor in trained.items())


def test_the_directorys_own_tokenizer_is_used(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    from memfit.integrations.recipes.model_recipe import model_recipe
    from memfit.integrations.recipes.token_batches import CorpusError, read_tokens

    llama(tmp_path)
    words = {"alpha": 0, "beta": 290, "gamma": 7, "?": 1}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "text.txt"
    text.write_text("alpha beta\ngamma delta\n" * 30, encoding="utf-8")
    tokens = read_tokens(300, files=[text], tokenizer=tmp_path / "tokenizer.json", end=2)
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == [0, 290, 7, 1] * 30 + [2]
    recipe = model_recipe(tmp_path, batch_size=2, sequence_length=8, learning_rate=1e-3, files=[text])
    assert "its own tokenizer" in recipe.description
    assert set(next(recipe.batches(0)).flatten().tolist()) <= {0, 290, 7, 1, 2}
    with pytest.raises(CorpusError, match="gives the token 290, the model knows 290"):
        read_tokens(290, files=[text], tokenizer=tmp_path / "tokenizer.json")


def test_profile_and_plan_take_the_same_option_and_bf16_is_planned_when_allowed(tmp_path: Path) -> None:
    llama(tmp_path)
    options = ("--model", str(tmp_path), "--batch", "2", "--sequence", "16")
    assert "LlamaForCausalLM" in run("profile", *options)
    file = tmp_path / "plan.json"
    run("plan", *options, "--limit", "8GiB", "--allow", "bf16", "--json", str(file))
    assert json.loads(file.read_text()).get("compute_dtype", "given") in ("given", "bfloat16")
    report = " ".join(run("plan", *options, "--limit", "8GiB", "--allow", "nonsense", code=2).split())
    assert "allow='nonsense' is not something that can be allowed" in report


def test_profile_says_that_attention_with_dropout_bypasses_tiled_kernels_and_what_it_costs(tmp_path: Path) -> None:
    llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.1}))
    said = " ".join(run("profile", "--model", str(tmp_path), "--batch", "2", "--sequence", "16").split())
    # Two layers of 4 heads: three matrices in fp32, against a number for each row.
    rows = 2 * 2 * 4 * 16
    probabilities, log_sums = format_bytes(3 * 4 * rows * 16), format_bytes(4 * rows)
    assert f"Attention bypasses tiled kernels in model.layers.0-1.self_attn: it saves {probabilities} of" in said
    assert f"scaled_dot_product_attention saves {log_sums} where" in said


def test_what_cannot_be_trained_on_text_is_refused_with_one_message(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    (tmp_path / "bert").mkdir()
    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path / "bert")
    llama(tmp_path / "small", vocabulary=100)
    llama(tmp_path / "llama")
    llama(tmp_path / "weights")
    write_built_in_tokenizer(300, tmp_path / "llama")
    (tmp_path / "small" / "model.safetensors").unlink()
    cases = {
        ("--model", str(tmp_path / "weights"), "--sequence", "16"): "holds trained weights and no tokenizer.json",
        ("--model", str(tmp_path / "bert")): "describes BertForMaskedLM, which is no causal language model",
        ("--model", str(tmp_path / "small"), "--sequence", "16"): "vocabulary of 100 and no tokenizer.json",
        ("--model", str(tmp_path / "llama"), "--sequence", "17"): "takes at most 16",
        (
            "--model",
            str(tmp_path / "llama"),
            "--sequence",
            "16",
            "--data",
            "nowhere.txt",
        ): "there is no file nowhere.txt",
        ("--model", str(tmp_path / "llama"), "--recipe", "gpt-tiny"): "name --recipe or --model, not both",
        ("--recipe", "gpt-tiny", "--data", "x"): "--data is for --model",
    }
    for arguments, message in cases.items():
        text = " ".join(run("train", *arguments, code=2).split())
        assert message in text, text
