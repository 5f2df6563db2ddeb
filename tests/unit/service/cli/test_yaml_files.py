"""Flags of YAML files: tests/unit/service/cli/test_vllm_words.py has the whole way."""

from service.cli.yaml_files import with_yaml_files


def test_words_after_a_double_dash_stay(tmp_path):
    path = tmp_path / "a.yml"
    path.write_text("port: 8\nx: {a: [1]}\n")
    words = ["--config", str(path), "--config", "a.toml", "m", "--", "--config", "b.yaml"]
    assert with_yaml_files(words) == ["--port=8", '--x={"a": [1]}', *words[2:]]
