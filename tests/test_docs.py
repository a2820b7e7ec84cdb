"""The documentation is true: pages made from code are up to date, and what the others name exists and works."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from surefoot.algorithms.resolve import resolve
from surefoot.algorithms.table import PRESETS, preset_settings
from surefoot.cli import app
from surefoot.config import RunConfig
from surefoot.config.load import all_keys, build_config
from surefoot.config.reference import reference
from surefoot.config.verl import VERL_KEYS, VERL_WITHOUT
from surefoot.controller.run import run_training
from surefoot.errors import CODES
from surefoot.rewards.api import RewardItem, adapt, evaluate
from surefoot.rewards.table import REWARDS
from surefoot.tracking.reference import alarms_page

from .controller.tiny_run import metrics_of, tiny_config

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
HAND_WRITTEN = [page for page in PAGES if page.name not in ("config.md", "alarms.md")]

KEYS = {key for key, _, _ in all_keys()}
SECTIONS = set(RunConfig.model_fields)
VERL = {*VERL_KEYS, *VERL_WITHOUT}
FILES = (".json", ".jsonl", ".md", ".py", ".safetensors", ".yaml")
MINIMAL: dict[str, Any] = {
    "model": {"path": "some-model"},
    "data": {"sources": [{"type": "file", "path": "rows.jsonl"}]},
    "rewards": {"functions": [{"type": "math"}]},
    "train": {"steps": 100},
}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
every_written_page = pytest.mark.parametrize("page", HAND_WRITTEN, ids=lambda p: str(p.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in _FENCE.findall(page.read_text()) if name == language]


def inline(page: Path) -> list[str]:
    """What stands in backticks outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", page.read_text()))


@pytest.mark.parametrize(
    ("name", "made", "command"),
    [
        ("config.md", reference, "python -m surefoot.config.reference > docs/config.md"),
        ("alarms.md", alarms_page, "python -m surefoot.tracking.reference > docs/alarms.md"),
    ],
)
def test_pages_made_from_code_are_up_to_date(name: str, made: Callable[[], str], command: str):
    assert (DOCS / name).read_text() == made() + "\n", f"out of date: {command}"


# Commands


def commands(page: Path) -> Iterator[list[str]]:
    """Words after `surefoot` of every command line on a page, in blocks and in text."""
    shown = [line for block in blocks(page, "bash") + blocks(page, "text") for line in block.splitlines()]
    for line in [*(line.removeprefix("$ ") for line in shown), *inline(page)]:
        if re.match(r"surefoot [a-z-]+(?: |$)", line):
            yield shlex.split(line.partition(" #")[0])[1:]


@every_page
def test_every_command_and_option_exists(page: Path):
    known = typer.main.get_command(app).commands
    for verb, *words in commands(page):
        if verb == "--help":
            continue
        assert verb in known, verb
        options = {o for p in known[verb].params for o in (*p.opts, *p.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= options
        if verb == "explain" and words and words[0] != "CODE":
            assert words[0] in CODES


# Keys


def as_key(text: str) -> str | None:
    """The configuration key that `text` names, or None when it names none: `train.steps`, `train.steps=3`."""
    match = re.match(r"([a-z_]+(?:\.(?:[a-z_]+|\d+|\*))+)(?:$|=|: | \()", text)
    if not match or match[1].partition(".")[0] not in SECTIONS or match[1].endswith(FILES):
        return None
    return ".".join(part for part in match[1].split(".") if not part.isdigit() and part != "*")


@every_page
def test_every_key_exists(page: Path):
    texts = [word for line in inline(page) for word in ([line] if ": " in line else line.split())]
    texts += [word for line in commands(page) for word in line if "=" in word]
    # These two name keys of verl's as well.
    foreign = VERL if page.stem in ("coming-from-verl", "config") else set[str]()
    for text in texts:
        key = as_key(text)
        assert key is None or key in KEYS or any(f".{verl}".endswith(f".{key}") for verl in foreign), text


@every_written_page
def test_every_alarm_that_is_named_exists(page: Path):
    for text in inline(page):
        if re.fullmatch(r"alarm-[a-z-]+", text):
            assert text in CODES


@every_written_page
def test_every_yaml_example_is_a_configuration(page: Path):
    for block in blocks(page, "yaml"):
        if "…" in block:
            continue  # the head of a longer file
        values = yaml.safe_load(block)
        assert set(values) <= SECTIONS, set(values) - SECTIONS
        resolve(build_config({**MINIMAL, **values}))


@every_written_page
def test_every_python_example_is_python(page: Path):
    for block in blocks(page, "python"):
        ast.parse(block)


# Links and paths


def slug(heading: str) -> str:
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower())


@every_page
def test_links_resolve(page: Path):
    text = _FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", file.read_text()), re.MULTILINE)
            assert anchor in map(slug, headings), target


@every_page
def test_paths_of_the_repository_exist(page: Path):
    for text in inline(page):
        if re.fullmatch(r"(?:src|tests|recipes|examples|docs|constraints)/[\w./-]*", text):
            assert (ROOT / text).exists(), text


def test_the_navigation_holds_every_page():
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in DOCS.rglob("*.md"):
        assert f": {page.relative_to(DOCS)}\n" in nav, page


# verl


def table_rows(page: Path) -> Iterator[list[str]]:
    for line in page.read_text().splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def test_the_page_on_verl_and_the_errors_say_the_same():
    text = (DOCS / "coming-from-verl.md").read_text()
    tables = text[text.index("## Every key") :]
    with_, without = tables.split("### Without a counterpart")
    shown = dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", with_, re.MULTILINE))
    assert shown == VERL_KEYS
    assert dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", without, re.MULTILINE)) == VERL_WITHOUT


@pytest.mark.parametrize("here", sorted(set(VERL_KEYS.values())))
def test_what_verl_keys_are_called_here_exists(here: str):
    for part in here.split(" and "):
        assert re.split(r"[ :]", part)[0] in KEYS


# Algorithms and rewards


def test_the_page_on_algorithms_lists_the_presets():
    rows = {cells[0].strip("`| ").split("`")[0]: cells for cells in table_rows(DOCS / "algorithms.md")}
    for name in PRESETS:
        settings = preset_settings(name)
        assert rows[name][1].startswith(f"`{settings['advantage']}`")
        assert rows[name][2] == f"`{settings['aggregation']}`"
        assert rows[name][3] == ("yes" if settings["whiten_advantages"] else "no")


def test_the_page_on_rewards_has_every_type():
    headings = re.findall(r"^### `(\w+)`$", (DOCS / "rewards.md").read_text(), re.MULTILINE)
    assert set(headings) == set(REWARDS)


def judged(function: Any, params: dict[str, Any], *responses: str, batch: bool = False) -> list[float | None]:
    asked = ({"role": "user", "content": "p"},)
    items = [
        RewardItem("p", asked, text, "7", "s", {"extra_info": {}}, "stop", 9, len(text), "s/0", i)
        for i, text in enumerate(responses)
    ]
    ready = adapt(function, params, batch)
    outcomes = evaluate(ready, items) if batch else [o for item in items for o in evaluate(ready, [item])]
    assert not [o.error for o in outcomes if o.error]
    return [o.value for o in outcomes]


def test_the_reward_functions_of_the_page_judge_as_they_say():
    (source,) = (b for b in blocks(DOCS / "rewards.md", "python") if b.startswith("# my_rewards.py"))
    names: dict[str, Any] = {}
    exec(source, names)
    assert judged(names["close"], {"tolerance": 2.0}, "It is 8", "It is 9.5", "many") == [0.5, 0.0, 0.0]
    assert judged(names["compute_score"], {}, "a 7", "a 8") == [1.0, 0.0]
    assert judged(names["ask"], {}, "x", " ") == [1.0, 0.0]
    assert judged(names["longest_wins"], {}, "ab", "abcd", batch=True) == [0.5, 1.0]
    assert judged(names["compute_scores"], {}, "7", "8", batch=True) == [1.0, 0.0]
    assert judged(names["only_short_ones"], {}, "x", "x" * 101) == [1.0, None]
    assert len([n for n in names if not n.startswith("_")]) == 7


def test_the_test_layouts_of_the_page_are_read_by_the_code_reward():
    from surefoot.rewards.code import read_tests

    (source,) = (b for b in blocks(DOCS / "rewards.md", "python") if b.startswith('[{"input"'))
    for line in source.splitlines():
        assert read_tests(ast.literal_eval(line.split(" # ")[0].strip()))


def test_the_data_function_of_the_page_yields_rows(tmp_path, monkeypatch):
    from surefoot.data.source import read_rows

    (source,) = blocks(DOCS / "data.md", "python")
    (tmp_path / "my_data.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    config = build_config({**MINIMAL, **yaml.safe_load(blocks(DOCS / "data.md", "yaml")[0])})
    rows = read_rows(config.data.sources[-1], "data.sources.3")
    assert len(rows) == 500
    assert rows[2] == {"prompt": "What is 2 + 2?", "answer": "4", "level": 0}


def test_the_example_of_a_program_is_the_one_that_is_tested():
    page = DOCS / "rollouts.md"
    program = (ROOT / "examples" / "calculator_program.py").read_text()
    assert any(block.strip() in program for block in blocks(page, "python") if "async def calculator" in block)
    assert (ROOT / "examples" / "calculator.yaml").read_text() in blocks(page, "yaml")


# Metrics

# Only when a user's program raises; only with several sources of evaluation.
# Of some runs only; tests/controller/test_async.py and test_ray.py see those of clusters.
CLUSTER = {"rollout/staleness_mean", "rollout/staleness_max", "actor/policy_gap", "time/wait", "sync/probe_gap"}
SELDOM = {"rollout/failed_prompts", "rollout/NAME", "eval/SOURCE/pass@K"} | CLUSTER


def test_the_page_on_metrics_names_what_runs_write_and_nothing_else(tmp_path, tiny_folder):
    eval_source = {"type": "file", "path": str(tmp_path / "rows.jsonl"), "limit": 8}
    ppo = tiny_config(
        tmp_path,
        tiny_folder,
        name="ppo",
        algorithm={"name": "ppo", "kl": {"where": "reward", "coef": 0.01}},
        critic={},
        train={"steps": 1, "updates_per_step": 2},
        eval={"sources": [eval_source], "sampling": {"max_response_length": 8}},
    )
    grpo = tiny_config(
        tmp_path,
        tiny_folder,
        name="grpo",
        algorithm={"kl": {"where": "loss"}, "entropy_coef": 0.01},
        train={"steps": 1},
    )
    written: set[str] = set()
    for config in (ppo, grpo):
        run_training(config)
        written |= {_general(name) for row in metrics_of(config) for name in row}
    page = (DOCS / "metrics.md").read_text()
    named = {name for name in re.findall(r"`([a-z_]+/[\w/@]+)`", page) if not name.endswith("/KEY")}
    assert named - SELDOM == written - {"step"}


def _general(name: str) -> str:
    name = re.sub(r"^reward/(part|seconds)/.*", r"reward/\1/NAME", name)
    return re.sub(r"^eval/pass@\d+$", "eval/pass@K", name)
