from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from surefoot.checkpoint.export import export, export_checkpoint, put_weights
from surefoot.checkpoint.store import save
from surefoot.config import to_yaml
from surefoot.config.load import build_config
from surefoot.config.model import LoraConfig, ModelConfig
from surefoot.errors import RunError, UserError
from surefoot.train.model import load_policy
from tests.tiny import tiny_model, tiny_tokenizer

IDS = torch.tensor([[5, 9, 30, 7, 7, 60, 2, 11]])


def with_lora(seed: int = 1) -> nn.Module:
    """A PEFT model whose adapters do something."""
    from peft import LoraConfig as PeftLora
    from peft import get_peft_model

    model = get_peft_model(
        tiny_model(), PeftLora(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def tensors_in(folder: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    with safe_open(folder / file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def fingerprint(model: nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    return {name: (p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}


def same(a: dict[str, tuple[torch.Tensor, bool]], b: dict[str, tuple[torch.Tensor, bool]]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n][0], b[n][0]) and a[n][1] == b[n][1] for n in a)


def test_the_exported_model_computes_what_the_trained_one_does(tmp_path: Path):
    model = tiny_model(seed=3)
    export(model, tiny_tokenizer(), tmp_path / "out", dtype="float32")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")), logits(model))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_tensor_has_the_dtype_asked_for_and_the_config_says_so(tmp_path: Path, dtype: str):
    export(tiny_model(), tiny_tokenizer(), tmp_path / "out", dtype=dtype)
    assert {str(t.dtype) for t in tensors_in(tmp_path / "out").values()} == {f"torch.{dtype}"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


def test_bfloat16_is_the_trained_model_rounded_once(tmp_path: Path):
    model = tiny_model(seed=3)
    export(model, tiny_tokenizer(), tmp_path / "out", dtype="bfloat16")
    model.save_pretrained(tmp_path / "reference")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert torch.equal(
        logits(back), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "reference", dtype="bfloat16"))
    )


@pytest.mark.parametrize("tied", [True, False])
def test_the_keys_are_those_of_the_architecture_and_a_tied_head_is_stored_once(tmp_path: Path, tied: bool):
    model = tiny_model()
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    export(model, tiny_tokenizer(), tmp_path / "out", dtype="float32")
    expected = set(model.state_dict()) - ({"lm_head.weight"} if tied else set())
    assert set(tensors_in(tmp_path / "out")) == expected
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_a_merged_adapter_computes_what_the_adapted_model_does(tmp_path: Path):
    model = with_lora()
    export(model, tiny_tokenizer(), tmp_path / "out", dtype="float32")
    assert set(tensors_in(tmp_path / "out")) == set(tiny_model().state_dict()) - {"lm_head.weight"}
    back = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    torch.testing.assert_close(back, logits(model), atol=1e-5, rtol=1e-5)
    assert (back - logits(tiny_model())).abs().max() > 0.01  # the adapter does something


def test_merging_into_bfloat16_rounds_only_the_sum(tmp_path: Path):
    model = with_lora()
    for folder, dtype in (("exact", "float32"), ("rounded", "bfloat16")):
        export(model, tiny_tokenizer(), tmp_path / folder, dtype=dtype)
    exact, rounded = tensors_in(tmp_path / "exact"), tensors_in(tmp_path / "rounded")
    assert all(torch.equal(rounded[name], tensor.bfloat16()) for name, tensor in exact.items())


@pytest.mark.parametrize("merge_adapter", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_live_model_stays_as_it_is_bit_for_bit(tmp_path: Path, merge_adapter: bool, dtype: str):
    model = with_lora().train()
    before, config, output = fingerprint(model), model.config.to_dict(), logits(model.eval())
    model.train()
    export(model, tiny_tokenizer(), tmp_path / "out", merge_adapter, dtype)
    assert same(fingerprint(model), before)
    assert model.training
    assert model.config.to_dict() == config
    assert torch.equal(logits(model.eval()), output)


def test_an_adapter_can_be_written_as_one(tmp_path: Path):
    from peft import PeftModel

    model = with_lora()
    export(model, tiny_tokenizer(), tmp_path / "out", merge_adapter=False, dtype="float32")
    assert not (tmp_path / "out" / "model.safetensors").exists()
    back = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "out")).eval()
    assert torch.equal(logits(back), logits(model))
    export(model, tiny_tokenizer(), tmp_path / "half", merge_adapter=False, dtype="bfloat16")
    written = tensors_in(tmp_path / "half", "adapter_model.safetensors")
    assert {t.dtype for t in written.values()} == {torch.bfloat16}


def test_experts_are_named_as_the_architecture_is_published(tmp_path: Path):
    """In memory the experts of a layer are one tensor; on the disk each has its own."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4,
        num_experts_per_tok=2, eos_token_id=2, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    export(model, tiny_tokenizer(), tmp_path / "out", dtype="float32")
    names = set(tensors_in(tmp_path / "out"))
    for layer in range(2):
        for expert in range(4):
            for matrix in ("gate_proj", "up_proj", "down_proj"):
                assert f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight" in names
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(back), logits(model), atol=1e-6, rtol=1e-6)


def test_tokenizer_template_and_generation_settings_go_along(tmp_path: Path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    model.generation_config.eos_token_id = [2, 5]
    export(model, tokenizer, tmp_path / "out")
    back = AutoTokenizer.from_pretrained(tmp_path / "out")
    talk = [{"role": "user", "content": "7 + 5 ="}]
    ids = [t.apply_chat_template(talk, add_generation_prompt=True)["input_ids"] for t in (back, tokenizer)]
    assert ids[0] == ids[1]
    assert back.chat_template == tokenizer.chat_template
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == [2, 5]


def test_others_may_read_what_was_exported(tmp_path: Path):
    export(tiny_model(), tiny_tokenizer(), tmp_path / "out")
    usual = tmp_path / "usual"
    usual.touch()
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert modes == {usual.stat().st_mode}


class Odd(nn.Module):
    """Stands where a linear layer was; has no weight of the architecture's name, but one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(3))


def test_a_missing_or_extra_tensor_is_an_error_and_leaves_nothing(tmp_path: Path):
    model = tiny_model()
    model.model.layers[1].mlp.up_proj = Odd()
    with pytest.raises(RunError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight.*left over: .*own") as caught:
        export(model, tiny_tokenizer(), tmp_path / "out")
    assert caught.value.code == "export-keys"
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path):
    (tmp_path / "out").mkdir()
    export(tiny_model(), tiny_tokenizer(), tmp_path / "out")  # an empty folder is as good as none
    with pytest.raises(UserError) as caught:
        export(tiny_model(), tiny_tokenizer(), tmp_path / "out")
    assert caught.value.code == "export-target"


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path):
    script = f"""
import resource
from pathlib import Path
from surefoot.checkpoint.export import export
from surefoot.errors import RunError
from tests.tiny import tiny_model, tiny_tokenizer
model, tokenizer = tiny_model(), tiny_tokenizer()
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    export(model, tokenizer, Path({str(tmp_path)!r}) / "out")
except RunError as error:
    print(error.code)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout == "disk-full\n", done.stderr
    assert list(tmp_path.iterdir()) == []


def make_run(tmp_path: Path, tiny_folder: Path, lora: bool, dtype: str = "float32") -> tuple[Path, nn.Module]:
    """A run folder with two checkpoints, and the model as it was at the newest, in float32."""
    config = build_config(
        {
            "name": "a",
            "model": {"path": str(tiny_folder), "dtype": dtype, "lora": {"rank": 4} if lora else None},
            "data": {"sources": [{"type": "file", "path": "x.jsonl"}]},
            "rewards": {"functions": [{"type": "exact"}]},
            "train": {"steps": 2},
        }
    )
    settings = ModelConfig(path=str(tiny_folder), dtype="float32", lora=LoraConfig(rank=4) if lora else None)
    model = load_policy(settings, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    run = tmp_path / "runs" / "a"
    for step in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
        weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        save(run / "checkpoints", step, {"actor": weights, "actor_optimizer": {}}, {"step": step}, 9, to_yaml(config))
    return run, model


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("inner", ["", "checkpoints/step_000002"])
def test_a_run_or_a_checkpoint_of_it_becomes_a_model(tmp_path: Path, tiny_folder: Path, lora: bool, inner: str):
    run, model = make_run(tmp_path, tiny_folder, lora)
    export_checkpoint(run / inner, tmp_path / "out")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    model.set_attn_implementation("sdpa") if not lora else model.get_base_model().set_attn_implementation("sdpa")
    torch.testing.assert_close(logits(back), logits(model), atol=1e-5, rtol=1e-5)
    assert (logits(back) - logits(tiny_model())).abs().max() > 0.01


def test_without_a_word_about_it_the_dtype_is_the_runs(tmp_path: Path, tiny_folder: Path):
    run, _ = make_run(tmp_path, tiny_folder, lora=True, dtype="bfloat16")
    export_checkpoint(run, tmp_path / "a")
    export_checkpoint(run, tmp_path / "b", dtype="float32")
    a, b = tensors_in(tmp_path / "a"), tensors_in(tmp_path / "b")
    assert all(torch.equal(a[name], tensor.bfloat16()) for name, tensor in b.items())
    assert any(not torch.equal(a[name].float(), tensor) for name, tensor in b.items())  # the masters' own precision


def test_a_checkpoint_moved_elsewhere_still_exports(tmp_path: Path, tiny_folder: Path):
    run, _ = make_run(tmp_path, tiny_folder, lora=False)
    (run / "checkpoints" / "step_000001").rename(tmp_path / "step_000001")
    export_checkpoint(tmp_path / "step_000001", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_weights_of_another_model_are_refused_by_name(tiny_folder: Path):
    model = tiny_model()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights["model.norm.weight"] = torch.ones(3)
    weights["extra"] = torch.ones(1)
    del weights["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(RunError) as caught:
        put_weights(model, weights)
    text = str(caught.value)
    for words in ("model.norm.weight is [3]", "extra is not in the model", "up_proj.weight is not in the checkpoint"):
        assert words in text
    assert caught.value.code == "checkpoint-mismatch"


@pytest.mark.parametrize(("dtype", "near"), [("bf16", "bfloat16"), ("fp32", "float32"), ("float16", "float")])
def test_a_misspelt_dtype_is_refused_before_anything_is_loaded(tmp_path: Path, dtype: str, near: str):
    with pytest.raises(UserError, match=near):
        export_checkpoint(tmp_path / "nowhere", tmp_path / "out", dtype=dtype)


def test_a_checkpoint_without_configuration_is_refused(tmp_path: Path):
    path = save(tmp_path / "checkpoints", 1, {"actor": {}}, {}, 1)
    with pytest.raises(UserError, match=r"config\.yaml"):
        export_checkpoint(path, tmp_path / "out")
