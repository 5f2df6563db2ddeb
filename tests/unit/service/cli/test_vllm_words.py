"""Command lines of public recipes with `vllm` replaced: what becomes of every flag."""

from __future__ import annotations

import argparse
import functools
import json
import shlex
from pathlib import Path

import pytest

from service.cli.main import main
from service.cli.models import take_model_argument
from service.cli.parser import make_parser
from service.cli.vllm_flags import RENAMED, VLLM_FLAGS
from service.cli.vllm_words import Translation, translate, vllm_variables, with_stored_format, with_vllm_key
from service.config.settings import Settings
from service.config.sources import read_settings
from service.errors import StartupError

SETTINGS = {name.replace("_", "-") for name in Settings.__dataclass_fields__}
STARTING = [
    "meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 1 --disable-log-requests",
    "meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 1 --max-model-len 2048 --host 0.0.0.0 --port 8000",
    "meta-llama/Llama-3.3-70B-Instruct --async-scheduling --no-enable-prefix-caching --max-num-batched-tokens 8192",
    "RedHatAI/Meta-Llama-3.1-8B-quantized.w8a8",
    "meta-llama/Llama-3.2-3B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json --dtype half",
    "Qwen/Qwen3-8B --max-num-batched-tokens 16384 --gpu-memory-utilization 0.8 --enable-auto-tool-choice "
    "--tool-call-parser hermes",
    "Qwen/Qwen2.5-32B --seed 42 --gpu-memory-utilization 0.98 --max-num-batched-tokens 2048 --max-num-seqs 128 "
    "--tensor-parallel-size 1 --max-model-len 32k",
    "meta-llama/Llama-3.1-8B-Instruct -dp 4 -asc 2",
    "meta-llama/Llama-3.3-70B-Instruct -tp 4 --distributed-executor-backend mp",
    "meta-llama/Llama-3.1-8B-Instruct -dpl 2 -dp 2 --data-parallel-backend mp --nnodes 1 --node-rank 0 "
    "--disable-custom-all-reduce",
    'Qwen/Qwen3-8B --speculative-config \'{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}\' '
    "--max-num-batched-tokens 8192",
    "Qwen/Qwen3Guard-Gen-0.6B --host 0.0.0.0 --max-model-len 32768",
    "mistralai/Mistral-7B-Instruct-v0.3 --tokenizer_mode mistral --config_format mistral --load_format mistral "
    "--enable-auto-tool-choice --tool-call-parser mistral --max-model-len auto",
    "Qwen/Qwen3-8B --root-path /llm/ --uvicorn-log-level critical "
    "--default-chat-template-kwargs '{\"enable_thinking\": false}'",
    "Qwen/Qwen3-30B-A3B -tp 8 --enable-expert-parallel --no-enable-prefix-caching --no-enforce-eager "
    "--load-format fastsafetensors --shutdown-timeout 60 --max-num-queued-reqs 64 --tool-call-parser qwen3_xml",
    "Qwen/Qwen2.5-7B-Instruct-AWQ --quantization awq_marlin --trust-remote-code --enforce-eager --swap-space 16 "
    "--served-model-name qwen qwen-awq --api-key a b --enable-chunked-prefill --generation-config vllm",
]
REFUSED = [
    ("Qwen/Qwen3-235B-A22B -tp 4 -pp 2 --distributed-executor-backend mp", "--pipeline-parallel-size"),
    ("meta-llama/Llama-3.1-8B-Instruct -dp 4 --data-parallel-size-local 2", "run on this host"),
    ("meta-llama/Llama-3.1-8B-Instruct -dp 4 -dpl 1", "--data-parallel-size-local 1: .*run on this host"),
    ("meta-llama/Llama-3.1-8B-Instruct -dp 4 -dpa 10.0.0.1 -dpp 13345", "--data-parallel-address 10.0.0.1: "),
    ("meta-llama/Llama-3.1-8B-Instruct -dp 4 --headless", "runs on one host"),
    ("meta-llama/Llama-3.1-8B-Instruct --enable-lora --fully-sharded-loras", "all of an adapter"),
    ("Qwen/Qwen3-8B --tokenizer Qwen/Qwen3-4B", "--tokenizer Qwen/Qwen3-4B: the model's folder has its tokenizer"),
]


@functools.cache
def parser_of_serve() -> argparse.ArgumentParser:
    return make_parser(("serve",))


def read(line: str) -> tuple[Translation, Settings]:
    """The settings of `quire serve LINE`, without looking for the model."""
    parser = parser_of_serve()
    (verbs,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    done = translate(shlex.split(line), verbs.choices["serve"]._option_string_actions)
    flags = parser.parse_args(["serve", *done.argv])
    take_model_argument(flags)
    return done, read_settings("serve", flags, {})


@pytest.mark.parametrize("line", STARTING)
def test_a_recipe_starts_with_only_vllm_replaced(line):
    done, settings = read(line)
    assert str(settings.model) == line.split()[0]
    given = [word for word in shlex.split(line) if word.startswith("-")]
    noted = [word.split()[0] for word in done.notes]
    assert all(word.replace("_", "-") in noted or word.replace("_", "-")[2:] not in VLLM_FLAGS for word in given)


@pytest.mark.parametrize(("line", "reason"), REFUSED)
def test_a_recipe_that_asks_for_more_is_refused_with_the_reason(line, reason):
    with pytest.raises(StartupError, match=reason):
        read(line)


def test_values_in_vllms_spelling():
    done, settings = read(STARTING[-1])
    assert settings == Settings(
        model=Path("Qwen/Qwen2.5-7B-Instruct-AWQ"), swap_space=16.0, served_model_name="qwen,qwen-awq",
        api_key=("a", "b"), generation_config="vllm", load_format="safetensors",
    )  # fmt: skip
    assert settings.model_names == ("qwen", "qwen-awq")
    assert done.stored_format == "awq_marlin"
    assert read(STARTING[6])[1].max_model_len == 32_000
    assert read("m --max-model-len 4K --dtype float")[1] == Settings(
        model=Path("m"), max_model_len=4096, dtype="float32"
    )
    assert read("m --max-model-len=-1 --load-format auto")[1] == Settings(model=Path("m"))
    assert read("m --num-gpu-blocks-override 9 -q fp8")[1] == Settings(
        model=Path("m"), num_gpu_blocks=9, quantization="fp8"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--speculative-config.method ngram --speculative_config.num_speculative_tokens=3 -sc.prompt_lookup_max 4",
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
        ),
        (
            "--spec-method draft_model --spec_tokens=3 --spec-model org/draft",
            {"method": "draft_model", "num_speculative_tokens": 3, "model": "org/draft"},
        ),
        ("""-sc '{"method": "ngram", "num_speculative_tokens": 3}' -sc.num_speculative_tokens 5""",
         {"method": "ngram", "num_speculative_tokens": 5}),
    ],
)  # fmt: skip
def test_keys_of_an_object_one_by_one(line, expected):
    config = json.loads(str(read(f"m {line}")[1].speculative_config))
    assert {key: config[key] for key in expected} == expected


def test_a_rope_by_its_own_flags():
    """Qwen's line for long contexts."""
    yarn = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}'
    _, settings = read(f"m --rope-scaling '{yarn}' --rope-theta 1000000 --max-model-len 131072")
    assert settings.config_overrides == {"rope_scaling": json.loads(yarn), "rope_theta": 1000000}
    assert read("m --hf-overrides '{}'")[1].config_overrides == read("m")[1].config_overrides == {}
    with pytest.raises(StartupError, match="to change architectures, edit"):
        read("""m --hf-overrides '{"architectures": ["X"]}'""")


def test_nested_keys_and_lists():
    found = read(
        "m --default-chat-template-kwargs.a.b_c true --default_chat_template_kwargs.d+ x --no-enable-lora "
        "--default-chat-template-kwargs.d+=y,1 --quantization None --override-generation-config.top_p 0.5"
    )[1]
    assert json.loads(found.default_chat_template_kwargs) == {"a": {"b_c": True}, "d": ["x", "y", 1]}
    assert (json.loads(found.override_generation_config), found.quantization) == ({"top_p": 0.5}, "auto")
    with pytest.raises(StartupError, match=r"--speculative-config\.method: no value"):
        read("m --speculative-config.method")


def test_a_yaml_file_of_vllm_and_a_flag_that_wins(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text("model: org/name\nport: 7\nmax_model_len: 1k\nserved-model-name: [a, b]\ntrust-remote-code: true\n"
                    "enable-prefix-caching: false\ntokenizer: null\nenable-log-requests: false\n"
                    "override-generation-config: {temperature: 0}\n")  # fmt: skip
    done, settings = read(f"--port 9 --config {path}")
    assert settings == Settings(
        model=Path("org/name"), port=9, max_model_len=1000, served_model_name="a,b", enable_prefix_caching=False,
        override_generation_config='{"temperature": 0}',
    )  # fmt: skip
    assert [note.split()[0] for note in done.notes] == ["--trust-remote-code"]
    path.write_text("a: [\n")
    with pytest.raises(StartupError, match=r"no valid YAML \(line 2\)"):
        read(f"--config={path}")


def test_a_switch_does_not_swallow_the_model():
    for switch in ("--enable-prefix-caching", "--trust-remote-code", "--enforce_eager"):
        assert read(f"{switch} org/name")[1] == Settings(model=Path("org/name"))
    assert not read("--enable-prefix-caching false org/name")[1].enable_prefix_caching


@pytest.mark.parametrize(
    "spelling", ["--compilation-config 3", "-O3", "-O 3", "-O=3", "-cc.level=3", "--compilation_config.level 3"]
)
def test_spellings_of_one_flag(spelling):
    (note,) = read(f"m {spelling}")[0].notes
    assert note.startswith("--compilation-config")
    assert "nothing is compiled at start" in note


@pytest.mark.parametrize("name", sorted(VLLM_FLAGS.keys() - SETTINGS))
def test_each_flag_is_accepted_with_a_note_or_refused_with_a_reason(name):
    flag = VLLM_FLAGS[name]
    assert flag.note or flag.reason
    assert not flag.accepted or (flag.note and flag.reason)
    for value in (*flag.accepted, "17"):
        words = f"--{name}={value}"
        if flag.is_accepted(value):
            assert len(read(f"m {words}")[0].notes) == 1
        else:
            with pytest.raises(StartupError, match="^--" + name) as refusal:
                read(f"m {words}")
            assert str(refusal.value).endswith(flag.reason)


def test_settings_are_not_in_the_table():
    assert SETTINGS & VLLM_FLAGS.keys() == set(), "a setting of that name works now: drop its row"
    assert {target[2:].partition(".")[0] for target in RENAMED.values()} <= SETTINGS | VLLM_FLAGS.keys()


@pytest.mark.parametrize(
    ("config", "word", "refused"),
    [
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
            "awq_marlin",
            None,
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "moe_wna16", None),
        ({"quant_method": "fp8"}, "moe_wna16", "the folder's weights are fp8"),
        (None, "gptq", "the folder's weights are 16- or 32-bit"),
    ],
)
def test_quantization_names_what_the_folder_is(tmp_path, config, word, refused):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    settings = Settings(model=tmp_path)
    if refused is None:
        assert with_stored_format(settings, word) == settings
        return
    with pytest.raises(StartupError, match=refused):
        with_stored_format(settings, word)


@pytest.mark.parametrize(("method", "means"), [("fp8", "auto"), ("compressed-tensors", "fp8"), (None, "fp8")])
def test_fp8_of_an_fp8_folder_means_as_stored(tmp_path, method, means):
    section = {"quantization_config": {"quant_method": method}} if method else {}
    (tmp_path / "config.json").write_text(json.dumps(section))
    settings = Settings(model=tmp_path, quantization="fp8")
    assert with_stored_format(settings, None).quantization == means


def test_vllms_variable_of_the_key_locks_the_service():
    assert with_vllm_key(Settings(), {"VLLM_API_KEY": "a"}).api_key == ("a",)
    assert with_vllm_key(Settings(api_key=("b",)), {"VLLM_API_KEY": "a"}).api_key == ("b",)
    file = Settings(api_key_file=Path("keys"))
    assert with_vllm_key(file, {"VLLM_API_KEY": "a"}) == file
    assert with_vllm_key(Settings(), {"VLLM_API_KEY": ""}) == Settings()


def test_the_models_own_tokenizer_is_already_so():
    for line in ("org/name --tokenizer org/name", "--tokenizer=org/name --model org/name"):
        assert read(line)[0].notes == ["--tokenizer org/name has no effect: it is the model's"]


@pytest.mark.parametrize("flag", ["--api-key", "--served-model-name"])
def test_a_flag_without_its_value_is_not_left_out(flag, capsys):
    """An unset variable of a shell script must not unlock the service."""
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "org/name", flag, "--port", "0"])
    assert capsys.readouterr().err == f"quire serve: argument {flag}: expected one argument\n"


def test_variables_without_effect_are_named():
    assert vllm_variables({"VLLM_API_KEY": "a", "PATH": "b"}) is None
    assert vllm_variables({"VLLM_USE_V1": "1", "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_API_KEY": "a"}) == (
        "variables without effect: VLLM_LOGGING_LEVEL (use --log-level), VLLM_USE_V1"
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--uds", "/llm"], "--uds /llm: use --host and --port"),
        (["--root-path", "llm"], "--root-path: 'llm' is not supported (a path such as /llm)"),
        (
            ["--default-chat-template-kwargs", "[]"],
            "--default-chat-template-kwargs: '[]' is not supported (a JSON object)",
        ),
        (["--config", "a.yaml"], "--config: a.yaml: No such file or directory"),
        *(
            (words, "--api-key: '' is not supported (at least one key; leave the setting out to require none)")
            for words in (["--api-key="], ["--api-key", ""], ["--api_key", "", "--port", "0"])
        ),
        (["--redis-url", ""], "--redis-url: empty value"),
        (["--enforce-eagre"], "--enforce-eagre: unknown argument (did you mean --enforce-eager?)"),
        (["--max-modle-len", "8"], "--max-modle-len: unknown argument (did you mean --max-model-len?)"),
    ],
)
def test_one_line(words, line, capsys):
    assert main(["serve", *words]) == 2
    assert capsys.readouterr().err == f"quire serve: {line}\n"
