"""A real Slurm cluster in a scratch folder: munged, slurmctld, and a slurmd on every machine of `machines.py`.

It writes nothing outside the folder and starts in about a second. It needs the Debian packages slurmctld, slurmd,
slurm-client, munge and iproute2.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.slurm.machines import SYSTEM_PATH, Machines, until, why_not

CONFIG = """\
ClusterName=keepstep
SlurmctldHost=ctl({ctl})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/run/munge.sock,cred_expire=5
SlurmctldPort=16800
SlurmdPort=16801
StateSaveLocation={root}/ctld
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=200000,batch_sched_delay=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=1
SlurmdTimeout=30
SlurmctldTimeout=10
MessageTimeout=5
KillWait=10
BatchStartTimeout=10
CompleteWait=0
MinJobAge=3600
InactiveLimit=0
TCPTimeout=2
TreeWidth=65533
PropagateResourceLimits=NONE
"""
# cred_expire: every requeue waits this long. SlurmdTimeout: Slurm notices a dead node after this time (300 s on real
# clusters). The launchers notice it earlier (launch/supervise/peers.py).

PARTITIONS = """\
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE PriorityTier=10 PreemptMode=REQUEUE GraceTime=0 State=UP
PartitionName=spot Nodes={nodes} MaxTime=INFINITE PriorityTier=5 PreemptMode=REQUEUE GraceTime=20 State=UP
PartitionName=urgent Nodes={nodes} MaxTime=INFINITE PriorityTier=100 PreemptMode=OFF State=UP
"""

NAMES = ("rack-a1", "rack-a2", "rack-b07")
"""Host names. Slurm abbreviates them to rack-a[1-2],rack-b07."""

TOOLS = ("slurmctld", "slurmd", "munged", "mungekey", "sbatch")


def why_no_cluster() -> str | None:
    """Why no cluster can be started here; None if one can."""
    missing = [tool for tool in TOOLS if not shutil.which(tool, path=SYSTEM_PATH)]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)"
    return why_not()


class Cluster(Machines):
    """Machines with a Slurm controller on the first one and a Slurm daemon on each of the others."""

    def __init__(self, root: Path, nodes: int, cpus: int = 4) -> None:
        super().__init__(root, NAMES[:nodes])
        self.config = root / "slurm.conf"
        for folder in ("ctld", "munge", *(f"spool/{name}" for name in self.names)):
            (root / folder).mkdir(parents=True, exist_ok=True)
        root.chmod(0o755)
        (root / "munge").chmod(0o700)
        lines = [CONFIG.format(root=root, ctl=self.address("ctl"))]
        for name in self.names:
            lines.append(f"NodeName={name} NodeAddr={self.address(name)} CPUs={cpus} RealMemory=1000\n")
        (root / "mpi.conf").write_text(f"PMIxCliTmpDirBase={self.local}\n")
        self.config.write_text("".join(lines) + PARTITIONS.format(nodes=",".join(self.names)))

    @property
    def env(self) -> dict[str, str]:
        """Environment of all commands: the machines' own, and where Slurm's configuration is."""
        return super().env | {"SLURM_CONF": str(self.config), "KEEPSTEP_TEST_CLUSTER": str(self.root)}

    def up(self) -> "Cluster":
        """Start all daemons and wait until all nodes are idle; returns the cluster."""
        munge, socket = self.root / "munge", self.root / "run/munge.sock"
        key = ["mungekey", "--create", "--bits", "1024", "--keyfile", str(munge / "key")]
        subprocess.run(key, check=True, env=self.env)
        files = [f"--key-file={munge}/key", f"--log-file={munge}/log", f"--seed-file={munge}/seed"]
        files += [f"--pid-file={self.root}/run/munged.pid", f"--socket={socket}"]
        self.spawn(["munged", "-F", "-f", "--num-threads=10", *files], "munged.log")
        until(socket.exists, 60, "munged")
        self.power_on("ctl", self._controller())
        for name in self.names:
            self.boot(name)
        self.wait_idle()
        return self

    def _controller(self) -> list[str]:
        return ["slurmctld", "-D", "-f", str(self.config)]

    def boot(self, name: str) -> None:
        """Power on a machine and its Slurm daemon."""
        self.power_on(name, ["slurmd", "-D", "-f", str(self.config), "-N", name])

    def reconfigure(self, old: str, new: str) -> None:
        """Replace text in slurm.conf and make Slurm read it again."""
        self.config.write_text(self.config.read_text().replace(old, new))
        self.slurm("scontrol", "reconfigure")

    def wait_idle(self) -> None:
        """Wait until Slurm reports all nodes as idle."""
        until(lambda: set(self.states().values()) == {"idle"}, 120, "all nodes to be idle")

    def states(self) -> dict[str, str]:
        """State of each node, as sinfo reports it."""
        lines = self.slurm("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines) or {"no node": "unknown"}

    def slurm(self, *argv: str) -> str:
        """The output of a Slurm command, run on the controller's machine."""
        return self.run("ctl", argv).stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """Fields of `scontrol show job`; for an array, those of its first task."""
        text = self.slurm("scontrol", "-o", "show", "job", job).splitlines()
        return dict(word.split("=", 1) for word in text[0].split() if "=" in word) if text else {}

    def wait_job(self, job: str, states: Sequence[str], limit_seconds: float = 300) -> dict[str, str]:
        """Wait until the job is in one of the states; returns its fields. TimeoutError names the present state."""

        def reached() -> Any:
            fields = self.job(job)
            return fields if fields.get("JobState") in states else None

        try:
            return until(reached, limit_seconds, f"job {job} to be {' or '.join(states)}", pause_seconds=0.2)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it is {self.job(job)}") from None

    def daemon_pid(self, name: str) -> int:
        """Pid of a machine's slurmd, or of the controller's slurmctld, as this machine sees it."""
        daemon = "slurmctld" if name == self.hub else "slurmd"
        inside = int(self.run(name, ["pgrep", "-o", "-x", daemon]).stdout)
        for status in Path("/proc").glob("[0-9]*/status"):  # finds the pid outside from the pid inside the machine
            try:
                fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            except OSError:
                continue
            same_machine = Path(f"/proc/{self._pids[name]}/ns/net").readlink() == _net(status.parent)
            if same_machine and fields.get("NSpid", "").split()[-1:] == [str(inside)]:
                return int(status.parent.name)
        raise LookupError(f"no {daemon} on {name}")

    def kill_daemon(self, name: str) -> None:
        """Kill a machine's Slurm daemon with SIGKILL."""
        os.kill(self.daemon_pid(name), signal.SIGKILL)

    def start_daemon(self, name: str) -> None:
        """Start a machine's Slurm daemon again."""
        argv = self._controller() if name == self.hub else ["slurmd", "-D", "-f", str(self.config), "-N", name]
        self.spawn(self.on(name, argv), f"init-{name}.log")

    def down(self) -> None:
        """Kill all jobs and power off all machines."""
        for job in self.slurm("squeue", "-h", "-o", "%i").split():
            self.slurm("scancel", "--signal=KILL", "--full", job)
        time.sleep(0.2)
        self.close()


def _net(process: Path) -> Path | None:
    try:
        return (process / "ns/net").readlink()
    except OSError:
        return None
