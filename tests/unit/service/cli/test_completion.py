"""Shell completion: bash itself is asked; of the other shells, that their scripts know all words."""

import shutil
import subprocess

import pytest

from service.cli.completion import SHELLS
from service.cli.main import main
from service.cli.verbs import HELP


def script_of(shell, capsys):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["se"], {"serve"}),
        (["serve", "--max-num-b"], {"--max-num-batched-tokens"}),
        (["serve", "--device", "c"], {"cpu", "cuda"}),
        (["worker", "--pooling"], set()),
        (["completion", "f"], {"fish"}),
        (["bench", "ser"], {"serve"}),
        (["bench", "engine", "--prefil"], {"--prefill"}),
    ],
)
def test_bash_completes(capsys, tmp_path, words, wanted):
    path = tmp_path / "quire.bash"
    path.write_text(script_of("bash", capsys))
    ask = (
        f"source {path}; COMP_WORDS=(quire {' '.join(words)}); COMP_CWORD={len(words)}; "
        'function=$(complete -p quire | sed -E "s/.*-F ([^ ]+).*/\\1/"); '
        f'$function quire "{words[-1]}" "{[*"q", *words][-2]}"; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=20)
    assert done.stderr == ""
    assert {line.strip() for line in done.stdout.split("\n")} - {""} == wanted


def test_files_and_folders_are_distinguished(capsys):
    script = script_of("bash", capsys)
    assert "ssl_certfile_COMPGEN=_shtab_compgen_files" in script
    assert "serve___model_COMPGEN=_shtab_compgen_dirs" in script


@pytest.mark.parametrize("shell", SHELLS)
def test_every_verb_is_known(capsys, shell):
    script = script_of(shell, capsys)
    assert [verb for verb in HELP if verb not in script] == []
    assert "num-gpu-blocks" in script or "num_gpu_blocks" in script


def test_another_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as left:
        main(["completion", "csh"])
    assert left.value.code == 2
    assert "csh" in capsys.readouterr().err
