from array import array
from types import SimpleNamespace

from service.engine.drafting.suffix import SuffixDrafter

LIMITS = {"max_depth": 24, "max_requests": 3, "max_spec_factor": 1.0, "min_token_prob": 0.5}


class Output:
    """Substitute of a sequence."""

    def __init__(self, prompt, output, tenant="one"):
        self.group = SimpleNamespace(tenant=tenant)
        self.token_ids, self.num_prompt_tokens = array("I", [*prompt, *output]), len(prompt)


def drafter_after(*outputs, **limits):
    drafter = SuffixDrafter(**LIMITS | limits)
    for output in outputs:
        drafter.on_end(Output([99], output))
    return drafter


def drafted(drafter, tokens, tenant="one", count=8):
    return drafter.draft([Output([98], tokens, tenant)], [count])[0]


def test_an_output_goes_on_as_the_tenants_former_one():
    drafter = drafter_after(range(20, 40))
    assert drafted(drafter, [22, 23, 24, 25]) == (26, 27, 28, 29)  # as many as match
    assert drafted(drafter, [22, 24, 25]) == ()


def test_no_tenant_drafts_from_anothers_outputs():
    assert drafted(drafter_after(range(20, 40)), [22, 23, 24, 25], tenant="other") == ()


def test_the_most_frequent_continuation_wins_while_it_is_likely_enough():
    drafter = drafter_after([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 8])
    assert drafted(drafter, [1, 2, 3]) == (4,)  # 5 and 6 have a third each
    assert drafted(drafter_after([1, 2, 3, 4, 5], min_token_prob=0.9), [1, 2, 3]) == (4, 5)


def test_the_longest_match_counts():
    drafter = drafter_after([5, 1, 2, 3, 4], [6, 1, 2, 3, 7], [6, 1, 2, 3, 7])
    assert drafted(drafter, [5, 1, 2, 3])[:1] == (4,)


def test_its_own_tokens_draft_too():
    assert drafted(drafter_after(), [1, 2, 3, 4, 9, 1, 2, 3]) == (4, 9, 1)


def test_the_oldest_outputs_are_dropped():
    drafter = drafter_after(*([base, base + 1, base + 2, base + 3] for base in (10, 20, 30, 40)))
    assert drafted(drafter, [10, 11, 12]) == ()
    assert drafted(drafter, [40, 41, 42]) == (43,)
    assert drafted(drafter_after([1, 2, 3, 4], max_requests=0), [1, 2, 3]) == ()
