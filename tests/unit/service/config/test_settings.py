"""Sources and bounds of settings, and their way to child processes."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest

from service.config.settings import VERBS, Settings
from service.config.sources import NO_CONFIG_FILE, add_flags, read_settings, to_flags, to_secret_environ
from service.errors import StartupError

FIELDS = dataclasses.fields(Settings)
SECRETS = {"api_key", "redis_url"}


def read(verb: str, *argv: str, **environ: str) -> Settings:
    return read_settings(verb, parser_of(verb).parse_args(argv), environ)


def parser_of(verb: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"quire {verb}", allow_abbrev=False)
    add_flags(parser, verb)
    return parser


def example_of(field: dataclasses.Field) -> str:
    """A text for this field that is not its default."""
    metadata = field.metadata
    if metadata["choices"]:
        return str(next(choice for choice in metadata["choices"] if choice != field.default))
    if metadata["low"] is not None:
        return str(metadata["high"])
    examples = {"producers": "a,b", "api_key": "k1,k2", "redis_url": "redis://h:1/0", "allowed_hosts": "a.b,*.c.d"}
    examples["worker_name"] = "gpu-0.host_1"
    examples["speculative_config"] = '{"method": "ngram", "num_speculative_tokens": 4}'
    examples["lora_modules"] = "sql=/data/sql"
    examples |= {"root_path": "/a/b", "hf_overrides": '{"rope_theta": 5}'}
    examples |= {"default_chat_template_kwargs": '{"enable_thinking": false}'}
    return examples.get(field.name, f"x/{field.name}")


@pytest.mark.parametrize("verb", VERBS)
def test_without_flags_and_variables_all_is_default(verb):
    assert read(verb) == Settings()


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_flag_and_variable_read_the_same_and_the_flag_wins(field):
    verb = field.metadata["verbs"][0]
    flag, variable = "--" + field.name.replace("_", "-"), "QUIRE_" + field.name.upper()
    by_flag = read(verb, flag, example_of(field))
    assert by_flag == read(verb, **{variable: example_of(field)})
    if field.metadata["low"] == field.metadata["high"] is not None:
        assert by_flag == Settings()
        return
    assert getattr(by_flag, field.name) != field.default
    other = "x/other" if field.metadata["low"] is field.metadata["choices"] is None else _default_text(field)
    other = example_of(field) if field.name in ("speculative_config", "lora_modules") else other
    assert read(verb, flag, example_of(field), **{variable: other}) == by_flag


def _default_text(field: dataclasses.Field) -> str:
    return str(field.metadata["low"] if field.default is None else field.default)


def test_a_setting_of_another_verb_is_no_flag_here_but_may_be_in_the_environment(capsys):
    with pytest.raises(SystemExit):
        read("check", "--port", "9000")
    assert "--port" in capsys.readouterr().err
    assert read("check", QUIRE_PORT="9000") == Settings()


def test_an_empty_variable_counts_as_unset_but_for_keys():
    assert read("serve", QUIRE_MODEL="", QUIRE_PORT="", QUIRE_HOST="", QUIRE_ALLOWED_HOSTS="") == Settings()


def test_an_unknown_variable_is_refused_by_name():
    with pytest.raises(StartupError, match=r"^unknown environment variable QUIRE_MAX_NUM_SEQ$"):
        read("serve", QUIRE_MAX_NUM_SEQ="3")
    assert read("serve", QUIRE_CACHE_DIR="/somewhere", HOME="/root") == Settings()


@pytest.mark.parametrize(
    "field", [field for field in FIELDS if field.metadata["low"] is not None], ids=lambda field: field.name
)
def test_bounds_are_closed_and_what_is_past_them_is_refused(field):
    verb, flag = field.metadata["verbs"][0], "--" + field.name.replace("_", "-")
    low, high = field.metadata["low"], field.metadata["high"]
    for bound in (low, high):
        assert getattr(read(verb, f"{flag}={bound}"), field.name) == bound
    for outside in (low - 1, high + 1, "nan", "inf", "-inf", "9" * 400, "", "two", "1e", "0x10"):
        with pytest.raises(StartupError) as refusal:
            read(verb, f"{flag}={outside}")
        assert str(refusal.value).startswith(f"{flag}: ")
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "field", [field for field in FIELDS if field.metadata["choices"]], ids=lambda field: field.name
)
def test_choices_are_all_there_is(field):
    verb, variable = field.metadata["verbs"][0], "QUIRE_" + field.name.upper()
    for choice in field.metadata["choices"]:
        assert getattr(read(verb, **{variable: str(choice)}), field.name) == choice
    with pytest.raises(StartupError, match=rf"^{variable}: "):
        read(verb, **{variable: "17"})


@pytest.mark.parametrize("flag", ["--model", "--served-model-name", "--redis-url", "--host", "--data-dir"])
def test_an_empty_text_is_refused(flag):
    with pytest.raises(StartupError, match=f"^{flag}: empty value$"):
        read("serve", f"{flag}=")


@pytest.mark.parametrize("names", ["a b", "a/b", "a:b", "a,{b}", "x" * 65, "a,\n", "é"])
def test_producer_names_cannot_leave_their_place_in_a_key(names):
    if names == "a,\n":
        assert read("serve", f"--producers={names}").producers == ("a",)
        return
    with pytest.raises(StartupError, match=r"^--producers: .*letters, digits"):
        read("serve", f"--producers={names}")


def test_lists_are_separated_by_commas_and_stripped():
    settings = read("serve", "--producers=batch, nightly ,", QUIRE_API_KEY=" one,two ")
    assert (settings.producers, settings.api_key) == (("batch", "nightly"), ("one", "two"))


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_every_flag_with_its_default(verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = " ".join(parser_of(verb).format_help().split())
    for field in FIELDS:
        flag = "--" + field.name.replace("_", "-")
        assert (f"{flag} " in text) == (verb in field.metadata["verbs"])
        if verb not in field.metadata["verbs"]:
            continue
        assert field.metadata["help"].replace("\n", " ") in text
        if field.default in (None, ()):
            assert "default:" in field.metadata["help"]
        else:
            shown = ",".join(field.default) if isinstance(field.default, tuple) else field.default
            assert f"{field.metadata['help']} (default: {shown})" in text


@pytest.mark.parametrize("verb", VERBS)
def test_a_part_reads_what_its_parent_read(verb):
    environ = {"QUIRE_" + field.name.upper(): example_of(field) for field in FIELDS}
    settings = read(verb, **environ)
    assert read(verb, *to_flags(settings, verb), **to_secret_environ(settings)) == settings


@pytest.mark.parametrize("verb", VERBS)
def test_a_flag_that_chose_the_default_wins_over_the_environment_in_the_parts_too(verb):
    environ = {"QUIRE_" + field.name.upper(): example_of(field) for field in FIELDS if field.default not in (None, ())}
    chosen = Settings()
    assert read(verb, *to_flags(chosen, verb), **{**environ, **to_secret_environ(chosen)}) == chosen


def write(folder: Path, text: str) -> str:
    path = folder / "quire.toml"
    path.write_text(text)
    return str(path)


def test_a_file_is_read_under_the_environment_and_the_flags(tmp_path):
    path = write(
        tmp_path, 'max_num_seqs = 3\nport = 1\nhost = "h"\nproducers = ["a", "b"]\ngpu_memory_utilization = 0.5\n'
    )
    settings = read("serve", "--config", path, "--port", "9", QUIRE_HOST="x")
    assert (settings.max_num_seqs, settings.port, settings.host) == (3, 9, "x")
    assert (settings.producers, settings.gpu_memory_utilization) == (("a", "b"), 0.5)
    assert read("serve", QUIRE_CONFIG=path).port == 1
    assert read("check", "--config", path).max_num_seqs == 3


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max_seqs = 3", "max_seqs: unknown setting"),
        ("max_num_seqs = 0", "max_num_seqs: 0 is out of range (1..4096)"),
        ("max_num_seqs = true", "max_num_seqs: wrong type (a text, a number or a list of texts)"),
        ("[serve]\nport = 3", "serve: unknown setting"),
        ("port = ", "Invalid value"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_line(tmp_path, text, complaint):
    with pytest.raises(StartupError) as refusal:
        read("serve", "--config", write(tmp_path, text))
    assert complaint in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(StartupError, match=r"^--config: /nowhere/x\.toml: No such file or directory$"):
        read("serve", "--config", "/nowhere/x.toml")


def test_a_part_does_not_read_the_file_its_parent_has_read(tmp_path):
    path = write(tmp_path, 'producers = "old"')
    settings = read("serve", "--config", path, "--producers=")
    environ = {"QUIRE_CONFIG": path, **to_secret_environ(settings), **NO_CONFIG_FILE}
    assert read("gateway", *to_flags(settings, "gateway"), **environ).producers == ()


def test_a_child_takes_its_parents_secrets_before_the_environments():
    settings = read("serve", "--api-key=new", QUIRE_API_KEY="old")
    assert settings.api_key == ("new",)
    environ = {"QUIRE_API_KEY": "old", **to_secret_environ(settings)}
    assert read("gateway", *to_flags(settings, "gateway"), **environ) == settings


@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_keys_that_are_none_do_not_open_the_service(tmp_path, text):
    path = write(tmp_path, f'api_key = "{text}"')
    for source, flags, environ in (
        ("--api-key", (f"--api-key={text}",), {"QUIRE_API_KEY": "old"}),
        ("QUIRE_API_KEY", (), {"QUIRE_API_KEY": text}),
        (f"{path}: api_key", ("--config", path), {}),
    ):
        for verb in ("serve", "gateway"):
            with pytest.raises(StartupError) as refusal:
                read(verb, *flags, **environ)
            assert str(refusal.value).startswith(f"{source}: ")
            assert "at least one key" in str(refusal.value)
            assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("source", "flags"), [("--api-key-file", ("--api-key-file=",)), ("QUIRE_API_KEY_FILE", ())])
def test_a_file_of_keys_without_a_name_does_not_open_the_service(source, flags):
    with pytest.raises(StartupError, match=f"^{source}: empty value$"):
        read("serve", *flags, QUIRE_API_KEY_FILE="")


def test_an_empty_list_of_keys_does_not_open_the_service(tmp_path):
    with pytest.raises(StartupError, match=r"api_key: .*at least one key"):
        read("serve", "--config", write(tmp_path, "api_key = []"))


def test_secrets_are_on_no_command_line():
    settings = read("serve", QUIRE_API_KEY="hush1,hush2", QUIRE_REDIS_URL="redis://:hush3@queue:6379")
    assert "hush" not in " ".join(to_flags(settings, "serve"))
    assert to_secret_environ(settings) == {
        "QUIRE_API_KEY": "hush1,hush2",
        "QUIRE_REDIS_URL": "redis://:hush3@queue:6379",
    }


def test_a_value_that_looks_like_a_flag_travels():
    settings = Settings(served_model_name="--port", model=Path("-m"))
    assert read("serve", *to_flags(settings, "serve")) == settings


def test_settings_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().port = 1


def test_every_secret_is_a_setting():
    assert set(to_secret_environ(Settings(api_key=("k",)))) == {"QUIRE_" + name.upper() for name in SECRETS}


def test_a_switch_is_turned_by_its_flag_alone_and_by_its_negation():
    assert read("serve", "--enable-prefix-caching").enable_prefix_caching
    assert not read("serve", "--no-enable-prefix-caching", QUIRE_ENABLE_PREFIX_CACHING="1").enable_prefix_caching
    assert not read("serve", QUIRE_ENABLE_PREFIX_CACHING="0").enable_prefix_caching
    with pytest.raises(StartupError, match=r"QUIRE_ENABLE_PREFIX_CACHING: 'maybe' is not supported \(true or false\)"):
        read("serve", QUIRE_ENABLE_PREFIX_CACHING="maybe")


def test_a_switch_is_a_truth_value_in_a_file(tmp_path):
    path = tmp_path / "quire.toml"
    path.write_text("enable_prefix_caching = false")
    assert not read("serve", "--config", str(path)).enable_prefix_caching
