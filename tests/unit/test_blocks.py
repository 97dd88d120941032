"""Blocks and sites: found by rule, by name, and always a partition."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

from memfit.core.errors import UsageError
from memfit.trace.blocks import BlockMap, find_blocks

transformers = pytest.importorskip("transformers")


def names(found: BlockMap) -> list[str]:
    return [block.name for block in found.blocks]


def sites(found: BlockMap) -> list[str]:
    return [site.name for site in found.sites]


def assert_partition(model: nn.Module, found: BlockMap) -> None:
    counted = Counter(id(parameter) for block in found.blocks for _, parameter in block.parameters)
    assert counted == Counter(id(parameter) for parameter in model.parameters())
    for block in found.blocks:
        for name, parameter in block.parameters:
            assert model.get_parameter(name) is parameter
    owner = found.block_of_parameter()
    for site in found.sites:
        assert set(site.blocks) == {owner[id(parameter)] for parameter in site.module.parameters()}
    assert len(set(names(found))) == len(found.blocks)


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=8, bos_token_id=0, eos_token_id=0
        )
    )


def test_gpt2_has_its_layers_as_repeated_sites_and_the_tied_head_reads_the_embeddings_block() -> None:
    model = gpt2()
    found = find_blocks(model)
    assert_partition(model, found)
    expected = ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1", "transformer.ln_f"]
    assert names(found) == expected
    assert sites(found) == [*expected, "lm_head"]
    assert found.sites[-1].blocks == (0,)
    assert [site.is_repeated for site in found.sites] == [False, False, True, True, False, False]
    kinds = {block.name: block.kind for block in found.blocks}
    assert kinds["transformer.h.0"] == kinds["transformer.h.1"] != kinds["transformer.ln_f"]


def test_a_vision_transformers_embedding_takes_its_parts_and_its_class_token_together() -> None:
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(
            num_hidden_layers=2,
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
        )
    )
    found = find_blocks(model)
    assert_partition(model, found)
    assert sites(found)[0] == "vit.embeddings"
    assert len(found.blocks[0].parameters) == len(list(model.vit.embeddings.parameters())) == 4


def test_t5_has_the_layers_of_both_stacks_and_albert_one_shared_layer() -> None:
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, d_ff=16, num_layers=2, num_heads=2, d_kv=8, vocab_size=40)
    )
    found = find_blocks(t5)
    assert_partition(t5, found)
    for name in ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"):
        assert name in names(found)
    albert = transformers.AlbertForMaskedLM(
        transformers.AlbertConfig(
            num_hidden_layers=3,
            hidden_size=16,
            embedding_size=8,
            intermediate_size=16,
            num_attention_heads=2,
            vocab_size=40,
        )
    )
    found = find_blocks(albert)
    assert_partition(albert, found)
    assert sum("albert_layer_groups" in name for name in sites(found)) == 1


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_adapters_travel_with_the_layer_that_they_adapt_also_at_the_head() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn", "lm_head"], fan_in_fan_out=True)
    model = peft.get_peft_model(gpt2(), config)
    found = find_blocks(model)
    assert_partition(model, found)
    layer = next(block for block in found.blocks if block.name.endswith("h.0"))
    assert any("lora_A" in name for name, _ in layer.parameters)
    assert any(parameter.requires_grad for _, parameter in layer.parameters)
    assert not all(parameter.requires_grad for _, parameter in layer.parameters)
    assert sites(found)[-1].endswith("lm_head")


def test_members_without_parameters_are_no_sites() -> None:
    found = find_blocks(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Dropout(), nn.Linear(3, 2)))
    assert sites(found) == ["0", "3"]
    assert all(site.is_repeated for site in found.sites)


def test_a_backbone_with_more_than_half_of_all_weights_is_opened_and_a_smaller_stage_is_not() -> None:
    def stage(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))

    assert sites(find_blocks(nn.Sequential(stage(8), nn.Linear(8, 2)))) == ["0.0", "0.1", "1"]
    assert sites(find_blocks(nn.Sequential(stage(8), stage(8)))) == ["0", "1"]
    assert sites(find_blocks(nn.Sequential(stage(4), stage(16)))) == ["0", "1.0", "1.1"]


def test_lists_of_lists_are_opened_because_a_list_cannot_be_called() -> None:
    model = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 4)]) for _ in range(3)])
    assert sites(find_blocks(model)) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]


class Rooted(nn.Module):
    """A root with parameters of its own around a stack of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(2)])
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, bias in zip(self.layers, self.biases, strict=True):
            x = layer(x) * self.scale + bias
        return x


def test_parameters_of_a_module_around_sites_span_and_have_no_site() -> None:
    model = Rooted()
    found = find_blocks(model)
    assert_partition(model, found)
    assert sites(found) == ["layers.0", "layers.1"]
    spanning = [block for block in found.blocks if block.is_spanning]
    assert [block.name for block in spanning] == [""]
    assert {name for name, _ in spanning[0].parameters} == {"scale", "biases.0", "biases.1"}


def test_models_without_containers_have_their_children_or_themselves_as_sites() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.second = nn.Linear(2, 2)

    assert sites(find_blocks(Plain())) == ["first", "second"]
    assert sites(find_blocks(nn.Linear(2, 2))) == [""]
    attention = nn.MultiheadAttention(4, 2)
    found = find_blocks(attention)
    assert_partition(attention, found)
    assert sites(found) == [""]
    assert not found.blocks[0].is_spanning


def test_parametrized_layers_stay_whole() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 1))
    found = find_blocks(model)
    assert_partition(model, found)
    assert sites(found) == ["0", "1"]
    alone = parametrizations.weight_norm(nn.Linear(4, 4))
    assert sites(find_blocks(alone)) == [""]


def test_overrides_choose_the_sites_and_the_rest_is_found_as_leftovers() -> None:
    model = gpt2()
    found = find_blocks(model, ["transformer.h.0.mlp", model.transformer.h[1]])
    assert_partition(model, found)
    assert "transformer.h.0.mlp" in sites(found)
    assert "transformer.h.1" in sites(found)
    assert "transformer.h.0.attn.c_attn" in sites(found)
    assert "transformer.h.0" not in sites(found)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["transformer.layers"], "not a module"),
        ([nn.Linear(1, 1)], "not a module"),
        (["transformer.h.0", "transformer.h.0"], "twice"),
        (["transformer.h.0", "transformer.h.0.mlp"], "inside"),
        (["transformer.h"], "never called"),
        (["transformer.drop"], "no parameters"),
    ],
)
def test_overrides_that_cannot_be_sites_are_refused_by_name(overrides: list[str | nn.Module], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        find_blocks(gpt2(), overrides)


def test_models_with_nothing_to_place_and_lazy_ones_are_refused() -> None:
    with pytest.raises(UsageError, match="no parameters"):
        find_blocks(nn.ReLU())
    with pytest.raises(UsageError, match="lazy"):
        find_blocks(nn.Sequential(nn.LazyLinear(3)))


trees = st.recursive(
    st.just("leaf") | st.just("bare"),
    lambda inner: st.tuples(st.sampled_from(["list", "sequential", "custom"]), st.lists(inner, min_size=1, max_size=4)),
    max_leaves=12,
)


def grown(tree: object) -> nn.Module:
    if tree == "leaf":
        return nn.Linear(2, 3)
    if tree == "bare":
        return nn.ReLU()
    assert isinstance(tree, tuple)
    kind, parts = tree
    members = [grown(part) for part in parts]
    if kind == "list":
        return nn.ModuleList(members)
    if kind == "sequential":
        return nn.Sequential(*members)
    root = Owner()
    for index, member in enumerate(members):
        root.add_module(f"part{index}", member)
    return root


class Owner(nn.Module):
    """A module with a parameter of its own and a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@given(trees)
def test_blocks_partition_the_parameters_of_any_tree_and_sites_never_nest(tree: object) -> None:
    model = nn.Sequential(grown(tree), nn.Linear(1, 1))
    found = find_blocks(model)
    assert_partition(model, found)
    chosen = {id(site.module) for site in found.sites}
    for site in found.sites:
        assert not chosen & {id(part) for part in site.module.modules() if part is not site.module}
