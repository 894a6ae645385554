"""The Kubernetes manifest of a recipe: a ConfigMap, a Secret, and a PyTorchJob of the Kubeflow operator.

One pod is one node. Each pod runs `keepstep run`, as each node of a Slurm job does; pod 0 (the operator's "Master") is
the head. A pod whose ranks failed (1) or were stopped (75) is restarted and the run resumes; codes 0 and 2 end the job.
"""

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from data_pipeline.credentials import redact
from launch.clusters.options import check_text
from launch.supervise.secret import VARIABLE, new_secret
from parallel.errors import LaunchError
from train.config import Recipe
from train.exit_codes import FAILED, STOPPED

PORT = 29400
"""Port of the rendezvous on pod 0."""
SECRET_KEY = "job-secret"  # noqa: S105 - the name of a key
SHARED = "/shared"
"""Mount point of the volume that all pods share, with recipes, data and runs."""

START = """\
# One node of the run. The operator numbers the pods, torchrun numbers the ranks.
node=${{RANK:-0}}
head=${{MASTER_ADDR:-localhost}}
[[ $node == 0 ]] && head=$(hostname -i | cut -d' ' -f1)
[[ $head == *:* ]] && head="[$head]"
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT "${{!PET_@}}"
{command} --ranks {ranks} --nodes {nodes} --node-rank "$node" --head "$head:{port}" &
trap 'kill -TERM $!' TERM
while wait $!; code=$?; kill -0 $! 2>/dev/null; do :; done
case $code in
  {again}) exit 200 ;; # failed, or stopped and saved: restart the pod
  *) exit "$code" ;;  # finished, or failed for good
esac
"""
"""The script of a pod. A code above 127 makes the operator restart the pod (`restartPolicy: ExitCode`)."""

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""Names that Kubernetes accepts everywhere (RFC 1123 labels)."""
QUANTITY = re.compile(r"[1-9]\d*(Ki|Mi|Gi|Ti|k|M|G|T)?")
OBJECT_NAME_LENGTH = 45
"""The operator appends `-worker-N` and Kubernetes more; a label has 63 characters at most."""
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True)
class Pods:
    """What every pod of the job needs; the options of `keepstep kubernetes`."""

    image: str
    claim: str
    gpus: int
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    rdma: Mapping[str, str] = field(default_factory=dict[str, str])
    """Resources of RDMA devices and their number, such as rdma/hca_shared_devices_a: 1."""
    ipc_lock: bool = False
    """Whether pods may pin memory, as RDMA needs. With `rdma` they always may."""
    shared_memory: str = ""
    """Limit of /dev/shm, such as 64Gi; "": half of the node's memory, as the kernel decides."""
    requests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Requested quantities, such as cpu: 32 and memory: 200Gi."""
    tolerations: Sequence[str] = ()
    """Taints to tolerate: KEY, KEY=VALUE, KEY:EFFECT or KEY=VALUE:EFFECT."""
    pull_secrets: Sequence[str] = ()


def check_job(recipe: Recipe, nodes: int, gpus: int) -> None:
    """Raise LaunchError if the numbers are wrong, or if a path of the recipe is not shared by all pods."""
    if nodes < 1 or gpus < 0:
        raise LaunchError(f"--nodes ({nodes}) must be at least 1 and --gpus ({gpus}) at least 0")
    for setting, path in (("runs_dir", recipe.runs_dir), *(("data.sources", s.path) for s in recipe.data.sources)):
        if not str(path).startswith(SHARED + "/") and "://" not in str(path):
            raise LaunchError(
                f"{setting} ({path}) must be below {SHARED}/, which all pods share, or in an object store; set it to "
                f"{SHARED}/..."
            )


def check_recipe(text: str) -> str:
    """Return the text of a recipe. LaunchError if it has a password, which the manifest would show to everyone."""
    if redact(text) != text:
        raise LaunchError(
            "the recipe has a password in an address, which the manifest would show; name an environment variable in "
            "its place ($NAME), and hand that to the pods"
        )
    return text


def pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Return the values of `NAME=VALUE` texts by name. LaunchError if one does not read so."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        check_text(option, text)
        if not name or not equals or (not value and option != "--env"):
            raise LaunchError(f"{option} {text} must read NAME=VALUE")
        found[name] = value
    return found


def check_names(**names: str) -> None:
    """Raise LaunchError for an option whose value is no name in Kubernetes."""
    for option, name in names.items():
        if not NAME.fullmatch(name):
            raise LaunchError(
                f"--{option.replace('_', '-')} ({name}) is no name in Kubernetes: at most 63 lower case letters, "
                "digits and dashes, with a letter or digit at both ends"
            )


def manifest(
    *, name: str, namespace: str, pods: Pods, nodes: int, recipe: str, arguments: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the ConfigMap with recipe and start script, the Secret with which pods sign messages, and the PyTorchJob.

    `arguments` follow the recipe in the command of each pod."""
    metadata = {"name": name, "namespace": namespace}
    replicas = {"Master": _replica(name, pods, 1)}
    if nodes > 1:
        replicas["Worker"] = _replica(name, pods, nodes - 1)
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {"runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 20}, "pytorchReplicaSpecs": replicas},
    }
    start = START.format(
        command=shlex.join(["keepstep", "run", "/job/recipe.yaml", *arguments]),
        ranks=max(pods.gpus, 1),
        nodes=nodes,
        port=PORT,
        again=f"{FAILED} | {STOPPED}",
    )
    readable = "".join(f"{line.rstrip()}\n" for line in recipe.splitlines())  # YAML escapes spaces at the end of a line
    data = {"recipe.yaml": readable, "start.sh": start}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {SECRET_KEY: new_secret()}}
    return [config, secret, job]


def _container(name: str, pods: Pods) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator requires this name
        "image": check_text("--image", pods.image),
        "command": ["bash", "/job/start.sh"],
        "workingDir": SHARED,
        "ports": [{"name": "pytorchjob-port", "containerPort": PORT}],
        "volumeMounts": [
            {"name": "shared", "mountPath": SHARED},
            {"name": "job", "mountPath": "/job"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    reference = {"secretKeyRef": {"name": name, "key": SECRET_KEY}}
    plain = [{"name": variable, "value": value} for variable, value in pods.env.items()]
    container["env"] = [*plain, {"name": VARIABLE, "valueFrom": reference}]
    limits = ({"nvidia.com/gpu": str(pods.gpus)} if pods.gpus else {}) | dict(pods.rdma)
    if resources := {name: dict(given) for name, given in (("limits", limits), ("requests", pods.requests)) if given}:
        container["resources"] = resources
    if pods.rdma or pods.ipc_lock:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # RDMA pins memory
    return container


def _shared_memory(pods: Pods) -> dict[str, str]:
    limit = pods.shared_memory
    if limit and not QUANTITY.fullmatch(limit):
        raise LaunchError(f"--shared-memory {limit} must be a size of Kubernetes, such as 64Gi")
    return {"medium": "Memory"} | ({"sizeLimit": limit} if limit else {})


def _toleration(text: str) -> dict[str, str]:
    taint, colon, effect = check_text("--toleration", text).partition(":")
    key, equals, value = taint.partition("=")
    if not key or (colon and effect not in EFFECTS):
        raise LaunchError(f"--toleration {text} must read KEY[=VALUE][:EFFECT], with an effect of {', '.join(EFFECTS)}")
    found = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return found | ({"effect": effect} if effect else {})


def _replica(name: str, pods: Pods, replicas: int) -> dict[str, Any]:
    """Return the specification of the pods of one kind."""
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": pods.claim}},
        {"name": "job", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": _shared_memory(pods)},  # the default of 64 MiB is too small for NCCL
    ]
    spec: dict[str, Any] = {
        "terminationGracePeriodSeconds": 180,  # time to save after TERM
        "containers": [_container(name, pods)],
        "volumes": volumes,
    }
    if pods.tolerations:
        spec["tolerations"] = [_toleration(text) for text in pods.tolerations]
    if pods.pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in pods.pull_secrets]
    return {
        "replicas": replicas,
        "restartPolicy": "ExitCode",  # up to 127: the pod has ended; above: restart it
        "template": {"spec": spec},
    }


def object_name(name: str) -> str:
    """Return `name` as a Kubernetes name: lower case letters, digits and dashes, a letter first.

    A name that had to be changed gets a hash, so that no two names become one."""
    valid = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    valid = valid if valid[:1].isalpha() else f"run-{valid}".strip("-")
    if valid == name and len(valid) <= OBJECT_NAME_LENGTH:
        return valid
    ending = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{valid[: OBJECT_NAME_LENGTH - 7].strip('-')}-{ending}"
