"""Simulated machines on this one, each with its own host name, network address, hosts file and processes.

A machine is a set of Linux namespaces (network, host name, mounts, IPC, process ids). A bridge inside the first machine
connects them, so the real network gets no new interface. As on Debian, each machine resolves its own name to 127.0.1.1.
Needs root (CAP_SYS_ADMIN, CAP_NET_ADMIN), iproute2 and util-linux.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SUBNET = "10.77.0"
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

INIT = r"""
set -e
hostname "$1"
mount --bind "$2" /etc/hosts
mount -t tmpfs tmpfs "$3"
ip link set lo up
while [ ! -e "$4" ]; do sleep 0.02; done    # until the network is connected
shift 4
"$@" &
while :; do sleep 3600 & wait $!; done      # remain the init process and reap orphans
"""


def why_not() -> str | None:
    """Why machines cannot be created here; None if they can."""
    if os.getuid():
        return "needs root for network namespaces"
    probe = ["unshare", "--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc", "true"]
    missing = [tool for tool in ("unshare", "nsenter", "ip") if not shutil.which(tool, path=SYSTEM_PATH)]
    if missing:
        return f"needs {', '.join(missing)} (apt-get install iproute2 util-linux)"
    result = subprocess.run(probe, capture_output=True, text=True, check=False)
    return f"cannot create namespaces: {result.stderr.strip()}" if result.returncode else None


def until(condition: Callable[[], Any], limit_seconds: float, what: str, pause_seconds: float = 0.05) -> Any:
    """Wait until the condition gives a true value, and return it. TimeoutError names `what` was waited for."""
    deadline = time.monotonic() + limit_seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(pause_seconds)
    raise TimeoutError(f"timed out after {limit_seconds} s while waiting for {what}")


class Machines:
    """The machines. `hub` is the first one, with address .1; the others have addresses from .11 on."""

    def __init__(self, root: Path, names: Sequence[str], hub: str = "ctl") -> None:
        self.root, self.hub, self.names = root, hub, list(names)
        self._pids: dict[str, int] = {}
        self._children: list[subprocess.Popen[Any]] = []
        (root / "run").mkdir(parents=True, exist_ok=True)
        (root / "log").mkdir(exist_ok=True)
        self.local = root / "local"
        """A path that is a separate folder on each machine. All other paths are shared."""
        self.local.mkdir()
        for name in (hub, *names):
            lines = ["127.0.0.1 localhost", "::1 localhost", f"127.0.1.1 {name}"]
            lines += [f"{self.address(other)} {other}" for other in (hub, *names) if other != name]
            lines += [
                f"::ffff:{self.address(other)} {other}" for other in (hub, *names)
            ]  # for torch's reverse look-ups
            (root / f"hosts-{name}").write_text("\n".join(lines) + "\n")

    def address(self, name: str) -> str:
        """IPv4 address of a machine."""
        return f"{SUBNET}.1" if name == self.hub else f"{SUBNET}.{11 + self.names.index(name)}"

    @property
    def env(self) -> dict[str, str]:
        """Environment of commands, without variables of a cluster that this process itself runs in."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "PMI", "KEEPSTEP"))}
        tools = Path(sys.executable).parent  # this environment's programs, whether or not it is active
        return kept | {"PATH": f"{tools}:{kept['PATH']}:{SYSTEM_PATH}", "OMP_NUM_THREADS": "1"}

    def spawn(self, argv: Sequence[str], log: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a process on this machine, with its output in a file of the log folder."""
        with (self.root / "log" / log).open("ab") as output:
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(env or self.env),
                cwd="/",
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def power_on(self, name: str, argv: Sequence[str] = ("true",)) -> None:
        """Create a machine whose init process runs argv. Create the hub first."""
        plugged = self.root / "run" / f"plugged-{name}"
        plugged.unlink(missing_ok=True)
        flags = ["--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        files = [str(path) for path in (self.root / f"hosts-{name}", self.local, plugged)]
        init = ["bash", "-c", INIT, "init", name, *files, *argv]
        pid = self._pids[name] = self.spawn(["unshare", *flags, *init], f"init-{name}.log").pid
        own = Path("/proc/self/ns/net").readlink()
        until(lambda: Path(f"/proc/{pid}/ns/net").readlink() != own, 60, f"the namespaces of {name}")
        if name == self.hub:
            self._ip(name, "link", "add", "br0", "type", "bridge")
            self._ip(name, "addr", "add", f"{self.address(name)}/24", "dev", "br0")
            self._ip(name, "link", "set", "br0", "up")
        else:
            cable = f"to-{name}"
            self._ip(self.hub, "link", "del", cable, check=False)
            self._ip(self.hub, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
            self._ip(self.hub, "link", "set", cable, "master", "br0", "up")
            self._ip(name, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            self._ip(name, "link", "set", "eth0", "up")
        plugged.touch()

    def _ip(self, name: str, *argv: str, check: bool = True) -> None:
        enter = ["nsenter", "-t", str(self._pids[name]), "--net", "--", "ip"]
        subprocess.run([*enter, *argv], check=check, capture_output=True, env=self.env)

    def on(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs argv on a machine."""
        pid = self._pids[name]
        spaces = ["--net", "--uts", "--mount", "--ipc", f"--pid=/proc/{pid}/ns/pid_for_children"]
        return ["nsenter", "-t", str(pid), *spaces, f"--wdns={Path.cwd()}", "--", *argv]

    def run(self, name: str, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run argv on a machine and return its output. `options` are those of `subprocess.run`."""
        options = {"env": self.env, "capture_output": True, "text": True, "check": False, "timeout": 600} | options
        return subprocess.run(self.on(name, argv), **options)

    def power_off(self, name: str) -> None:
        """End a machine and all its processes, without any message to the others."""
        self.cut(name)
        os.kill(self._pids[name], signal.SIGKILL)

    def cut(self, name: str) -> None:
        """Disconnect a machine from the network."""
        self._ip(self.hub, "link", "set", f"to-{name}", "down")

    def reconnect(self, name: str) -> None:
        """Connect a machine to the network again."""
        self._ip(self.hub, "link", "set", f"to-{name}", "up")

    def close(self) -> None:
        """Power off all machines, the hub last."""
        for child in reversed(self._children):
            child.kill()
        for child in self._children:
            child.wait(timeout=20)


def processes_with(variable: str, value: str) -> dict[int, str]:
    """Command line of each live process, on any machine, that has the environment variable; by pid."""
    found = {}
    wanted = f"{variable}={value}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command:  # a zombie has none
                    found[int(folder.name)] = command
        except OSError:
            continue
    return found
