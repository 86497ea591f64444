"""The staleness inequality and the ledger, under any order of events."""

from collections import Counter
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.rollout.gate import Ledger, PromptId, StalenessGate, State

STATES = get_args(State)

EVENTS = st.lists(st.sampled_from(["submit", "finish", "drop", "discard", "consume", "end_step"]), max_size=80)


def totals_of(ledger, epoch):
    """Prompts of one epoch by state; those that the ledger has not seen are pending."""
    counts = Counter(state for of, _, state, _ in ledger.state_dict()["prompts"] if of == epoch)
    unseen = max(0, ledger.sizes.get(epoch, 0) - counts.total())
    return {state: counts[state] + (unseen if state == "pending" else 0) for state in STATES}


@given(EVENTS, st.integers(1, 4), st.integers(0, 3), st.none() | st.integers(1, 5))
def test_the_inequality_holds_and_nothing_is_lost_whatever_happens(events, batch_size, eta, max_concurrent):
    gate, ledger = StalenessGate(batch_size, eta, max_concurrent), Ledger()
    places = {"running": [], "waiting": [], "taken": []}
    count = 0
    for event in events:
        if event == "submit" and gate.capacity():
            gate.submit()
            ledger.move(PromptId(0, count), "running")
            places["running"].append(count)
            count += 1
        elif event in ("finish", "drop") and places["running"]:
            prompt = PromptId(0, places["running"].pop())
            getattr(gate, event)()
            ledger.move(prompt, *(("waiting",) if event == "finish" else ("dropped", "deadline")))
            places["waiting"] += [prompt.index] if event == "finish" else []
        elif event in ("discard", "consume") and places["waiting"]:
            prompt = PromptId(0, places["waiting"].pop(0))
            getattr(gate, event)()
            ledger.move(prompt, *(("taken",) if event == "consume" else ("dropped", "expired")))
            places["taken"] += [prompt.index] if event == "consume" else []
        elif event == "end_step":
            for index in places["taken"]:
                ledger.move(PromptId(0, index), "trained")
            places["taken"] = []
            gate.end_step()
        ledger.check(gate)
        ledger.recount()
        assert gate.running + gate.waiting + gate.taken <= (eta + 1) * batch_size
        assert gate.running <= (max_concurrent or gate.running)
        assert sum(ledger.total(state) for state in STATES) == count


def test_the_gate_counts_as_its_formula_says():
    gate = StalenessGate(batch_size=4, max_head_offpolicyness=1, max_concurrent=3)
    assert gate.capacity() == 3
    for _ in range(3):
        gate.submit()
    assert gate.capacity() == 0
    gate.finish()
    gate.consume()
    assert gate.capacity() == 1
    gate.end_step()
    assert gate.capacity() == 1  # max_concurrent binds
    gate.drop()
    assert gate.capacity() == 2


def test_a_shut_gate_and_an_empty_place_are_errors():
    gate = StalenessGate(batch_size=1)
    gate.submit()
    with pytest.raises(RuntimeError, match="shut"):
        gate.submit()
    with pytest.raises(RuntimeError, match="waiting"):
        gate.consume()


def test_a_prompt_is_used_once():
    ledger = Ledger()
    for state in ("running", "waiting", "taken", "trained"):
        ledger.move(PromptId(0, 5), state)
    with pytest.raises(RuntimeError, match="prompt 5 of epoch 0 cannot become running: it is trained"):
        ledger.move(PromptId(0, 5), "running")
    ledger.move(PromptId(1, 5), "running")
    assert ledger.total("trained") == 1


def test_the_totals_of_an_epoch_add_up_and_survive_a_restart():
    ledger = Ledger()
    ledger.begin_epoch(0, 10)
    ledger.move(PromptId(0, 1), "running")
    ledger.move(PromptId(0, 1), "dropped", "deadline")
    ledger.move(PromptId(0, 2), "running")
    assert totals_of(ledger, 0) == {**dict.fromkeys(STATES, 0), "pending": 8, "running": 1, "dropped": 1}
    again = Ledger()
    again.load_state_dict(ledger.state_dict())
    assert again.state_dict() == ledger.state_dict()
    assert again.dropped == {"deadline": 1}
    assert totals_of(again, 0) == totals_of(ledger, 0)
    ledger.begin_epoch(1, 1)
    ledger.move(PromptId(1, 0), "running")
    assert totals_of(ledger, 1) == {**dict.fromkeys(STATES, 0), "running": 1}
    assert totals_of(ledger, 7) == dict.fromkeys(STATES, 0)


def test_a_ledger_that_disagrees_with_the_gate_says_where():
    ledger = Ledger()
    ledger.move(PromptId(0, 0), "running")
    with pytest.raises(RuntimeError, match=r"1 prompts are running.*the gate says 0"):
        ledger.check(StalenessGate(1))


def test_a_step_costs_what_moved_in_it_and_everything_is_counted_anew_now_and_then():
    ledger, gate = Ledger(), StalenessGate(1)
    recounts = []
    original = ledger.recount
    ledger.recount = lambda: (recounts.append(1), original())
    for index in range(1000):
        ledger.move(PromptId(index // 300, index), "running")
        gate.submit()
        ledger.move(PromptId(index // 300, index), "waiting")
        gate.finish()
        gate.consume()
        ledger.move(PromptId(index // 300, index), "taken")
        ledger.check(gate)
        ledger.move(PromptId(index // 300, index), "trained")
        gate.end_step()
        ledger.check(gate)
    assert 0 < len(recounts) < 40  # 2000 checks: each recount comes after as many moves as there are prompts
    assert [totals_of(ledger, epoch)["trained"] for epoch in range(4)] == [300, 300, 300, 100]


def test_everything_is_counted_anew_after_as_many_moves_as_there_are_prompts():
    ledger, gate = Ledger(), StalenessGate(2)
    for index in range(2):
        ledger.move(PromptId(0, index), "running")
        gate.submit()
    ledger._totals.update(pending=1, trained=-1)  # which the quick comparisons do not see
    with pytest.raises(RuntimeError, match="its totals are"):
        ledger.check(gate)
    ledger.check(gate)  # not again before the next moves


def test_totals_that_were_spoiled_are_found_by_counting_anew():
    ledger = Ledger()
    ledger.move(PromptId(0, 0), "running")
    ledger._totals.update(running=-1, pending=1)
    with pytest.raises(RuntimeError, match="counted anew"):
        ledger.recount()
