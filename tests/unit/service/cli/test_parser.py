"""The parser knows the flags of the chosen verb only."""

import pytest

from service.cli.parser import make_parser, parser_for
from service.cli.verbs import HELP


@pytest.mark.parametrize(
    ("words", "with_flags"),
    [
        ([], set()),
        (["srve"], set()),
        (["--help"], set()),
        (["key", "new"], {"key"}),
        (["--wrong", "dead", "list"], {"dead"}),
        (["completion", "bash"], set(HELP)),
    ],
)
def test_a_parser_has_the_flags_of_the_chosen_verb(words, with_flags):
    verbs = parser_for(words)._subparsers._group_actions[0].choices
    assert list(verbs) == list(HELP)
    assert {verb for verb, parser in verbs.items() if len(parser._actions) > 1} == with_flags


def test_every_verb_is_listed_without_its_flags():
    assert make_parser(()).format_help() == make_parser().format_help()
