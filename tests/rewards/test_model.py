"""Reward models: the score at the last token, whatever is padded with what."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from surefoot.config.rewards import ModelReward
from surefoot.errors import UserError
from surefoot.rewards.model import RewardModel, check_model
from surefoot.rewards.runner import RewardRunner
from tests.rewards.helpers import config, item, rewards_of, rollout, score, scores
from tests.tiny import save_tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama reward model whose pad token is its eos."""
    path = tmp_path_factory.mktemp("rm")
    torch.manual_seed(1)
    tokenizer = tiny_tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    settings = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, num_labels=1, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, initializer_range=0.3,
    )  # fmt: skip
    LlamaForSequenceClassification(settings).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def spec(folder: Path, **keys: Any) -> ModelReward:
    return ModelReward.model_validate({"type": "model", "path": str(folder), **keys})


def by_hand(folder: Path, prompt: str, response: str) -> float:
    """The first logit at the last token of one unpadded conversation, taken from the whole sequence of logits."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{response}<|im_end|>\n"
    ids = torch.tensor([tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]])
    with torch.inference_mode():
        hidden = model.base_model(input_ids=ids).last_hidden_state
        return model.score(hidden)[0, -1, 0].item()


RESPONSES = ["yes", "no", "", "a much longer answer than the others", "yes<|im_end|>", "n", "A", "mid length"]


def test_a_batch_scores_as_single_rows_do_and_as_the_last_logit_by_hand(folder: Path):
    model = RewardModel(spec(folder, batch_size=3), "rewards.functions.0", "cpu")
    items = [item(response, prompt="Is it?") for response in RESPONSES]
    together = [outcome.value for outcome in model.score(items)]
    alone = [model.score([one])[0].value for one in items]
    wanted = [by_hand(folder, "Is it?", response) for response in RESPONSES]
    assert together == pytest.approx(alone, abs=1e-5)
    assert together == pytest.approx(wanted, abs=1e-5)
    assert len({round(value, 3) for value in wanted}) == len(wanted)


def test_a_conversation_that_ends_in_eos_is_scored_at_that_eos(folder: Path, tmp_path: Path):
    # A template without a line end after the last turn: the row's last token is eos, which is also the pad token.
    model = RewardModel(spec(folder), "rewards.functions.0", "cpu")
    template = "{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    model._tokenizer.chat_template = template
    plain = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    wanted = []
    for response in ("short", "quite a bit longer"):
        ids = tiny_tokenizer()(f"q<|im_end|>{response}<|im_end|>", add_special_tokens=False)["input_ids"]
        assert ids[-1] == tiny_tokenizer().pad_token_id
        hidden = plain.base_model(input_ids=torch.tensor([ids])).last_hidden_state
        wanted.append(plain.score(hidden)[0, -1, 0].item())
    items = [item("short", prompt="q"), item("quite a bit longer", prompt="q")]
    assert [outcome.value for outcome in model.score(items)] == pytest.approx(wanted, abs=1e-5)


def test_rows_that_use_the_whole_vocabulary_are_scored_alone(folder: Path):
    model = RewardModel(spec(folder), "rewards.functions.0", "cpu")
    everything = list(range(len(tiny_tokenizer())))
    alone = model._forward([everything]) + model._forward([[5, 6]])
    assert model._forward([everything, [5, 6]]) == pytest.approx(alone, abs=1e-5)


def test_through_the_runner_row_by_row_and_in_order(folder: Path):
    rewards = config({"type": "model", "path": str(folder), "batch_size": 4})
    rows = [rollout(r, prompt="Is it?", index=i) for i, r in enumerate(RESPONSES)]
    wanted = [by_hand(folder, "Is it?", r) for r in RESPONSES]
    with RewardRunner(rewards) as runner:
        scored = asyncio.run(runner.score(rows))
        again = asyncio.run(runner.score(rows[:2]))
    assert scores(scored) == pytest.approx(wanted, abs=1e-5)
    assert scores(again) == pytest.approx(wanted[:2], abs=1e-5)
    assert [r.sample_index for r in scored] == list(range(len(rows)))


def test_a_conversation_longer_than_the_context_costs_its_own_row(folder: Path):
    rows = [rollout("x" * 400), rollout("fine")]
    first, second = rewards_of(score(config({"type": "model", "path": str(folder)}), rows))
    assert first.score is None
    assert "takes 256" in str(first.error)
    assert second.score is not None


def test_a_template_that_raises_costs_its_own_row(folder: Path):
    model = RewardModel(spec(folder), "rewards.functions.0", "cpu")
    model._tokenizer.chat_template = "{% if messages|length > 2 %}{{ raise_exception('two turns only') }}{% endif %}ok"
    three = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    bad, good = model.score([item("x", messages=three), item("x")])
    assert "two turns only" in str(bad.error)
    assert good.value is not None


def test_a_language_model_without_a_score_head_is_refused_before_and_while_loading(tmp_path: Path):
    save_tiny(tmp_path)
    for refuse in (
        lambda: check_model(spec(tmp_path), "rewards.functions.0"),
        lambda: RewardModel(spec(tmp_path), "rewards.functions.0", "cpu"),
    ):
        with pytest.raises(UserError, match="no trained score head") as caught:
            refuse()
        assert caught.value.key == "rewards.functions.0.path"


def test_a_tokenizer_without_a_template_is_refused(folder: Path, tmp_path: Path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    check_model(spec(tmp_path), "rewards.functions.0")
    (tmp_path / "chat_template.jinja").unlink()
    for refuse in (
        lambda: check_model(spec(tmp_path), "rewards.functions.0"),
        lambda: RewardModel(spec(tmp_path), "rewards.functions.0", "cpu"),
    ):
        with pytest.raises(UserError, match="no chat template"):
            refuse()


def test_folders_that_are_not_there_or_not_readable_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no such folder"):
        check_model(spec(tmp_path / "missing"), "rewards.functions.0")
    with pytest.raises(UserError, match=r"no readable config\.json"):
        check_model(spec(tmp_path), "rewards.functions.0")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UserError, match="LlamaForCausalLM"):
        check_model(spec(tmp_path), "rewards.functions.0")
    with pytest.raises(UserError, match="cannot be loaded"):
        RewardModel(spec(tmp_path / "missing"), "rewards.functions.0", "cpu")
