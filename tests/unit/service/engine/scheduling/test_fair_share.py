"""Tenants share an engine: holdings over a share are reclaimed when others arrive, and no token is lost."""

import pytest

from model.sampling_params import BeamSearch, SamplingParams
from service.engine.engine import Engine
from service.engine.kv.kv_manager import KVManager
from service.engine.request import EngineRequest
from service.engine.scheduling.fair_share import FairShare
from service.engine.scheduling.limits import Limits
from service.engine.scheduling.preemption import PROTECTED_STEPS, Preemption
from service.engine.scheduling.scheduler import Scheduler
from service.errors import EndReason
from tests.fakes.scripted_executor import ScriptedExecutor
from tests.support.random_operations import alone
from tests.support.received import run_steps

SIZE = 4
EOS = 7
MAX_SEQS = 8


class EngineLoad:
    """An engine for 8 sequences, and what its tenants asked."""

    def __init__(self, num_blocks=400, num_host_blocks=0, runs_ahead=True, mode="auto", transfer_steps=0, budget=64):
        executor = ScriptedExecutor(
            num_blocks, SIZE, runs_ahead=runs_ahead, num_host_blocks=num_host_blocks, transfer_steps=transfer_steps
        )
        limits = Limits(
            max_num_seqs=MAX_SEQS, max_num_batched_tokens=budget, max_prefill_chunk=budget, max_model_len=200
        )
        kv = KVManager(num_blocks, SIZE, swapping=num_host_blocks > 0)
        preemption = Preemption(kv, FairShare(kv, MAX_SEQS), mode=mode)
        self.engine = Engine(executor, Scheduler(kv, limits, preemption=preemption), frozenset({EOS}))
        self.asked: dict[str, EngineRequest] = {}
        self.received = {}

    def ask(self, tenant, count=1, prompt_len=3, max_tokens=40, **params):
        """Add this many requests; their ids are the tenant's name and their numbers."""
        for _ in range(count):
            number = len(self.asked)
            sampling = SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True} | params)
            prompt = tuple((number + 13 * place) % 90 for place in range(prompt_len))
            request = EngineRequest(request_id=f"{tenant}{number}", prompt=prompt, sampling=sampling, tenant=tenant)
            self.asked[request.request_id] = request
            self.engine.add_request(request)

    def step(self, count=1):
        run_steps(self.engine, self.received, count)

    def running(self, tenant=None):
        """Requests that run, the oldest first."""
        groups = dict.fromkeys(sequence.group for sequence in self.engine.running)
        return [group.request_id for group in groups if tenant in (None, group.tenant)]

    @property
    def num_preemptions(self):
        return self.engine.stats().num_preemptions

    def finish(self):
        """Every answer is what it would be alone, and nothing is held."""
        run_steps(self.engine, self.received)
        assert not self.engine.has_work
        for name, request in self.asked.items():
            if self.received[name].end is EndReason.CANCELLED or request.sampling.beam is not None:
                continue
            for branch, (tokens, end) in self.received[name].by_branch().items():
                assert tokens == _alone(request, branch)
                assert end is EndReason.LENGTH
        assert self.engine.stats().num_blocks_used == 0


def _alone(request, branch):
    tokens, wanted = list(request.prompt), request.sampling.max_tokens
    while len(tokens) < len(request.prompt) + wanted:  # past what would be an end to others
        tokens += alone(tuple(tokens), branch, len(request.prompt) + wanted - len(tokens))[0]
    return tokens[len(request.prompt) :]


@pytest.mark.parametrize("num_host_blocks", [0, 200])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_newcomer_begins_in_the_next_step_though_all_places_are_taken(runs_ahead, num_host_blocks):
    crowd = EngineLoad(runs_ahead=runs_ahead, num_host_blocks=num_host_blocks, transfer_steps=2 * (num_host_blocks > 0))
    crowd.ask("flood", 12)
    crowd.step(5)
    assert crowd.running() == [f"flood{number}" for number in range(8)]
    crowd.ask("small")
    crowd.step()
    assert crowd.running() == [*(f"flood{number}" for number in range(7)), "small12"]
    assert crowd.num_preemptions == 1
    crowd.finish()


def test_a_tenant_is_called_back_from_down_to_its_share_and_no_further():
    crowd = EngineLoad()
    crowd.ask("flood", 12)
    crowd.step(2)
    crowd.ask("other", 12)
    crowd.step(12)
    assert (len(crowd.running("flood")), len(crowd.running("other"))) == (4, 4)
    assert crowd.num_preemptions == 4
    crowd.ask("third", 12)
    crowd.step(12)
    assert [len(crowd.running(tenant)) for tenant in ("flood", "other", "third")] == [3, 3, 2]
    assert crowd.num_preemptions == 6
    crowd.finish()


def test_the_oldest_of_a_tenant_stays():
    crowd = EngineLoad()
    crowd.ask("flood", 8)
    crowd.step(2)
    for number in range(9):  # more tenants than places
        crowd.ask(f"t{number}")
    crowd.step(12)
    assert "flood0" in crowd.running()
    assert len(crowd.running("flood")) == 1
    crowd.finish()


def test_who_left_goes_on_as_soon_as_there_is_a_place_and_before_what_never_began():
    crowd = EngineLoad()
    crowd.ask("flood", 12)
    crowd.step(3)
    crowd.ask("small", max_tokens=3)
    crowd.step(2)
    assert "flood7" not in crowd.running()
    crowd.step(4)
    assert crowd.running() == [f"flood{number}" for number in range(8)]
    crowd.finish()


def test_who_was_just_brought_back_is_the_last_to_leave_again():
    crowd = EngineLoad()
    crowd.ask("flood", 8, max_tokens=150)
    crowd.step(3)
    crowd.ask("small", max_tokens=3)
    crowd.step(8)
    assert "flood7" in crowd.running()
    crowd.ask("small", max_tokens=3)
    crowd.step(2)
    assert "flood7" in crowd.running()
    assert "flood6" not in crowd.running()
    crowd.step(PROTECTED_STEPS + 8)
    crowd.ask("small", max_tokens=3)
    crowd.step(2)
    assert "flood7" not in crowd.running()
    crowd.finish()


def test_a_step_reclaims_no_more_than_one_newcomer_needs():
    crowd = EngineLoad()
    crowd.ask("flood", 8)
    crowd.step(2)
    crowd.ask("a")
    crowd.ask("b")
    crowd.step()
    assert crowd.num_preemptions == 1
    crowd.step()
    assert crowd.num_preemptions == 2
    crowd.ask("many", n=3, best_of=3, max_tokens=8)
    crowd.step()
    assert crowd.num_preemptions == 5
    assert crowd.running("many")
    crowd.finish()


def test_groups_leave_whole_or_not_at_all():
    crowd = EngineLoad()
    crowd.ask("flood", 2, n=4, best_of=4)
    crowd.step(3)
    crowd.ask("small")
    crowd.step(2)
    assert crowd.running() == ["flood0", "small2"]
    crowd.ask("wide", n=6, best_of=6)  # more than what is lent
    crowd.step(4)
    assert crowd.running() == ["flood0", "small2"]
    crowd.finish()


def test_beams_leave_and_come_back_too():
    crowd = EngineLoad(runs_ahead=True)
    crowd.ask("flood", 4, beam=BeamSearch(width=2), n=1, max_tokens=12, ignore_eos=False)
    crowd.step(4)
    crowd.ask("small", 2)
    crowd.step(4)
    assert len(crowd.running("small")) == 2
    crowd.finish()
    assert all(received.end is not None for received in crowd.received.values())


def test_a_tenant_with_its_share_waits_for_its_own():
    crowd = EngineLoad()
    crowd.ask("a", 8)
    crowd.step(2)
    crowd.ask("b", 4)
    crowd.step(8)
    before = crowd.num_preemptions
    crowd.ask("b", 4)
    crowd.step(8)
    assert crowd.num_preemptions == before
    assert len(crowd.running("b")) == 4
    crowd.finish()


@pytest.mark.parametrize(("num_host_blocks", "transfer_steps"), [(0, 0), (60, 0), (60, 4)])
def test_blocks_are_called_back_like_places(num_host_blocks, transfer_steps):
    crowd = EngineLoad(num_blocks=60, num_host_blocks=num_host_blocks, transfer_steps=transfer_steps)
    crowd.ask("flood", 4, prompt_len=50, max_tokens=30)
    crowd.step(8)
    assert len(crowd.running()) == 4
    crowd.ask("small", prompt_len=40, max_tokens=20)
    crowd.step(4 + transfer_steps)
    assert "small4" in crowd.running()
    assert crowd.running("flood") == ["flood0", "flood1", "flood2"]
    crowd.step(20)
    assert "small4" in crowd.received, "it is not the victim of those that grow"
    assert len(crowd.received["small4"].branches[0]) == 20
    crowd.finish()


def test_none_leaves_for_who_could_not_begin_all_the_same():
    crowd = EngineLoad(num_blocks=60)
    crowd.ask("flood", 2, prompt_len=100, max_tokens=8)
    crowd.step(6)
    crowd.ask("small", prompt_len=120, max_tokens=8)  # flood gives up one of two, and that is not enough
    crowd.step(2)
    assert crowd.num_preemptions == 0
    crowd.finish()


def test_one_tenant_alone_is_served_as_it_comes():
    crowd = EngineLoad()
    crowd.ask("only", 20, max_tokens=10)
    crowd.step(6)
    assert crowd.running() == [f"only{number}" for number in range(8)]
    crowd.finish()
    assert crowd.num_preemptions == 0


def test_a_cancel_or_an_end_while_it_waits_to_come_back():
    crowd = EngineLoad()
    crowd.ask("flood", 8)
    crowd.step(3)
    crowd.ask("small", 2)
    crowd.step(3)
    assert len(crowd.running("flood")) == 6
    for number in (6, 7):
        crowd.engine.cancel(f"flood{number}", EndReason.CANCELLED)
    crowd.finish()
    assert crowd.received["flood7"].end is EndReason.CANCELLED
