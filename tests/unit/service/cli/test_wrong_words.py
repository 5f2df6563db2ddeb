"""A wrong word on the command line gets one line with it and a suggestion, and exit status 2."""

from importlib.metadata import version

import pytest

from service.cli import check
from service.cli.main import main
from service.offline import public


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["serve", "--prot", "9000"], "quire serve: --prot: unknown argument (did you mean --port?)"),
        (
            ["worker", "--max-num-seq=3"],
            "quire worker: --max-num-seq=3: unknown argument (did you mean --max-num-seqs?)",
        ),
        (
            ["gateway", "zzz"],
            "quire gateway: --model: zzz: no such folder (a folder, or org/name of a Hugging Face model)",
        ),
        (["serve", "a", "--model", "b"], "quire serve: --model: b and the argument a differ (give one)"),
        (["serve", "--port", "abc"], "quire serve: --port: 'abc' is not supported (a whole number)"),
        (["serve", "--port", "70000"], "quire serve: --port: 70000 is out of range (0..65535)"),
        (["bench", "engine", "-tp", "3"], "quire bench: --tensor-parallel-size: '3' is not supported (1, 2, 4, 8)"),
        (["serve", "-tp", "3"], "quire serve: --tensor-parallel-size: '3' is not supported (1, 2, 4, 8)"),
        (
            ["check", "a/b", "--download-dir", "c"],
            "quire check: --model: a/b: no such folder, and its copy in c is not there (HF_HUB_OFFLINE forbids a "
            "download)",
        ),
        (["check", "--length", "0"], "quire check: --length: 0 is out of range (1..1048576)"),
        (["key", "bob", "--nam", "x"], "quire key: --nam: unknown argument"),
        (["check", "--api-key=secret"], "quire check: --api-key: not a flag of quire check (of gateway, serve)"),
        (["serve", "--zzz"], "quire serve: --zzz: unknown argument"),
        (["serve", "--temperature"], "quire serve: --temperature: unknown argument"),
        (
            ["serve", "--gpu-mem-util", "1"],
            "quire serve: --gpu-mem-util: unknown argument (did you mean --gpu-memory-utilization?)",
        ),
        (["serve", "--max-len", "1"], "quire serve: --max-len: unknown argument (did you mean --max-model-len?)"),
        (["serve", '--zzz={"a": 1}'], "quire serve: --zzz: unknown argument"),
        (["bench", "queue", "--prt", "1"], "quire bench: --prt: unknown argument"),
        (["--verison"], "quire: --verison: unknown argument (did you mean --version?)"),
        (["key", "a:b"], "quire key: the name must be 1 to 64 letters, digits, '.', '_' or '-'"),
        (["dead", "list", "x", "--redis-url", "redis://a"], "quire dead: x: list takes no job (show x)"),
        (["worker"], "quire worker: --redis-url: missing (quire serve starts an embedded Redis)"),
    ],
)
def test_one_line_names_the_wrong_word(words, line, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[-1] == line


@pytest.mark.parametrize(
    ("words", "url", "reason"),
    [
        (["worker"], "redis://127.0.0.1:9", "Error 111 "),
        (["worker"], "redis+sentinel://127.0.0.1:9/p", "no Sentinel answers with a primary named 'p'"),
        (["bench", "queue"], "redis://127.0.0.1:9", "Error 111 "),
    ],
)
def test_a_redis_that_does_not_answer(words, url, reason, capsys):
    assert main([*words, "--redis-url", url]) == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert printed.startswith(f"quire {words[0]}: --redis-url: Redis does not answer: {reason}")


def test_no_verb_gets_the_help(capsys):
    assert main([]) == 2
    printed = capsys.readouterr().err
    assert [verb for verb in ("serve", "gateway", "worker", "chat", "key") if f"\n    {verb} " not in printed] == []


def test_an_unknown_verb(capsys):
    with pytest.raises(SystemExit) as left:
        main(["srve"])
    assert left.value.code == 2
    assert "'srve' (choose from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["serve", "--port"], "quire serve: argument --port: expected one argument"),
        (["bench", "memory"], "quire bench memory: the following arguments are required: --trace"),
        (["complete", "x", "--temperature", "nan"], "quire complete: argument --temperature: 'nan' is not a number"),
        (["completion", "csh"], "quire completion: argument shell: invalid choice: 'csh' (choose from "),
    ],
)
def test_what_the_parser_finds_is_one_line_too(words, line, capsys):
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith(line)


def test_ctrl_c_is_no_news(monkeypatch, capsys):
    def interrupted(settings, flags):
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run_check", interrupted)
    assert main(["check"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("words", [["--version"], ["serve", "--version"]])
def test_the_version(words, capsys):
    assert main(words) == 0
    assert capsys.readouterr().out == f"quire {version('quire')}\n" == f"quire {public.__version__}\n"
