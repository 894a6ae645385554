"""Each rule recognises its own messages, and the action follows the rule, the exit code and the progress."""

import re

import pytest

from launch.diagnose.evidence import Evidence, Line
from launch.diagnose.rule import Action, Level, Rule
from launch.diagnose.rules.table import BY_NAME, RULES
from launch.diagnose.verdict import decide, diagnose

EXAMPLES = {
    "cancelled": "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-03-01T14:05:09 ***",
    "stop-requested": "event stopped: STOP file",
    "interrupted-by-user": "event stopped: SIGINT",
    "preempted": "slurmstepd: error: *** STEP 12.1 ON n1 CANCELLED AT 2026-03-01T14:05:09 DUE TO PREEMPTION ***",
    "time-limit": "slurmstepd: error: *** STEP 12.1 ON n1 CANCELLED AT 2026-03-01T14:05:09 DUE TO TIME LIMIT ***",
    "terminated": "event stopped: SIGTERM",
    "kernel-out-of-memory": "srun: error: n7: task 3: Out Of Memory",
    "lost-node": "srun: error: Node failure on n7",
    "device-error": "NVRM: Xid (PCI:0000:3b:00): 94, Contained: SM (0x1).",
    "driver-or-library-mismatch": "ImportError: /venv/libtorch_cuda.so: undefined symbol: ncclCommWindowRegister",
    "module-missing": "ModuleNotFoundError: No module named 'torch'",
    "device-assert": "RuntimeError: CUDA error: device-side assert triggered",
    "device-memory-error": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
    "sigbus": "signal SIGBUS: step 7",
    "crashed": "signal SIGSEGV: step 7",
    "killed": "signal SIGKILL: step 7",
    "collective-time-out": "RuntimeError: Timed out waiting 1800000ms for send operation to complete",
    "lost-peer": "torch.distributed.DistBackendError: NCCL error: ncclRemoteError: a remote process exited",
    "not-finite": "exit code 2: the run has diverged: bad step 3 (loss nan and gradient norm nan must be finite), more",
    "device-memory": "exit code 3: memory ran out (CUDA out of memory)",
    "device-memory-later": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
    "read-only-disk": "exit code 1: [Errno 30] Read-only file system: 'runs/x/checkpoints'",
    "disk-was-full": "exit code 1: [Errno 28] No space left on device: 'runs/x'",
    "save-failed": "event save_failed: [Errno 5] Input/output error",
    "blocks-quarantined": "event blocks_quarantined: ",
    "unhealthy-node": "unhealthy n7: 3 GiB of memory are free",
    "refused": "exit code 2: model.dropout must be below 1",
    "unknown-error": "exit code 1: list index out of range",
}
"""A line of each rule that has no message of Keepstep."""
IN_JOB_LOG = {
    "gpu-memory-faulty": "unhealthy n7: GPU 3 has 9 uncorrected memory errors",
    "slow-links": "unhealthy n7: exchanges with its neighbours run at 1.00 GB/s, 9.00 between the others",
    "wrong-products": "unhealthy n7: cuda multiplies wrongly (1 instead of 2)",
    "unhealthy-node": "unhealthy n7: 3 GiB of memory are free",
}
"""What the health check says; the whole line counts."""
JUDGED = [rule for rule in RULES if rule.level not in (Level.MANUAL, Level.STATE)]
NO_LINE = {"interrupted", "unknown"}


def examples(rule: Rule) -> list[str]:
    if rule.name in IN_JOB_LOG:
        return [IN_JOB_LOG[rule.name]]
    messages = [message.replace("...", "7") for message in rule.sees]
    return [*messages, *([EXAMPLES[rule.name]] if rule.name in EXAMPLES else [])]


def test_each_rule_has_an_example_or_looks_at_numbers() -> None:
    assert {rule.name for rule in JUDGED if not examples(rule) and not rule.test} == NO_LINE
    assert len(BY_NAME) == len(RULES), "names are unique"


@pytest.mark.parametrize(
    ("rule", "text"), [pytest.param(rule, text, id=rule.name) for rule in JUDGED for text in examples(rule)]
)
def test_a_rule_is_the_verdict_on_its_own_message(rule: Rule, text: str) -> None:
    healthy = rule.level in (Level.SICK, Level.WARNING)
    free = 1 << 50 if rule.name == "disk-was-full" else None
    line = Line(text, 1.0, 3, "n7", is_error=rule.level in (Level.FAULT, Level.UNEXPLAINED))
    found = diagnose(Evidence(state="running" if healthy else "failed", lines=[line], free_bytes=free, world_size=9))
    assert found.rule == rule.name
    assert found.remedy == rule.remedy


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.level is Level.FAULT], ids=lambda rule: rule.name)
def test_a_warning_with_the_words_of_a_fault_is_none(rule: Rule) -> None:
    for text in examples(rule):
        said = re.sub(r"^(exit code \d|[\w.]+Error): ", "the data loader says: ", text)
        found = diagnose(Evidence(state="failed", lines=[Line(said, 1.0, 3, "n7")]))
        assert found.rule == "unknown", said


RESTARTS = [rule for rule in RULES if rule.action is Action.RESTART]


@pytest.mark.parametrize("rule", RESTARTS, ids=lambda rule: rule.name)
def test_a_restart_needs_progress_or_a_cause_outside(rule: Rule) -> None:
    for state in ("failed", "interrupted"):
        assert decide(rule, Evidence(state=state), progress=True)[0] is Action.RESTART
        first = decide(rule, Evidence(state=state, starts_without_save=1), progress=False)[0]
        assert (first is Action.RESTART) == rule.external
        assert decide(rule, Evidence(state=state, starts_without_save=2), progress=False)[0] is Action.STOP


@pytest.mark.parametrize("code", [2, 3])
@pytest.mark.parametrize("rule", RESTARTS, ids=lambda rule: rule.name)
def test_a_failure_for_good_is_never_restarted(rule: Rule, code: int) -> None:
    failed = Line(f"exit code {code}: something", 1.0, 0, is_error=True)
    assert decide(rule, Evidence(state="failed", lines=[failed]), progress=True)[0] is Action.STOP


def test_the_cause_comes_before_its_consequences() -> None:
    lines = [
        Line("RuntimeError: Connection closed by peer", 1.0, 1, "n1"),
        Line("all ranks exit", 2.0, 2, "n1"),
        Line("exit code 1: list index out of range", 3.0, 3, "n1", is_error=True),
    ]
    assert [diagnose(Evidence(state="failed", lines=lines[:count])).rule for count in (1, 2, 3)] == [
        "lost-peer",
        "hang",
        "hang",
    ]
    fault = Line("exit code 1: memory ran out", 9.0, 4, "n2", is_error=True)
    found = diagnose(Evidence(state="failed", lines=[*lines, fault], progress=True))
    assert (found.rule, found.rank, found.node) == ("memory", 4, "n2")
    node = Line("node 5 (n5) has not answered for 20 s", 10.0)
    found = diagnose(Evidence(state="failed", lines=[*lines, fault, node], progress=True))
    assert (found.rule, found.rank, found.node) == ("lost-node", None, "n5")


def test_the_recipe_is_compared_with_what_is_usual() -> None:
    recipe = {
        "model": {"n_layers": "32", "d_model": "4096", "vocab_size": "32000"},
        "optim": {"lr": "3e-3", "warmup_steps": "0", "max_grad_norm": "100"},
        "parallel": {"precision": "fp8"},
    }
    skipped = {"time": 1.0, "kind": "skipped", "data_step": 41, "why": "loss nan"}
    line = Line(EXAMPLES["not-finite"], 1.0, 0, is_error=True)
    found = diagnose(Evidence(state="failed", lines=[line], recipe=recipe, events=[skipped]))
    assert [hint.split(" ")[0] for hint in found.hints] == [
        "optim.lr",
        "optim.warmup_steps",
        "optim.max_grad_norm",
        "parallel.precision",
        "the",
    ]
    assert "0.0001 is usual for 6.6e+09 parameters" in found.hints[0]
    assert found.hints[-1].endswith("`keepstep data trace RUN --data-step 41`")
    usual = {"optim": {"lr": "2e-4", "warmup_steps": "2000", "max_grad_norm": "1.0"}}
    assert not diagnose(Evidence(state="failed", lines=[line], recipe=recipe | usual | {"parallel": {}})).hints
