"""Saves: what other programs read from them, what comes back, what an interruption leaves, what a hostile file can do."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import memfit
from memfit.core.errors import StoreError, UnsupportedError, UsageError
from memfit.core.plan import BlockPlan, Plan
from memfit.core.tiers import Tier
from memfit.files import replace, writer
from memfit.files.tensor_bytes import row_major_parts
from memfit.files.trainer import decode_value, encode_value
from memfit.integrations.recipes.gpt import find_recipe
from memfit.job.loading import load
from memfit.runs.saving import save_job
from memfit.store import FileOperations

ON_DISK = BlockPlan(weight_home=Tier.DISK, gradient_home=Tier.DISK, state_home=Tier.DISK)


class Odd(nn.Module):
    """One layer of everything that lies differently in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.LayerNorm(8)
        # Column by column in memory, and larger than a small piece.
        self.turned = nn.Parameter(torch.randn(70, 8).t())
        self.head = nn.Linear(70, 5)
        self.bfloat = nn.Linear(5, 5, dtype=torch.bfloat16)
        self.narrow = nn.Parameter(torch.randn(5, dtype=torch.float16))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("counts", torch.arange(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("spread", torch.randn(6, 4).t())
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("forgotten", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.convolution(x).mean((2, 3))) @ self.turned
        out = self.bfloat(self.head(hidden).bfloat16()).float()
        return (out * self.scale + self.narrow.float()).square().mean()


def odd_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


PLANS: dict[type[nn.Module], Plan] = {}


def on_disk(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, sample: Any) -> Plan:
    if type(model) not in PLANS:
        PLANS[type(model)] = _plan_on_disk(model, optimizer, loss, sample)
    return PLANS[type(model)]


def _plan_on_disk(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, sample: Any) -> Plan:
    profile = memfit.profile(model, optimizer, loss, sample)
    return Plan(blocks={block.name: ON_DISK for block in profile.blocks if not block.is_spanning})


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    # One page of data a piece: tensors are cut, pieces are shared.
    monkeypatch.setattr(writer, "PIECE_BYTES", 8192)


class Trained:
    """A job after two steps, and what plain PyTorch would hold."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        batch: Any,
        build: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        *,
        is_away: bool = True,
    ) -> None:
        self.model, self.loss, self.batch = model, loss, batch
        self.optimizer = build(model)
        plan = on_disk(model, self.optimizer, loss, batch) if is_away else Plan()
        self.job = memfit.fit(model, self.optimizer, loss, batch, plan=plan, enforce=False)
        self.job.step(batch)
        self.job.step(batch)

    def save(self, directory: Path, **options: Any) -> Any:
        return save_job(
            directory,
            model=self.model,
            optimizer=self.optimizer,
            blocks=self.job._assembly.blocks,
            states=self.job._assembly.states,
            steps=2,
            **options,
        )


@pytest.fixture
def odd() -> Iterator[Trained]:
    trained = Trained(Odd(), odd_loss, torch.randn(4, 3, 6, 6))
    yield trained
    trained.job.close()


class Two(nn.Sequential):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(40, 30), nn.Linear(30, 20))


def square_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.fixture
def two() -> Iterator[Trained]:
    trained = Trained(Two(), square_loss, torch.randn(4, 40))
    yield trained
    trained.job.close()


def tiny(seed: int = 0) -> tuple[nn.Module, Any, Tensor]:
    recipe = find_recipe("gpt-tiny")
    batch = torch.randint(0, 500, (4, 33), generator=torch.Generator().manual_seed(seed))
    return recipe.build_model(seed), recipe.loss, batch


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("is_away", [True, False])
def test_load_file_gives_what_state_dict_gives_for_every_dtype_and_layout(tmp_path: Path, is_away: bool) -> None:
    trained = Trained(Odd(), odd_loss, torch.randn(4, 3, 6, 6), is_away=is_away)
    trained.job.save(tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    trained.job.close()
    expected = trained.model.state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name
    Odd().load_state_dict(loaded)


@pytest.mark.usefixtures("small_pieces")
def test_optimizer_file_gives_what_the_optimizer_holds(tmp_path: Path, odd: Trained) -> None:
    odd.job.save(tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "optimizer.safetensors")
    odd.job.close()
    names = {id(p): name for name, p in odd.model.named_parameters()}
    expected = {
        f"{names[id(p)]}.{key}": value
        for p, state in odd.optimizer.state.items()
        for key, value in state.items()
        if key != "step"
    }
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


@pytest.mark.parametrize("max_shard_bytes", ["5GB", 100_000])
def test_from_pretrained_loads_the_save_with_its_ties(tmp_path: Path, max_shard_bytes: int | str) -> None:
    from transformers import AutoModelForCausalLM

    model, loss, batch = tiny()
    trained = Trained(model, loss, batch)
    result = trained.job.save(tmp_path / "out", max_shard_bytes=max_shard_bytes)
    trained.job.close()
    found: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    again, info = found
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert again.config.architectures == ["GPT2LMHeadModel"]
    assert again.lm_head.weight is again.transformer.wte.weight
    for (name, p), (_, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    shards = [name for name in result.files if name.startswith("model")]
    assert (len(shards) > 1) == (max_shard_bytes == 100_000)
    for name in shards:
        with safe_open(tmp_path / "out" / name, "pt") as file:
            assert file.metadata()["format"] == "pt"
            assert "lm_head.weight" not in file.keys()  # noqa: SIM118, not a dictionary


def test_a_transformers_model_that_is_stored_in_another_layout_comes_back(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        hidden_size=16,
        num_hidden_layers=2,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        num_local_experts=4,
        max_position_embeddings=32,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config).train()
    _, loss, _ = tiny()
    trained = Trained(model, loss, torch.randint(0, 64, (2, 9)))
    trained.job.save(tmp_path / "out")
    trained.job.close()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, p), (_, q) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_ties_of_a_plain_model_load_with_safetensors_own_load_model(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

    def loss(model: Any, batch: Tensor) -> Tensor:
        return model.head(model.embedding(batch)).square().mean()

    trained = Trained(Tied(), loss, torch.randint(0, 11, (3, 4)))
    trained.job.save(tmp_path / "out")
    trained.job.close()
    again = Tied()
    load_model(again, tmp_path / "out" / "model.safetensors")
    assert torch.equal(again.head.weight, trained.model.head.weight)  # type: ignore[union-attr]
    fresh = Tied()
    load(tmp_path / "out", fresh)
    assert torch.equal(fresh.head.weight, again.head.weight)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True, weight_decay=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_plain_step_after_loading_is_the_one_that_would_have_come(tmp_path: Path, name: str) -> None:
    build = OPTIMIZERS[name]
    model, loss, batch = tiny()
    trained = Trained(model, loss, batch, build)
    trained.optimizer.param_groups[0]["lr"] = 3e-3
    torch.manual_seed(7)
    trained.job.save(tmp_path / "out", extra={"epoch": 3, "scheduler": {"base": (1.0, math.inf), "x": None}})
    drawn = torch.rand(3)
    trained.job.close()

    other, _, _ = tiny(seed=1)
    optimizer = build(other)
    result = load(tmp_path / "out", other, optimizer)
    assert torch.equal(torch.rand(3), drawn)
    assert result.steps == 2
    assert result.extra == {"epoch": 3, "scheduler": {"base": (1.0, math.inf), "x": None}}
    assert repr(optimizer) == repr(trained.optimizer)
    for m, o in ((model, trained.optimizer), (other, optimizer)):
        m.zero_grad()
        loss(m, batch).backward()
        o.step()
    for (n, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q), n
        for key, value in trained.optimizer.state[p].items():
            assert type(optimizer.state[q][key]) is type(value), (n, key)
            assert torch.equal(torch.as_tensor(optimizer.state[q][key]), torch.as_tensor(value)), (n, key)


def test_a_loaded_run_goes_on_in_a_job_as_the_first_would_have(tmp_path: Path) -> None:
    model, loss, batch = tiny()
    trained = Trained(model, loss, batch)
    trained.job.save(tmp_path / "out")
    expected = trained.job.step(batch).loss
    trained.job.close()
    other, _, _ = tiny(seed=1)
    optimizer = adamw(other)
    load(tmp_path / "out", other, optimizer)
    with memfit.fit(other, optimizer, loss, batch, plan=trained.job.plan, enforce=False) as job:
        assert job.step(batch).loss == expected
        with pytest.raises(UsageError, match="running job"):
            load(tmp_path / "out", other, optimizer)


# --- what an interruption leaves ------------------------------------------------------------------------------------------------


class Breaking(FileOperations):
    """Fails at the n-th call that changes something."""

    def __init__(self, at: int, number: int = errno.EIO) -> None:
        self.at, self.number, self.calls = at, number, 0

    def _count(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            raise OSError(self.number, os.strerror(self.number))

    def pwrite(self, descriptor: int, source: memoryview, offset: int) -> int:
        self._count()
        return super().pwrite(descriptor, source, offset)

    def allocate(self, descriptor: int, offset: int, nbytes: int) -> None:
        self._count()
        super().allocate(descriptor, offset, nbytes)

    def fsync(self, descriptor: int) -> None:
        self._count()
        super().fsync(descriptor)

    def fdatasync(self, descriptor: int) -> None:
        self._count()
        super().fdatasync(descriptor)

    def mkdir(self, path: Path) -> None:
        self._count()
        super().mkdir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count()
        super().rename(source, target)


def digest(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(directory.iterdir())}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_save_that_fails_anywhere_leaves_the_old_one_whole_and_nothing_beside_it(
    tmp_path: Path, two: Trained, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(replace, "_exchange", lambda one, other: False)
    target = tmp_path / "out"
    two.save(target)
    before = digest(target)
    two.job.step(two.batch)
    whole = Breaking(at=0)
    two.save(tmp_path / "count", operations=whole)
    calls = whole.calls + (0 if can_exchange else 1)
    after: dict[str, str] = {}
    outcomes: list[bool] = []
    for at in range(1, calls + 5):
        broken = Breaking(at=at)
        with contextlib.suppress(StoreError):
            two.save(target, operations=broken)
        after = digest(target)
        outcomes.append(after != before)
        if after != before:
            break
        assert sorted(p.name for p in tmp_path.iterdir()) == ["count", "out"]
    # It failed at every call but the last ones, which come when the new save is in place.
    assert len(outcomes) > 10 and not any(outcomes[:-1]) and outcomes[-1]
    assert after.keys() == before.keys()
    load(target, Two())


def test_the_exception_of_an_interrupt_leaves_the_old_save(
    tmp_path: Path, two: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.save(tmp_path / "out")
    before = digest(tmp_path / "out")

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memfit.runs.saving.write_tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        two.save(tmp_path / "out")
    assert digest(tmp_path / "out") == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_save_left_is_removed_by_the_next_and_a_live_one_is_not(tmp_path: Path, two: Trained) -> None:
    import fcntl

    dead, live = tmp_path / ".out.saving-0123", tmp_path / ".out.saving-4567"
    for path in (dead, live):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    lock = os.open(live, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    two.save(tmp_path / "out")
    os.close(lock)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".out.saving-4567", "out"]


@pytest.mark.parametrize("way", ["it is through", "it has the lock"])
def test_two_saves_of_one_target_at_once_do_not_take_each_others_directory(way: str, tmp_path: Path) -> None:
    """The other one comes between the making of a directory and its locking."""
    import fcntl

    met: list[tuple[Path, int]] = []

    class Meets(FileOperations):
        def mkdir(self, path: Path) -> None:
            super().mkdir(path)
            if not met:
                lock = os.open(path, os.O_RDONLY)
                fcntl.flock(lock, fcntl.LOCK_EX)
                met.append((path, lock))
                if way == "it is through":
                    path.rmdir()
                    os.close(lock)

    with replace.replacing(tmp_path / "out", stale=lambda _: True, operations=Meets()) as new:
        assert new != met[0][0]
        (new / "a").write_text("whole")
    assert (tmp_path / "out" / "a").read_text() == "whole"
    if way == "it has the lock":
        met[0][0].rmdir()
        os.close(met[0][1])
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_files_of_others_stay_and_files_of_an_older_save_do_not(tmp_path: Path, two: Trained) -> None:
    target = tmp_path / "deep" / "out"
    two.save(target, max_shard_bytes=1000)
    assert (target / "model.safetensors.index.json").exists()
    (target / "tokenizer.json").write_text("mine")
    (target / "link").symlink_to("tokenizer.json")
    two.save(target)
    assert (target / "tokenizer.json").read_text() == "mine"
    assert (target / "link").readlink() == Path("tokenizer.json")
    assert sorted(p.name for p in target.iterdir()) == [
        "link", "memfit_state.json", "model.safetensors", "optimizer.safetensors", "tokenizer.json",
    ]  # fmt: skip


def test_directories_that_cannot_be_replaced_are_refused_and_untouched(
    tmp_path: Path, two: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with" / "inside").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds the directory 'inside'"):
        two.save(tmp_path / "with")
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="is a file"):
        two.save(tmp_path / "file")
    assert (tmp_path / "with" / "inside").is_dir()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "is_mount", lambda path: path == tmp_path / "volume")
        (tmp_path / "volume").mkdir()
        with pytest.raises(UsageError, match="root of a file system"):
            two.save(tmp_path / "volume")
        assert not list((tmp_path / "volume").iterdir())
        two.save(tmp_path / "volume" / "model")


def test_a_save_into_the_working_directory_leaves_the_process_in_it(
    tmp_path: Path, two: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("notes").write_text("mine")
    two.save(Path())
    two.save(Path())
    assert Path.cwd() == tmp_path / "here"
    Path("more").write_text("mine")
    assert {file.name for file in (tmp_path / "here").iterdir()} >= {"notes", "more", "model.safetensors"}
    two.save(Path("deeper"))
    assert Path.cwd() == tmp_path / "here"


def test_the_directory_of_disk_homes_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = adamw(model)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    batch = torch.randn(2, 4)
    plan = on_disk(model, optimizer, loss, batch)
    with memfit.fit(model, optimizer, loss, batch, plan=plan, directory=tmp_path / "homes", enforce=False) as job:
        with pytest.raises(UsageError, match="disk homes"):
            job.save(tmp_path / "homes")
        job.step(batch)
    with pytest.raises(UsageError, match="closed"):
        job.save(tmp_path / "out")


def test_a_disk_that_is_too_full_is_known_before_anything_is_written(tmp_path: Path, two: Trained) -> None:
    class Full(Breaking):
        def free_bytes(self, path: Path) -> int:
            return 12_345

    full = Full(at=0)
    with pytest.raises(StoreError, match=r"\(12345 bytes\) free") as caught:
        two.save(tmp_path / "new" / "out", operations=full)
    assert caught.value.errno == errno.ENOSPC
    assert full.calls == 0
    assert list(tmp_path.iterdir()) == []


# --- files that lie -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    trained = Trained(model, loss, torch.randn(2, 4), is_away=False)
    trained.job.save(place / "out")
    trained.job.close()
    return place / "out"


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """A save of the test's own, to be damaged."""
    return Path(shutil.copytree(saved_once, tmp_path / "out"))


def fresh() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def lie(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    fields = json.loads(raw[8 : 8 + length])
    text = json.dumps(change(fields) or fields).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def entry(name: str, **fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header[name].update(fields)


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "huge shape": entry("0.weight", shape=[1 << 40, 1 << 40]),
    "negative shape": entry("0.weight", shape=[-3, -4]),
    "shape of text": entry("0.weight", shape="34"),
    "shape of truth": entry("0.weight", shape=[True, 12]),
    "unknown dtype": entry("0.weight", dtype="F7"),
    "narrow dtype": entry("0.weight", dtype="F16"),
    "beyond the end": entry("0.weight", shape=[1000], data_offsets=[0, 4000]),
    "overlap": entry("0.bias", data_offsets=[0, 12]),
    "missing field": lambda header: header["0.bias"].pop("shape"),
    "gap": lambda header: header.pop("0.weight") and None,
    "numbers as metadata": lambda header: header.update(__metadata__={"format": 1}),
    "a list": lambda header: [1, 2],
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_a_clear_error_and_changes_nothing(saved: Path, name: str) -> None:
    lie(saved / "model.safetensors", LIES[name])
    model = fresh()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(StoreError, match="model.safetensors is damaged"):
        load(saved, model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("length", [0, 5, 1 << 20, 1 << 62])
def test_a_header_length_beyond_the_file_allocates_nothing(saved: Path, length: int) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(StoreError, match="damaged"):
        load(saved, fresh())


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_a_file_that_was_cut_short_is_a_clear_error(saved: Path, kept: int) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        path = saved / name
        whole = path.read_bytes()
        path.write_bytes(whole[:kept])
        model = fresh()
        with pytest.raises(StoreError, match=f"{name} is damaged"):
            load(saved, model, adamw(model))
        path.write_bytes(whole)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 2}',
        '{"format": 1}',
        '{"format": 1, "steps": -1, "optimizer": {"class": "a"}, "random": {}}',
        '{"format": 1, "steps": 1, "optimizer": {"class": "a", "groups": [{}], "numbers": {}}, "random": {"cpu": ""}, "extra": {}}',
        '{"format": 1, "steps": 1, "optimizer": {"class": "a", "groups": [], "numbers": {}}, "random": {"cpu": "!"}, "extra": {}}',
        "[" * 100_000,
    ],
)
def test_a_trainer_state_that_is_none_is_a_clear_error(saved: Path, text: str) -> None:
    (saved / "memfit_state.json").write_text(text)
    model = fresh()
    with pytest.raises(StoreError, match="memfit_state.json"):
        load(saved, model, adamw(model))


def test_an_index_cannot_name_files_elsewhere(saved: Path) -> None:
    for name in ("../secret", "/etc/passwd", "memfit_state.json/..", 3, None, "notes.txt"):
        (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"0.weight": name}}))
        with pytest.raises(StoreError, match="index"):
            load(saved, fresh())


def test_a_model_or_optimizer_that_does_not_fit_is_refused_before_a_byte_changes(saved: Path) -> None:
    wrong: list[tuple[nn.Module, str]] = [
        (nn.Sequential(nn.Linear(4, 3)), "does not have"),
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2)), "missing"),
        (nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), "shape"),
        (fresh().double(), "float64"),
    ]
    for model, message in wrong:
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(UsageError, match=message):
            load(saved, model)
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    model = fresh()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for optimizer, message in (
        (torch.optim.SGD(model.parameters()), "torch.optim.sgd.SGD"),
        (torch.optim.AdamW(model[0].parameters()), "parameter groups"),  # type: ignore[index]
        (torch.optim.AdamW(model.parameters(), amsgrad=False), None),
    ):
        if message is not None:
            with pytest.raises(UsageError, match=message):
                load(saved, model, optimizer)
            assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        else:
            load(saved, model, optimizer)
    with pytest.raises(UsageError, match="meta"):
        load(saved, fresh().to("meta"))
    with pytest.raises(StoreError, match="no directory"):
        load(saved / "nowhere", fresh())


def test_a_state_of_another_shape_is_refused(saved: Path) -> None:
    model = fresh()
    lie(saved / "optimizer.safetensors", entry("0.weight.exp_avg", shape=[4, 3]))
    with pytest.raises(UsageError, match=r"'exp_avg' of '0.weight' has shape \(4, 3\)"):
        load(saved, model, adamw(model))


def test_what_has_no_form_without_pickling_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = adamw(model)

    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).square().mean()

    with memfit.fit(model, optimizer, loss, torch.randn(2, 2), enforce=False) as job:
        with pytest.raises(UnsupportedError, match=r"extra\['f'\] is a function"):
            job.save(tmp_path / "out", extra={"f": loss})
        with pytest.raises(UsageError, match="max_shard_bytes"):
            job.save(tmp_path / "out", max_shard_bytes=0)
    assert list(tmp_path.iterdir()) == []


# --- small parts ----------------------------------------------------------------------------------------------------------------


@given(data=st.data())
def test_row_major_parts_are_any_range_of_any_strided_tensor(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    base = torch.arange(math.prod(shape)).view([shape[i] for i in order])
    tensor = base.permute([order.index(i) for i in range(len(shape))]) if shape else base.view(())
    first = data.draw(st.integers(0, tensor.numel()))
    count = data.draw(st.integers(0, tensor.numel() - first))
    out = torch.full((count,), -1)
    for part, start in row_major_parts(tensor, first, count):
        assert (out[start : start + part.numel()] == -1).all()
        out[start : start + part.numel()] = part.reshape(-1)
    assert torch.equal(out, tensor.reshape(-1)[first : first + count])


numbers = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
values = st.recursive(
    numbers,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(value=values)
def test_values_come_back_with_their_types_through_json(value: Any) -> None:
    text = json.dumps(encode_value(value, "x"), allow_nan=False)
    assert repr(decode_value(json.loads(text), "x")) == repr(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_small_tensors_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 2).mul(1e3).to(dtype)
    if dtype.is_floating_point:
        tensor[0, 0] = math.inf
    for one in (tensor, tensor[0, 1]):
        back = decode_value(json.loads(json.dumps(encode_value(one, "x"))), "x")
        assert back.dtype == dtype and back.shape == one.shape and torch.equal(back, one)


def test_forms_that_are_never_written_are_refused() -> None:
    shape = {"dtype": "float32", "shape": [2], "values": [1.0], "device": "cpu"}
    for value in ({"a": 1, "b": 2}, {"tuple": 3}, {"float": "1"}, {"tensor": shape}, {"tensor": {"dtype": "nn"}}, {}):
        with pytest.raises(StoreError, match="take another save"):
            decode_value(value, "x")
