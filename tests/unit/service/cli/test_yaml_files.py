"""Flags of YAML files: tests/unit/service/cli/test_vllm_words.py has the whole way."""

import pytest

from service.cli.yaml_files import with_yaml_files
from service.errors import StartupError


def test_words_after_a_double_dash_stay(tmp_path):
    path = tmp_path / "a.yml"
    path.write_text("port: 8\nx: {a: [1]}\n")
    words = ["--config", str(path), "--config", "a.toml", "m", "--", "--config", "b.yaml"]
    assert with_yaml_files(words) == ["--port=8", '--x={"a": [1]}', *words[2:]]


@pytest.mark.parametrize(
    "text", ["a: &a [*a]", "a: 2024-13-45", "a: !!int x", "a: {[1]: 2}", "a: {b: &b {c: *b}}", "5"]
)
def test_what_is_no_flag_is_refused(tmp_path, text):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(StartupError, match=r"^--config: .*a\.yaml: (a: wrong|wrong|no valid)"):
        with_yaml_files(["--config", str(path)])
