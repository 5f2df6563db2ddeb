"""The host's part of a step, timed with the device left out."""

import pytest

from service.cli.bench.host_steps import measure


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_all_parts_of_a_step_are_timed(prefix_caching, mixed):
    figures = measure(3, 20, 6, prefix_caching=prefix_caching, mixed=mixed)
    parts = (figures.schedule_us, figures.launch_us, figures.settle_us)
    assert min(*parts, figures.tell_us) > 0
    assert figures.step_us >= max(parts)
    assert figures.case == f"3 decodes{' and a prompt' if mixed else ''}, cache {'on' if prefix_caching else 'off'}"
