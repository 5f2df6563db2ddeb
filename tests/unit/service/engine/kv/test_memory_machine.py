"""Everything that can happen to the memory of an engine, in any order; see tests/support/random_operations.py."""

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from model.sampling_params import BeamSearch
from service.engine.scheduling.preemption import MODES
from tests.support.num_examples import num_examples
from tests.support.random_operations import CHANCES, TENANTS, Operations, World, run_randomly

prompts = st.builds(
    lambda common, count, own: [*common[:count], *own],
    st.sampled_from([[], list(range(1, 18)), [1] * 17]),
    st.integers(0, 17),
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
)
one_answer = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 25), "presence_penalty": st.sampled_from([0.0, 0.0, 0.0, 1.0])}
)
many_answers = st.builds(
    lambda count, max_tokens: {"n": count, "best_of": count, "max_tokens": max_tokens},
    st.integers(2, 4),
    st.integers(1, 19),
)
beams = st.builds(
    lambda width, max_tokens: {"beam": BeamSearch(width=width), "n": 1, "max_tokens": max_tokens},
    st.integers(2, 3),
    st.integers(1, 4),
)
worlds = st.builds(
    World,
    runs_ahead=st.booleans(),
    prefix_caching=st.booleans(),
    num_blocks=st.sampled_from([14, 20, 30]),
    num_host_blocks=st.sampled_from([0, 6, 20, 60]),
    transfer_steps=st.sampled_from([0, 1, 2, 5]),
    mode=st.sampled_from(MODES),
)


class MemoryMachine(RuleBasedStateMachine):
    @initialize(world=worlds)
    def start(self, world):
        self.operations = Operations(world)

    @precondition(lambda self: len(self.operations.open_names) < 12)
    @rule(prompt=prompts, params=one_answer | many_answers | beams, tenant=st.sampled_from(TENANTS))
    def add(self, prompt, params, tenant):
        self.operations.add(prompt, params, tenant)

    @rule(count=st.integers(1, 10))
    def step(self, count):
        for _ in range(count):
            self.operations.step()

    @precondition(lambda self: self.operations.open_names)
    @rule(data=st.data())
    def cancel(self, data):
        self.operations.cancel(data.draw(st.sampled_from(self.operations.open_names)))

    @rule(mode=st.sampled_from(MODES))
    def preempt(self, mode):
        self.operations.preempt(mode)

    @rule(of_host=st.booleans(), count=st.integers(1, 60))
    def evict(self, of_host, count):
        self.operations.evict(of_host, count)

    @rule()
    def restart(self):
        self.operations.restart()

    @invariant()
    def books_agree(self):
        if hasattr(self, "operations"):
            self.operations.check()

    def teardown(self):
        if hasattr(self, "operations"):
            self.operations.finish()


MemoryMachine.TestCase.settings = hypothesis_settings(
    max_examples=num_examples(40), stateful_step_count=30, deadline=None
)
test_memory_machine = MemoryMachine.TestCase


@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_random_operations(seed):
    counts = run_randomly(4000, seed, world_every=400, check_every=20)
    assert all(counts[name] > 0 for name in (*CHANCES, "ended"))
