"""Weights go in and out of files as transformers lays them out: bit for bit `from_pretrained`, name for name `save_pretrained`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import memfit
from equivalence import zoo
from equivalence.compare import same_bits
from equivalence.test_deferred import assert_same_model, built_empty, fit_from
from memfit.core.errors import StoreError, UsageError
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.engine.conversions import file_tensors, loading_conversions
from memfit.job.loading import load
from memfit.tensors.guard import is_away

KNOWN = ("gpt2", "llama", "mixtral", "t5", "bert", "vit", "resnet", "albert")
# Ties, experts that are put together, an encoder with a decoder, older names, buffers: the others repeat one of these.
QUICK = ("gpt2", "mixtral", "vit", "resnet")


def spread(model: nn.Module) -> nn.Module:
    """Every weight another one, so that none can stand for its neighbour."""
    torch.manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape))
    return model


def in_files(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in directory.glob("model*.safetensors"):
        found |= safetensors.torch.load_file(file)
    return found


def ties(model: nn.Module) -> list[str]:
    first = dict(model.named_parameters())
    return [n for n, _ in model.named_parameters(remove_duplicate=False) if n not in first]


def on_disk_job(model: nn.Module, case: zoo.Case, weights: Path, homes: Path) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    names = [
        block.name for block in memfit.profile(case.model, optimizer_of(case.model), case.loss, case.batch(0)).blocks
    ]
    home = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)
    return memfit.fit(
        model,
        optimizer,
        case.loss,
        case.batch(0),
        weights=weights,
        plan=Plan(blocks=dict.fromkeys(names, home)),
        directory=homes,
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in KNOWN])
def test_weights_in_shards_go_in_and_out_as_transformers_reads_and_writes_them(name: str, tmp_path: Path) -> None:
    case = zoo.ZOO[name]()
    source: Any = spread(case.model)
    source.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    kind: Any = type(source)
    plain = kind.from_pretrained(tmp_path / "theirs").train()
    model = built_empty(lambda: zoo.ZOO[name]().model, draws=False)
    with on_disk_job(model, case, tmp_path / "theirs", tmp_path / "homes") as job:
        job.save(tmp_path / "ours", max_shard_bytes="20KB")
    assert_same_model(model, plain)
    assert ties(model) == ties(plain)
    ours, theirs = in_files(tmp_path / "ours"), in_files(tmp_path / "theirs")
    assert sorted(ours) == sorted(theirs)
    for key, tensor in theirs.items():
        assert same_bits(ours[key], tensor), key
    assert_same_model(kind.from_pretrained(tmp_path / "ours").train(), plain)
    ordinary = zoo.ZOO[name]().model
    load(tmp_path / "ours", ordinary)
    assert_same_model(ordinary, plain)


@pytest.fixture
def register() -> Iterator[Any]:
    """Gives Llama another layout in files, for the time of a test."""
    from transformers import conversion_mapping

    name = "LlamaForCausalLM"

    def as_conversion(*rules: Any) -> None:
        conversion_mapping.register_checkpoint_conversion_mapping(name, list(rules), overwrite=True)

    conversion_mapping.get_checkpoint_conversion_mapping(name)  # fills the library's table
    yield as_conversion
    conversion_mapping._checkpoint_conversion_mapping_cache.pop(name, None)
    conversion_mapping.USER_REGISTERED_MAPPINGS.discard(name)


def rules(kind: str) -> tuple[Any, ...]:
    from transformers import core_model_loading as library

    match kind:
        case "one file tensor, cut":
            names = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
            return (library.WeightConverter("mlp.gate_up.weight", names, [library.Chunk(dim=0)]),)
        case "one file tensor, cut across its rows":
            names = ["self_attn.k_proj.weight", "self_attn.v_proj.weight"]
            return (library.WeightConverter("self_attn.kv.weight", names, [library.Chunk(dim=1)]),)
        case "turned":
            return (library.WeightConverter("o_turned.weight", "o_proj.weight", [library.Transpose(0, 1)]),)
        case _:
            assert kind == "interleaved"
            return (library.WeightConverter("o_mixed.weight", "o_proj.weight", [library.Interleave(0)]),)


KINDS = ("one file tensor, cut", "one file tensor, cut across its rows", "turned", "interleaved")


@pytest.mark.parametrize("kind", [k if k in KINDS[:2] else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_layouts_that_cut_turn_or_mix_are_loaded_as_from_pretrained_does(
    kind: str, register: Any, tmp_path: Path
) -> None:
    register(*rules(kind))
    case = zoo.llama()
    source: Any = spread(case.model)
    source.save_pretrained(tmp_path / "theirs")
    assert set(in_files(tmp_path / "theirs")) - set(source.state_dict())  # the layout did change
    plain = type(source).from_pretrained(tmp_path / "theirs").train()
    assert_same_model(plain, source)
    model = built_empty(lambda: zoo.llama().model, draws=False)
    with fit_from(model, case, tmp_path / "theirs") as job:
        job.save(tmp_path / "ours")
    assert_same_model(model, plain)
    is_theirs = set(in_files(tmp_path / "ours")) == set(in_files(tmp_path / "theirs"))
    assert is_theirs == (kind == "one file tensor, cut")  # the others are kept under the model's names
    assert_same_model(type(source).from_pretrained(tmp_path / "ours").train(), plain)


def test_what_moves_is_known_without_reading_and_experts_are_ranges_of_their_stack() -> None:
    model = zoo.ZOO["mixtral"]().model
    state = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    files = file_tensors(model, state)
    experts, twice_wide, width = state["model.layers.1.mlp.experts.gate_up_proj"]
    wide = twice_wide // 2
    for e in range(experts):
        for position, letter in enumerate(("w1", "w3")):
            found = files[f"model.layers.1.block_sparse_moe.experts.{e}.{letter}.weight"]
            assert found.shape == (wide, width)
            (part,) = found.parts
            assert part.name == "model.layers.1.mlp.experts.gate_up_proj"
            assert (part.first, part.count) == ((2 * e + position) * wide * width, wide * width)
    conversions, unused = loading_conversions(model, state, {name: f.shape for name, f in files.items()})
    assert unused == []
    assert all(pieces is not None for c in conversions for _, pieces in c.targets.values())
    covered = {name: shape for c in conversions for name, (shape, _) in c.targets.items()}
    assert covered == state


def test_what_files_lack_or_have_too_much_of_is_named(tmp_path: Path) -> None:
    case = zoo.ZOO["mixtral"]()
    case.model.save_pretrained(tmp_path, max_shard_size="40KB")  # type: ignore[operator]
    model = built_empty(lambda: zoo.ZOO["mixtral"]().model, draws=False)
    index = tmp_path / "model.safetensors.index.json"
    shards = sorted(tmp_path.glob("*.safetensors"))
    whole = {file: file.read_bytes() for file in [index, *shards]}

    def refused(kind: type[Exception], words: str) -> None:
        with pytest.raises(kind, match=words):
            fit_from(model, case, tmp_path)
        assert all(is_away(p) for p in model.parameters())
        for file, data in whole.items():
            file.write_bytes(data)

    shards[1].unlink()
    refused(StoreError, f"{shards[1].name}.*(No such file|does not exist|not there)")
    shards[1].write_bytes(whole[shards[1]][:-100])
    refused(StoreError, f"{shards[1].name} is damaged")
    shards[1].write_bytes(whole[shards[1]][:5])
    refused(StoreError, f"{shards[1].name} is damaged")
    index.write_text(index.read_text().replace(shards[1].name, "../else.safetensors"))
    refused(StoreError, "names the file '../else.safetensors'")
    index.write_text(index.read_text()[:-30])
    refused(StoreError, "is no index of weights")
    state = safetensors.torch.load_file(shards[1])
    experts = sorted(name for name in state if "experts.1.w" in name)
    one = {name: t for name, t in state.items() if name != experts[0]}
    safetensors.torch.save_file(one, shards[1])
    refused(UsageError, r"do not make|has shape \[4, .*\], in .* it has \[3, .*made of ")
    for file in shards:
        found = safetensors.torch.load_file(file)
        safetensors.torch.save_file({n: t.to(torch.int32) if "norm" in n else t for n, t in found.items()}, file)
    refused(UsageError, r"norm.* is torch.float32, in .* it is torch.int32: they do not convert")
    fit_from(model, case, tmp_path).close()


def test_a_tied_weight_that_is_there_twice_must_be_the_same_twice(tmp_path: Path) -> None:
    case = zoo.gpt2()
    state = {name: t.clone() for name, t in case.model.state_dict().items()}
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_file(state, file)
    model = built_empty(lambda: zoo.gpt2().model, draws=False)
    with fit_from(model, case, tmp_path):
        pass
    assert_same_model(model, case.model)
    state["lm_head.weight"][3, 4] += 1
    safetensors.torch.save_file(state, file)
    model = built_empty(lambda: zoo.gpt2().model, draws=False)
    with pytest.raises(
        UsageError, match=r"lm_head\.weight.* are one weight in the model, and .* holds different values"
    ):
        fit_from(model, case, tmp_path)
