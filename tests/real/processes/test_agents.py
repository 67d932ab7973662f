"""The command that starts all replicas of a job on this machine, each with an agent."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
from real.processes import agents
from simdist.errors import RunError


def pretend(monkeypatch: pytest.MonkeyPatch, folder: Path, action: str) -> None:
    """Let agents be a shell script that notes its process and arguments."""
    script = folder / "agent"
    script.write_text(f'#!/bin/sh\necho "$$ $*" > {folder}/$$.txt\n{action}\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def noted(folder: Path) -> list[list[str]]:
    return [words for path in folder.glob("*.txt") if len(words := path.read_text().split()) > 1]


def test_each_replica_has_an_agent_until_the_job_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that has not ended by then, as that of a rank that hangs, is ended."""
    pretend(monkeypatch, tmp_path, "exec sleep 60")
    monkeypatch.setattr(agents, "is_over", lambda store: len(noted(tmp_path)) == 3)
    agents.run_replicas(["RUN"], 3, max_restarts=4, timeout_s=0.2)
    started = noted(tmp_path)
    assert sorted(words[words.index("--replica") + 1] for words in started) == ["0", "1", "2"]
    assert len({words[words.index("--meet") + 1] for words in started}) == 1
    assert all("--max-restarts=4" in words and "RUN" in words for words in started)
    for words in started:
        with pytest.raises(ProcessLookupError):
            os.kill(int(words[0]), 0)


def test_agents_that_all_give_up_end_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, tmp_path, "exit 3")
    with pytest.raises(RunError, match="have ended, with codes 3 of replica 0, 3 of replica 1; see above"):
        agents.run_replicas(["RUN"], 2, max_restarts=4, timeout_s=0.2)
