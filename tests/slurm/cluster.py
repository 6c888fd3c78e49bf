"""A real SLURM cluster of two nodes on this machine: own daemons, ports, key and folder."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel")
_FOLDERS = ("/usr/sbin", "/usr/local/sbin")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}

_CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
AuthType=auth/munge
# How long a requeued job waits before it starts again.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
MinJobAge=600
# Jobs make ports from their numbers; another cluster of these tests may run here at this time.
FirstJobId={first_job}
KillWait=5
GresTypes=gpu
# More than the machine has: nothing is bound to it.
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={port_1} CPUs=16 Gres=gpu:8
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={port_2} CPUs=16 Gres=gpu:8
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def missing_programs() -> list[str]:
    """The programs of SLURM and munge that this machine lacks."""
    return [name for name in PROGRAMS if _find(name) is None]


def _find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(_FOLDERS))


class Cluster:
    """What users do with a running cluster.

    Args:
        folder: Holds its configuration, logs and state.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def command(self, *words: str, check: bool = True) -> str:
        """Run one of SLURM's commands and return what it says."""
        result = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert not check or result.returncode == 0, f"{words}: {result.stderr}\n{self.logs()}"
        return result.stdout

    def submit(self, script: Path, variables: dict[str, str], *flags: str, cwd: Path) -> str:
        """Submit a file as users do, with variables in the environment; the job's number."""
        result = subprocess.run(
            ["sbatch", "--parsable", *flags, str(script)],
            env={**self.environment, **variables},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.returncode == 0, f"{result.stderr}\n{self.logs()}"
        return result.stdout.strip()

    def jobs(self, job: str) -> list[dict[str, str]]:
        """What SLURM knows of a job, or of each task of an array."""
        text = self.command("scontrol", "show", "job", "--oneliner", job)
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in text.splitlines() if line]

    def wait(self, job: str, timeout_s: float) -> list[dict[str, str]]:
        """Wait until a job, or each task of an array, has ended.

        Raises:
            TimeoutError: It did not in this time; the job is cancelled.
        """
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            jobs = self.jobs(job)
            if all(each["JobState"] in ENDED for each in jobs):
                return jobs
            time.sleep(0.3)
        self.command("scancel", job, check=False)
        raise TimeoutError(f"job {job} has not ended: {jobs}\n{self.logs()}")

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(
            f"---- {file.name}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-25:])
            for file in sorted(self.folder.glob("*.log"))
        )


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    """Start the daemons, and end them and all jobs afterwards.

    Raises:
        RuntimeError: A daemon did not start; its log is in the message.
    """
    ports = dict(zip(("controller_port", "port_1", "port_2"), _free_ports(3), strict=True))
    user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
    numbers = {**ports, "first_job": 1 + secrets.randbelow(60_000)}
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, user=user, **numbers))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    for number in range(8):  # files in place of devices
        (folder / f"gpu{number}").touch()
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    cluster = Cluster(folder)
    munge = ["munged", "--foreground", "--force"]
    munge += [f"--socket={folder}/munge.socket", f"--key-file={key}"]
    munge += [f"--{name}-file={folder}/munged.{name}" for name in ("log", "pid", "seed")]
    with ExitStack() as stack:
        stack.enter_context(_daemon(cluster, munge))
        _wait_for(cluster, "munged", (folder / "munge.socket").exists)
        stack.enter_context(_daemon(cluster, ["slurmctld", "-D", "-i"]))
        for node in ("n1", "n2"):
            stack.enter_context(_daemon(cluster, ["slurmd", "-D", "-N", node]))
        stack.callback(_cancel_all, cluster)
        _wait_for(cluster, "both nodes", lambda: _idle_nodes(cluster) == 2)
        yield cluster


def _idle_nodes(cluster: Cluster) -> int:
    text = cluster.command("sinfo", "--noheader", "--Node", "--format=%T", check=False)
    return text.split().count("idle")


def _cancel_all(cluster: Cluster) -> None:
    cluster.command("scancel", "--full", "--signal=KILL", "--partition=all", check=False)
    cluster.command("scancel", "--partition=all", check=False)
    until = time.monotonic() + 15
    while time.monotonic() < until and cluster.command("squeue", "--noheader", check=False).strip():
        time.sleep(0.2)


@contextmanager
def _daemon(cluster: Cluster, words: Sequence[str]) -> Iterator[None]:
    program = _find(words[0])
    assert program is not None, words[0]
    node = f"-{words[-1]}" if "-N" in words else ""
    output = cluster.folder / f"{words[0]}{node}.output.log"
    # If the tests are killed, their daemons end too.
    end_with_us = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*end_with_us, program, *words[1:]],
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(cluster: Cluster, what: str, there: object, timeout_s: float = 30) -> None:
    assert callable(there)
    until = time.monotonic() + timeout_s
    while not there():
        if time.monotonic() > until:
            raise RuntimeError(f"{what} did not start in {timeout_s} s\n{cluster.logs()}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
