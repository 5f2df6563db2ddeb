"""The command line's main function."""

from __future__ import annotations

import pytest

from service.cli import main
from service.cli.verbs import Verb


@pytest.mark.parametrize(
    ("words", "created"),
    [
        (["worker"], [1]),
        (["worker", "--device", "cuda", "--tensor-parallel-size", "2"], [2]),
        (["worker", "--device", "cpu"], []),
        (["gateway"], []),
    ],
)
def test_a_worker_of_gpus_creates_contexts_before_its_modules_are_imported(monkeypatch, words, created):
    log: list[int | str] = []
    monkeypatch.setattr(main, "create_contexts", log.append)
    monkeypatch.setattr(main, "load_verb", lambda verb: log.append(verb) or Verb(None, lambda *_: 0))
    assert main.main(words) == 0
    assert log == [*created, words[0]]
