"""A worker claims no more than its engine can start, and not all of it for one of several tenants."""

import pytest

from model.sampling_params import SamplingParams
from service.queue.codec import pack_ids
from service.worker.capacity import RECENT_S, SlotCapacity
from tests.support.wire import make_job

PLENTY = 1 << 30


def job(number, tenant="a", num_tokens=3, **params):
    sampling = SamplingParams(**{"max_tokens": 8} | params)
    return make_job(f"J{number}", tenant=tenant, prompt=pack_ids([1] * num_tokens), sampling=sampling)


def test_places_are_counted_in_branches_and_a_few_jobs_may_wait():
    slots = SlotCapacity(64, PLENTY)
    assert slots.claim_budget(PLENTY, 0.0)[0] == 64 + 2
    slots.add_job(job(1, n=4, best_of=5), 0, 0.0)
    slots.add_job(job(2), 0, 0.0)
    assert slots.claim_budget(PLENTY, 0.0)[0] == 60
    slots.add_job(job(2), 0, 0.0)
    slots.remove_job("J1", 0.0)
    slots.remove_job("J1", 0.0)
    slots.remove_job("unknown", 0.0)
    assert slots.claim_budget(PLENTY, 0.0)[0] == 65


def test_what_has_not_begun_has_a_claim_on_free_blocks():
    slots = SlotCapacity(8, PLENTY)
    slots.add_job(job(1, num_tokens=100), 20, 0.0)
    slots.add_job(job(2, num_tokens=50), 0, 0.0)
    assert slots.claim_budget(200, 0.0)[1].num_tokens == 30
    assert slots.claim_budget(160, 0.0)[0] == 0
    slots.mark_started("J1")
    slots.mark_started("J1")
    assert slots.claim_budget(160, 0.0) == (7, slots.claim_budget(160, 0.0)[1])
    assert slots.claim_budget(160, 0.0)[1].num_tokens == 110
    slots.remove_job("J2", 0.0)
    assert slots.claim_budget(160, 0.0)[1].num_tokens == 160


def test_a_tenant_alone_may_have_all():
    slots = SlotCapacity(64, PLENTY)
    for number in range(60):
        slots.add_job(job(number), 0, float(number))
    assert slots.claim_budget(PLENTY, 60.0) == (6, slots.claim_budget(PLENTY, 60.0)[1])
    assert slots.claim_budget(PLENTY, 60.0)[1].num_reserved == 0


@pytest.mark.parametrize(("wait_s", "num_reserved"), [(0.0, 6), (RECENT_S - 1, 6), (RECENT_S + 1, 0)])
def test_a_few_places_are_kept_for_who_was_there_lately(wait_s, num_reserved):
    slots = SlotCapacity(64, PLENTY)
    slots.add_job(job(0, "small"), 0, 0.0)
    slots.remove_job("J0", 0.0)
    for number in range(1, 60):
        slots.add_job(job(number, "flooder"), 0, wait_s)
    _, budget = slots.claim_budget(PLENTY, wait_s)
    assert budget.num_reserved == num_reserved


def test_what_each_tenant_holds_is_reported_in_branches():
    slots = SlotCapacity(32, 1000)
    slots.add_job(job(0, "flooder", n=3, best_of=3), 0, 0.0)
    slots.add_job(job(1, "flooder", num_tokens=100), 0, 0.0)
    slots.add_job(job(2, "small"), 0, 0.0)
    slots.add_job(job(3, "gone"), 0, 0.0)
    slots.remove_job("J3", 1.0)
    _, budget = slots.claim_budget(PLENTY, 1.0)
    assert (budget.num_slots, budget.slots_by_tenant, budget.num_tenants) == (32, {"flooder": 4, "small": 1}, 3)
    assert budget.num_reclaimable_tokens == 1000 - 106


def test_a_tenant_that_holds_every_place_may_have_to_give_some_up():
    slots = SlotCapacity(4, PLENTY)
    for number in range(3):
        slots.add_job(job(number, "flooder"), 0, 0.0)
    assert slots.claim_budget(PLENTY, 0.0)[1].num_slots == 0
    slots.add_job(job(3, "flooder"), 0, 0.0)
    assert slots.claim_budget(PLENTY, 0.0)[1].num_slots == 4


def test_where_blocks_are_short_others_may_claim_though_places_are_free():
    slots = SlotCapacity(4, 1000)
    slots.add_job(job(0, "flooder"), 0, 0.0)
    slots.mark_started("J0")
    num_branches, budget = slots.claim_budget(0, 0.0)
    assert (num_branches, budget.num_slots, budget.num_reclaimable_tokens) == (0, 4, 1000)


def test_an_engine_whose_places_are_shared_out_evenly_lends_nothing():
    slots = SlotCapacity(4, PLENTY)
    for number in range(4):
        slots.add_job(job(number, f"t{number}"), 0, 0.0)
    assert slots.claim_budget(PLENTY, 0.0)[1].num_slots == 0


def test_a_small_engine_keeps_nothing():
    slots = SlotCapacity(8, PLENTY)
    slots.add_job(job(1, "a"), 0, 0.0)
    slots.add_job(job(2, "b"), 0, 0.0)
    assert slots.claim_budget(PLENTY, 0.0)[1].num_reserved == 0
