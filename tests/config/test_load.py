"""Configuration files: typing mistakes are refused by name, and overrides mean what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from surefoot.config import RunConfig, load_config, to_yaml
from surefoot.config.load import build_config
from surefoot.errors import UserError

ROOT = Path(__file__).parents[2]
MINIMAL = {
    "model": {"path": "some-model"},
    "data": {"sources": [{"type": "file", "path": "rows.jsonl"}]},
    "rewards": {"functions": [{"type": "math"}]},
    "train": {"steps": 3},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def refusal(values: dict | None = None, **sections) -> str:
    with pytest.raises(UserError) as caught:
        build_config({**MINIMAL, **(values or {}), **sections})
    return str(caught.value)


def test_overrides_change_add_and_replace(file: Path):
    config = load_config(
        file, ["train.steps=7", "+algorithm.kl.coef=0.5", "rollout.sampling.stop=[a,b]", "model.path=x=y"]
    )
    assert config.train.steps == 7
    assert config.algorithm.kl.coef == 0.5
    assert config.rollout.sampling.stop == ["a", "b"]
    assert config.model.path == "x=y"


def test_an_override_reaches_into_a_list(file: Path):
    assert load_config(file, ["data.sources.0.limit=4"]).data.sources[0].limit == 4


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"train": {"steps": 3, "promts_per_step": 4}}, ["train.promts_per_step", "train.prompts_per_step"]),
        ({"train": {"steps": 3, "temperature": 1}}, ["train.temperature", "rollout.sampling.temperature"]),
        ({"trian": {"steps": 3}}, ["trian", "`train`"]),
        (
            {"data": {"sources": [{"type": "file", "path": "a", "wieght": 2}]}},
            ["data.sources.0.wieght", "data.sources.weight"],
        ),
        ({"train": {"steps": 3, "train_batch_size": 4}}, ["verl", "train.prompts_per_step"]),
        ({"algorithm": {"adv_estimator": "grpo"}}, ["verl", "algorithm.name"]),
        ({"train": {"steps": "many"}}, ["train.steps", "integer", "many"]),
        ({"train": {"steps": 0}}, ["train.steps", "greater than or equal to 1"]),
        ({"train": {"steps": None}}, ["train.steps"]),
        ({"train": {}}, ["train.steps", "required"]),
        ({"train": {"steps": float("nan")}}, ["train.steps"]),
        ({"rewards": {"functions": [{"type": "maths"}]}}, ["rewards.functions.0", "math"]),
        ({"rewards": {"functions": []}}, ["rewards.functions", "at least 1"]),
        ({"algorithm": {"critic_warmup": "soon"}}, ["algorithm.critic_warmup", "auto"]),
        ({"data": {"truncation": "rigth", "sources": MINIMAL["data"]["sources"]}}, ["data.truncation", "right"]),
        ({"name": "a/b"}, ["name"]),
    ],
)
def test_mistakes_are_refused_by_name(section: dict, words: list[str]):
    message = refusal(section)
    for word in words:
        assert word in message
    assert "surefoot explain" in message


def test_all_mistakes_are_told_at_once():
    message = refusal(train={"steps": 0, "lr": 1}, nmae="x")
    assert "train.steps" in message
    assert "train.lr" in message
    assert "nmae" in message


def test_a_missing_file_names_the_nearest(file: Path):
    with pytest.raises(UserError, match=r"run\.yaml"):
        load_config(file.with_name("runn.yaml"))


@pytest.mark.parametrize("text", ["", "- a\n- b", "a: [1", "just words", "train: {steps: ${nothing.here}}", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError):
        load_config(path)


@pytest.mark.parametrize("override", ["train.steps", "=3", "train.steps=abc", "trian.steps=3"])
def test_a_bad_override_is_refused(file: Path, override: str):
    with pytest.raises(UserError):
        load_config(file, [override])


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_recipes_are_valid_and_survive_the_round_trip(recipe: Path):
    config = load_config(recipe)
    assert RunConfig.model_validate(yaml.safe_load(to_yaml(config))) == config
    assert config.name == recipe.stem
