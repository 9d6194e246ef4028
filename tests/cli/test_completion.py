"""`rubato completion`: what a shell offers after a few words."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from rubato.cli.main import VERBS, main

ASK = """
source "$1"
function=$(complete -p rubato | sed 's/.*-F \\([^ ]*\\).*/\\1/')
for words in "rubato comp" "rubato simulate --pol" "rubato simulate --policy ed" "rubato plan --profile opt-30b"; do
    COMP_WORDS=($words) COMP_CWORD=$(( $(wc -w <<< "$words") - 1 )) COMPREPLY=()
    $function
    echo "${COMPREPLY[*]}"
done
"""


def test_bash_completes_commands_options_and_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "rubato.bash"
    script.write_text(capsys.readouterr().out)
    asked = subprocess.run(["bash", "-c", ASK, "bash", str(script)], capture_output=True, text=True, check=True)
    assert asked.stdout.splitlines() == ["compare completion", "--policy", "edf", "opt-30b-4xa100-40g"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_scripts_of_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert not [verb for verb in VERBS if verb not in script]
