"""The scheduler alone: any order of arrivals, ends, aborts and preemptions."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.rollout.scheduler import Move, Plan, Prefill, Row, Scheduler


class Simulated:
    """Executes plans on caches that are dicts, and checks that decoding rows find all their tokens but the last."""

    def __init__(self, max_rows: int, prefill_tokens: int = 50) -> None:
        self.scheduler = Scheduler(max_rows, prefill_tokens)
        self.own: dict[int, list[int]] = {}
        self.prefixes: dict[int, list[int]] = {}
        self.started: list[str] = []
        self.version = 0

    def step(self) -> Plan:
        waiting = [row.id for row in self.scheduler.waiting]
        plan = self.scheduler.plan(self.version)
        assert not {m.source for m in plan.moves} & {m.target for m in plan.moves}
        for move in plan.moves:
            self.own[move.target] = self.own[move.source][: move.length]
        for slot, row in enumerate(plan.decode):
            assert row.slot == slot
            shared = self.prefixes[row.prefix.slot] if row.prefix else []
            assert shared + self.own.get(slot, []) == [*row.prompt, *row.generated][:-1]
            self.own.setdefault(slot, []).append(row.last_token)
            row.generated.append(1000 + len(row.generated))
        for store, prefills in ((self.own, plan.prefills), (self.prefixes, plan.prefixes)):
            for prefill in prefills:
                assert prefill.tokens
                store[prefill.slot] = list(prefill.tokens)
        for row in self.scheduler.running[len(plan.decode) :]:
            if row.prefix or row.length == 1:
                self.own[row.slot or 0] = []
        self.started += waiting[: len(waiting) - len(self.scheduler.waiting)]
        assert len(self.scheduler.running) <= self.scheduler.max_rows
        assert all(slot < self.scheduler.max_rows for slot in self.prefixes)
        prefilled = [len(p.tokens) for p in (*plan.prefills, *plan.prefixes)]
        assert sum(prefilled) <= self.scheduler.prefill_tokens or len(prefilled) == 1
        return plan


def prompt_of(kind: int) -> tuple[int, ...]:
    return tuple(100 * kind + i for i in range(1, 2 + 7 * kind % 19))


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 4)),
        st.tuples(st.just("step"), st.lists(st.integers(0, 7), max_size=4)),
        st.tuples(st.just("abort"), st.integers(0, 40)),
        st.tuples(st.just("preempt"), st.none()),
        st.tuples(st.just("version"), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(actions=actions, max_rows=st.integers(1, 6))
def test_every_row_is_answered_once_from_its_own_tokens(actions, max_rows):
    world = Simulated(max_rows)
    added: list[str] = []
    ended: list[str] = []

    def step(leaving: list[int]) -> None:
        decode = world.step().decode
        done = {decode[i % len(decode)].id: decode[i % len(decode)] for i in leaving if decode}
        world.scheduler.retire(done.values())
        ended.extend(done)

    for action, value in actions:
        if action == "add":
            added.append(str(len(added)))
            world.scheduler.add(Row(added[-1], prompt_of(value)))
        elif action == "step":
            step(value)
        elif action == "abort" and world.scheduler.abort(str(value)):
            ended.append(str(value))
        elif action == "preempt":
            world.scheduler.preempt()
        elif action == "version":
            world.version += 1
    for _ in range(100 * (len(added) + 1)):
        if not world.scheduler:
            break
        step([0])
    assert sorted(ended) == sorted(added)
    assert not world.scheduler
    # Everything was given back: as many fresh prompts as there are rows fit in once more.
    for kind in range(max_rows):
        for sample in range(2):
            world.scheduler.add(Row(f"again {kind} {sample}", (7000 + kind, 1)))
    world.step()
    assert len(world.scheduler.running) == max_rows


@given(kinds=st.lists(st.integers(0, 3), min_size=1, max_size=30), max_rows=st.integers(1, 5))
def test_first_come_first_served(kinds, max_rows):
    world = Simulated(max_rows)
    for i, kind in enumerate(kinds):
        world.scheduler.add(Row(str(i), prompt_of(kind)))
    while world.scheduler:
        world.scheduler.retire(world.step().decode[:1])
    assert world.started == [str(i) for i in range(len(kinds))]


def test_samples_of_a_prompt_share_one_prefill():
    scheduler = Scheduler(8, 1000)
    for i in range(8):
        scheduler.add(Row(str(i), tuple(range(60))))
    plan = scheduler.plan(0)
    assert [len(p.tokens) for p in plan.prefixes] == [59]
    assert plan.prefills == []
    assert plan.decode == []
    plan = scheduler.plan(0)
    assert len(plan.decode) == 8
    assert {row.own_length for row in plan.decode} == {1}


def test_a_prompt_of_one_row_lies_in_its_own_slot():
    scheduler = Scheduler(2, 1000)
    scheduler.add(Row("a", (5, 6, 7)))
    scheduler.add(Row("b", (5, 6, 8)))
    plan = scheduler.plan(0)
    assert [(p.slot, p.tokens) for p in plan.prefills] == [(0, (5, 6)), (1, (5, 6))]
    assert plan.prefixes == []


def test_later_samples_join_a_prefix_only_under_the_weights_that_computed_it():
    scheduler = Scheduler(4, 1000)
    rows = [Row(str(i), (1, 2, 3)) for i in range(4)]
    scheduler.add(rows[0])
    scheduler.add(rows[1])
    scheduler.plan(0)
    scheduler.add(rows[2])
    assert scheduler.plan(0).prefixes == []
    assert rows[2].prefix is rows[0].prefix
    scheduler.add(rows[3])
    assert [p.tokens for p in scheduler.plan(1).prefills] == [(1, 2)]
    assert rows[3].prefix is None


def test_the_last_row_takes_the_hole():
    scheduler = Scheduler(4, 1000)
    rows = [Row(str(i), (i, i, i)) for i in range(4)]
    for row in rows:
        scheduler.add(row)
    scheduler.plan(0)
    scheduler.plan(0)
    for row in rows:
        row.generated.append(9)
    scheduler.retire([rows[1]])
    plan = scheduler.plan(0)
    assert [row.id for row in plan.decode] == ["0", "3", "2"]
    assert plan.moves == [Move(3, 1, 3)]


def test_long_prompts_come_one_by_one_and_none_starves():
    scheduler = Scheduler(8, 10)
    for i, length in enumerate((6, 6, 40, 2)):
        scheduler.add(Row(str(i), tuple(range(100 * i, 100 * i + length))))
    taken = []
    while scheduler.waiting:
        taken.append([len(p.tokens) for p in scheduler.plan(0).prefills])
    assert taken == [[5, 5], [39], [1]]


def test_a_preempted_row_begins_again_from_all_its_tokens():
    scheduler = Scheduler(2, 1000)
    row = Row("a", (1, 2, 3))
    scheduler.add(row)
    scheduler.plan(0)
    scheduler.plan(0)
    row.generated.append(4)
    scheduler.preempt()
    plan = scheduler.plan(0)
    assert [(p.slot, p.tokens) for p in plan.prefills] == [(0, (1, 2, 3))]
    assert isinstance(plan.prefills[0], Prefill)
