"""The README tells the truth about what can be checked cheaply: its links, its commands, its exit statuses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_a_link_leads_somewhere(target):
    assert (ROOT / target).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"(?:^|`)make ([a-z][a-z-]*)", README, re.MULTILINE))))
def test_a_make_target_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_ci_runs_the_test_command_of_the_readme_and_nothing_else():
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make test"] and "make test " in README


@pytest.mark.parametrize("line", sorted(set(re.findall(r"^rose-hpc [^\n#]+", README, re.MULTILINE))))
def test_a_command_and_its_options_exist(line):
    words = line.split()
    command = [w for w in words[1:3] if re.fullmatch(r"[a-z]+", w)]
    options = [w for w in words if w.startswith("--")]
    shown = subprocess.run(
        [sys.executable, "-m", "rose_hpc.cli", *command, "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert shown.returncode == 0, shown.stderr
    plain = re.sub(r"[│\s]+", " ", shown.stdout)
    assert all(option in plain for option in options), (options, plain)
