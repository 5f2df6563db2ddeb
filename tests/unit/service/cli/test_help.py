"""The help of `quire serve`: short by default, by section, and whole."""

import pytest

from service.cli.help import SHORT, sections
from service.cli.main import main


def shown(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["serve", *words])
    assert left.value.code == 0
    return capsys.readouterr().out


def flags_in(text: str) -> set[str]:
    return {line.split()[0] for line in text.splitlines() if line.startswith("  --")}


def test_the_short_help_has_the_most_used_flags_only(capsys):
    text = shown(capsys, "--help")
    assert flags_in(text) == {f"--{name.replace('_', '-')}" for name in SHORT} | {"--config"}
    assert len(text.splitlines()) < 80
    assert shown(capsys, "-h") == text


@pytest.mark.parametrize("topic", ["engine", "http"])
def test_a_section_has_its_own(capsys, topic):
    names = {title.lower(): names for title, names in sections().items()}[topic]
    assert flags_in(shown(capsys, f"--help={topic}")) <= {f"--{name.replace('_', '-')}" for name in names}
    assert "--config" not in shown(capsys, f"--help={topic}")


def test_the_whole_help_has_each(capsys):
    text = shown(capsys, "--help=all")
    for names in sections().values():
        assert all(
            f"--{name.replace('_', '-')}" in text for name in names if name not in ("model_config", "worker_name")
        )


def test_an_unknown_section(capsys):
    with pytest.raises(SystemExit) as left:
        main(["serve", "--help=zzz"])
    assert left.value.code == 2
    assert capsys.readouterr().err == (
        "quire serve: --help: 'zzz' is no section (model, engine, queue, http, all), and no flag has it in its name\n"
    )
