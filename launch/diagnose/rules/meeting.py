"""Rules for ranks that do not find each other."""

from functools import partial

from launch.diagnose.rule import Action, Level, Rule

_rule = partial(Rule, section="Ranks do not find each other", level=Level.FAULT, action=Action.STOP)

RULES = (
    _rule(
        name="rank-variables-left",
        sees=("is set ... but RANK is not",),
        cause="variables of another program are left in the shell",
        remedy="`unset WORLD_SIZE LOCAL_RANK`",
    ),
    _rule(
        name="variables-contradict",
        sees=("contradicts",),
        cause="two launchers' variables disagree",
        remedy="unset the one that was left over",
    ),
    _rule(
        name="not-under-srun",
        sees=("tasks, but this process was started without srun",),
        cause="a batch script started Python directly",
        remedy="put `srun` before it",
    ),
    _rule(
        name="two-mpi-libraries",
        sees=("belong to different MPI libraries",),
        cause="`mpirun` is not of mpi4py's library",
        remedy="use its `mpirun`, or torchrun",
    ),
    _rule(
        name="head-does-not-answer",
        sees=("node 0 does not answer at ...",),
        cause="node 0 is not started, or the port is blocked",
        remedy="start it with `--node-rank 0`; open the port",
    ),
    _rule(
        name="port-taken",
        sees=("where node 0 must listen, is taken", "where node 0 listens, is taken"),
        signs=(r"EADDRINUSE|[Aa]ddress already in use",),
        cause="another program uses the port",
        remedy="another port in `--head`, on all nodes",
    ),
    _rule(
        name="head-is-loopback",
        sees=("itself, where other nodes cannot reach it",),
        cause="the head's name resolves to a loopback address",
        remedy="give its address in `--head`",
    ),
    _rule(
        name="loopback-interface",
        sees=("names the loopback interface, but the ... ranks are on several machines",),
        cause="`GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` is `lo` in your shell",
        remedy="`unset GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME`",
    ),
    _rule(
        name="nodes-missing",
        action=Action.RESTART,
        sees=("nodes came to the rendezvous at",),
        cause="a node did not come to the rendezvous",
        remedy="start the nodes that the next line names, and check that they reach the address",
    ),
    _rule(
        name="no-connection-to-rank-0",
        sees=("could not connect to the other ranks at",),
        cause="rank 0 runs elsewhere, or a firewall is between",
        remedy="`keepstep doctor --cluster` under srun",
    ),
    _rule(
        name="no-secret",
        level=Level.WARNING,
        action=Action.CONTINUE,
        sees=("is not set, so the nodes' messages are not authenticated",),
        cause="the nodes of the run share no secret",
        remedy="nothing on a private network, else set `KEEPSTEP_JOB_SECRET` "
        "([who can reach a run](launching.md#who-can-reach-a-run))",
    ),
    _rule(
        name="foreign-datagram",
        level=Level.WARNING,
        action=Action.CONTINUE,
        sees=("ignored a datagram from",),
        cause="a program outside the job wrote to its port, or the nodes have different secrets",
        remedy="if nodes are missing, set the same `KEEPSTEP_JOB_SECRET` on all; else look at that address",
    ),
    _rule(
        name="foreign-rendezvous-state",
        level=Level.WARNING,
        action=Action.CONTINUE,
        sees=("ignored a state of the rendezvous",),
        cause="a program outside the job wrote to the port of its rendezvous, or the nodes have different secrets",
        remedy="if nodes are missing, set the same `KEEPSTEP_JOB_SECRET` on all; else look at that address",
    ),
    _rule(
        name="datagram-flood",
        level=Level.WARNING,
        action=Action.CONTINUE,
        sees=("a flood of datagrams at UDP port",),
        cause="a program sends more than all nodes could",
        remedy="nothing for the run; while it lasts, a lost node is not noticed by its silence",
    ),
    _rule(
        name="lease-locked",
        sees=("is locked by",),
        cause="another process holds the lock of the lease",
        remedy="end the process that the message names",
    ),
)
"""The documentation keeps this order."""
