"""deploy/slurm and deploy/systemd: the batch file is run, with stand-ins for what Slurm and Ray have; the unit is read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

from tests.harness.waiting import LONG_S, until

DEPLOY = Path(__file__).parents[2] / "deploy"
STAND_INS = {
    "scontrol": 'for n in $NODES; do echo "$n"; done',
    "srun": 'while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && export NODE=${1#*=}; shift; done; exec "$@"',
    "hostname": "echo 10.0.0.1",
    "ray": 'echo "$NODE: ray $*" >> "$CALLS"; exec sleep 600',
}
# Not in bash: a signal that comes while bash reads a command substitution makes it misread the trap.
SCHEDULER = """
import os, signal, sys, time

def report(line):
    with open(os.environ["CALLS"], "a") as log:
        log.write(line + "\\n")

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
report("{NODE}: scheduler {} at {RAY_ADDRESS}, token {}".format(
    " ".join(sys.argv[1:]), len(os.environ["RAY_AUTH_TOKEN"]), **os.environ))
while open(os.environ["CALLS"]).read().count("ray start") < len(os.environ["NODES"].split()):
    time.sleep(0.02)
if not os.environ["WAITS"]:
    sys.exit(7)
signal.sigwait({signal.SIGTERM})
report("stopped")
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a job, and commands that write down how they were called."""
    (commands := tmp_path / "env" / "bin").mkdir(parents=True)
    scripts = {name: f"#!/bin/bash\n{body}\n" for name, body in STAND_INS.items()}
    for name, script in {**scripts, "scheduler": f"#!{sys.executable}\n{SCHEDULER}"}.items():
        (commands / name).write_text(script)
        (commands / name).chmod(0o755)
    return {
        **os.environ, "HEADGATE": str(tmp_path / "env"), "HEADGATE_ADMIN_KEY": "key", "SLURM_JOB_NODELIST": "n[1-3]",
        "CALLS": str(tmp_path / "calls"), "WAITS": "", "NODES": "n1 n2 n3",
    }  # fmt: skip


def start(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["bash", str(DEPLOY / "slurm" / "headgate.sbatch"), "c.toml"], env=environment)


def lines_of(environment: dict[str, str]) -> list[str]:
    path = Path(environment["CALLS"])
    return sorted(path.read_text().splitlines()) if path.exists() else []


@pytest.mark.parametrize(
    ("nodes", "labels"),
    [("n1 n2 n3", ["rollout=true", "rollout=true", "train=true"]), ("n1", ["rollout=true,train=true"])],
)
def test_the_last_node_trains_and_the_status_is_that_of_the_cluster(
    environment: dict[str, str], nodes: str, labels: list[str]
) -> None:
    environment["NODES"] = nodes
    assert start(environment).wait(LONG_S) == 7
    first, *others = nodes.split()
    assert [line for line in lines_of(environment) if "scheduler" in line] == [
        f"{first}: scheduler run c.toml at 10.0.0.1:6379, token 64"
    ]
    started = [line for line in lines_of(environment) if "ray start" in line]
    assert [line.partition("--labels=")[2] for line in started] == labels
    for line, node in zip(started, [first, *others], strict=True):
        assert line.startswith(f"{node}: ray start {'--head --block' if node == first else '--block'} ")


async def test_a_job_that_gets_sigterm_lets_the_cluster_end_first(environment: dict[str, str]) -> None:
    environment["WAITS"] = "yes"
    job = start(environment)
    await until(lambda: any("scheduler" in line for line in lines_of(environment)), "the cluster runs")
    job.send_signal(signal.SIGTERM)
    assert job.wait(LONG_S) == 0
    assert "stopped" in lines_of(environment)


def test_the_unit_runs_the_checked_cluster_and_waits_for_its_end() -> None:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "systemd" / "headgate.service")
    service = unit["Service"]
    assert service["ExecStart"].split()[1:] == ["run", "/etc/headgate/cluster.toml"]
    assert service["ExecStartPre"].split()[1:] == ["run", "--check", "/etc/headgate/cluster.toml"]
    assert float(service["TimeoutStopSec"]) > 60 + 10 + 60, "the gateway's and the trainer's ends"
    assert (service["KillMode"], service["User"]) == ("mixed", "headgate")
