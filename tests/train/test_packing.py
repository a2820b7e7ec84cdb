"""Packing: hand-worked layout, budgets, and nothing lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.train.packing import pack, plan_packs

from .rows import make_sample, random_samples


def test_two_samples_of_one_prompt_by_hand():
    rows = [make_sample("g", [5, 6], [7, 8]), make_sample("g", [5, 6], [9])]
    packed = pack(rows, [0, 1])
    assert packed.token_ids.tolist() == [5, 6, 7]  # the prompt once; 8 and 9 are predicted, never computed
    assert packed.position_ids.tolist() == [0, 1, 2]
    assert packed.cu_queries.tolist() == [0, 2, 3]
    assert packed.cu_keys.tolist() == [0, 2, 5]
    assert packed.key_index.tolist() == [0, 1, 0, 1, 2]
    assert packed.predict.tolist() == [1, 2, 1]
    assert packed.targets.tolist() == [7, 8, 9]
    assert packed.cu_model.tolist() == [0, 2, 3]


def test_without_sharing_positions_restart_at_every_row():
    rows = [make_sample("g", [5, 6], [7, 8]), make_sample("g", [5, 6], [9])]
    packed = pack(rows, [0, 1], share_prefixes=False)
    assert packed.token_ids.tolist() == [5, 6, 7, 5, 6]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert packed.key_index is None
    assert packed.predict.tolist() == [1, 2, 4]


def test_tool_tokens_are_computed_but_not_predicted():
    rows = [make_sample("g", [5], [6, 7, 8, 9], mask=[1, 0, 0, 1])]
    packed = pack(rows, [0])
    assert packed.token_ids.tolist() == [5, 6, 7, 8]
    assert packed.targets.tolist() == [6, 9]
    assert packed.predict.tolist() == [0, 3]


def test_different_prompts_under_one_group_name_are_not_shared():
    rows = [make_sample("g", [5, 6], [7, 8]), make_sample("g", [5, 4], [9, 9])]
    assert pack(rows, [0, 1]).token_ids.tolist() == [5, 6, 7, 5, 4, 9]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), budget=st.integers(8, 80), share=st.booleans())
def test_plans_keep_the_budget_and_every_row(seed: int, budget: int, share: bool):
    rows = random_samples(seed)
    (plans,) = plan_packs(rows, budget, share)
    assert sorted(i for plan in plans for i in plan) == list(range(len(rows)))
    for plan in plans:
        packed = pack(rows, plan, share)
        assert packed.num_tokens <= budget or len(plan) == 1
        seen = {
            r: packed.targets[packed.cu_model[j] : packed.cu_model[j + 1]].tolist() for j, r in enumerate(packed.rows)
        }
        assert seen == {i: rows[i].token_ids[rows[i].loss_mask].tolist() for i in plan}


def test_sharing_saves_what_it_promises():
    rows = [make_sample("g", list(range(3, 63)), [5] * 12) for _ in range(8)]
    assert pack(rows, range(8), share_prefixes=False).num_tokens == 8 * 71
    assert pack(rows, range(8)).num_tokens == 60 + 8 * 11
    assert np.array_equal(pack(rows, range(8)).targets, np.full(96, 5))
