"""The README is true: its transcripts and its example run, its map and its words match the code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TIMEOUT_S = 120


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def steps(transcript: str) -> list[tuple[str, str]]:
    """(command, expected output) of a transcript."""
    found: list[tuple[str, list[str]]] = []
    for line in transcript.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return [(command, "\n".join(lines)) for command, lines in found]


def matches(expected: str, got: str) -> bool:
    """The output is what is written; a line of `...` stands for any lines."""
    parts = [
        [line.rstrip() for line in part.strip("\n").splitlines()]
        for part in re.split(r"^\.\.\.$", expected, flags=re.M)
    ]
    lines = [line.rstrip() for line in got.strip("\n").splitlines()]
    if len(parts) == 1:
        return lines == parts[0]
    first, *middle, last = parts
    if lines[: len(first)] != first or lines[len(lines) - len(last) :] != last:
        return False
    at = len(first)
    for part in middle:
        while at <= len(lines) and lines[at : at + len(part)] != part:
            at += 1
        at += len(part)
    return at + len(last) <= len(lines)


@pytest.mark.slow
@pytest.mark.parametrize("transcript", blocks("console"), ids=lambda text: text.split("\n")[0][2:40])
def test_transcripts(transcript: str, tmp_path: Path) -> None:
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    for command, expected in steps(transcript):
        words = shlex.split(command)
        assert words[0] == "agentx"
        got = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=tmp_path,
            env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert got.returncode == 0, got.stderr
        assert matches(expected, got.stdout), f"{command}\nexpected:\n{expected}\ngot:\n{got.stdout}"


def test_the_example_prints_what_it_says(tmp_path: Path) -> None:
    (example,), (printed,) = blocks("python"), blocks("text")
    got = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (got.returncode, got.stdout) == (0, printed), got.stderr


def test_the_first_screen_has_exactly_two_commands() -> None:
    commands = blocks("sh")
    assert len(commands) == 2
    assert all(len(command.splitlines()) == 1 for command in commands)
    first_screen = "\n".join(README.splitlines()[:40])
    assert all(command.strip() in first_screen for command in commands)


def test_the_map_names_what_is_there() -> None:
    for place in re.findall(r"^\| `([^`]+/)`", README, re.MULTILINE):
        assert (ROOT / place).is_dir(), place
    for name in ("profile", "generate", "gate", "lanes", "live", "runs", "report"):
        assert (ROOT / "agentx" / f"{name}.py").is_file()


def test_every_public_name_is_there_and_documented() -> None:
    import agentx

    for name in agentx.__all__:
        assert getattr(agentx, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = agentx.nothing


@pytest.mark.parametrize("command", ["", "generate", "gate", "replay", "report", "serve"])
def test_help_says_what_it_does_with_an_example(command: str) -> None:
    words = [sys.executable, "-m", "agentx", *command.split(), "--help"]
    got = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=ROOT)
    assert got.returncode == 0
    assert "Usage:" in got.stdout
    assert not command or "Example:" in got.stdout
