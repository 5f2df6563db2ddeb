"""One table of endings, complete; one exception that carries what its sender may know."""

from __future__ import annotations

import pytest

from service.errors import ENDINGS, EndReason, RequestError

SUCCESSES = {EndReason.STOP, EndReason.LENGTH}


def test_every_reason_has_one_ending_and_no_other_is_there():
    assert set(ENDINGS) == set(EndReason)


@pytest.mark.parametrize("reason", EndReason)
def test_success_has_a_finish_reason_and_failure_a_message(reason):
    ending = ENDINGS[reason]
    if reason in SUCCESSES:
        assert (ending.finish_reason, ending.status, ending.message) == (reason.value, 200, "")
    else:
        assert ending.finish_reason is None
        assert 400 <= ending.status < 600
        assert ending.message.endswith(".")


def test_reasons_are_their_words():
    assert EndReason("numerical_error") is EndReason.NUMERICAL_ERROR
    assert f"{EndReason.TOO_LARGE}" == "too_large"
    assert len({reason.value for reason in EndReason}) == len(EndReason)


def test_a_request_error_is_raised_and_distinguished_by_identity():
    first, second = RequestError(400, "no", param="n"), RequestError(400, "no", param="n")
    with pytest.raises(RequestError) as caught:
        raise first
    assert caught.value is first
    assert first != second
    assert (first.status, first.type, first.param, first.code) == (400, "invalid_request_error", "n", None)
