"""`keepstep kubernetes`: the manifest that trains a recipe on Kubernetes, as a PyTorchJob of the Kubeflow operator.

    keepstep kubernetes recipes/llama-8b.yaml --nodes 4 --gpus 8 --image IMAGE --claim VOLUME > job.yaml
    kubectl apply -f job.yaml

One pod is one node. Each pod runs `keepstep run`, as a Slurm job's nodes do; pod 0 (the operator's "Master") is the
head. A pod whose ranks failed (1) or were told to stop (75) is started again and the run resumes; 0 and 2 end the job.
"""

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel.errors import LaunchError
from train.config_file import load_recipe

PORT = 29400
SHARED = "/shared"
"""Where the volume that all pods share is mounted: recipes, data and runs lie there."""


START = """\
# One node of the run. The operator numbers pods; ranks are numbered by torchrun.
node=${{RANK:-0}}
head=${{MASTER_ADDR:-localhost}}
[[ $node == 0 ]] && head=$(hostname -i | cut -d' ' -f1)
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT "${{!PET_@}}"
{command} --ranks RANKS --nodes {nodes} --node-rank "$node" --head "$head:29400" &
trap 'kill -TERM $!' TERM
while wait $!; code=$?; kill -0 $! 2>/dev/null; do :; done
case $code in
  1 | 75) exit 200 ;; # failed, or stopped and saved: start the pod again
  *) exit "$code" ;;  # finished, or failed for good
esac
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="the recipe's YAML file; its text goes into the manifest")
    parser.add_argument("overrides", nargs="*", help="settings that replace the recipe's, such as train.steps=200")
    parser.add_argument("--nodes", type=int, default=1, help="pods")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs, and so ranks, of a pod; 0: one CPU rank")
    parser.add_argument("--image", required=True, help="a container image with keepstep, as slurm/Dockerfile makes it")
    parser.add_argument("--claim", required=True, help=f"PersistentVolumeClaim, shared by all pods, seen at {SHARED}")
    parser.add_argument("--namespace", default="default")


def run(options: argparse.Namespace) -> int:
    import yaml

    if options.nodes < 1 or options.gpus < 0:
        raise LaunchError(f"--nodes ({options.nodes}) must be at least 1 and --gpus ({options.gpus}) at least 0")
    recipe = load_recipe(options.recipe, options.overrides)
    for setting, path in (("runs_dir", recipe.runs_dir), *(("data.sources", s.path) for s in recipe.data.sources)):
        if not str(path).startswith(SHARED + "/") and "://" not in str(path):
            raise LaunchError(
                f"{setting} ({path}) must lie below {SHARED}/, which all pods share; or in an object store"
            )
    documents = manifest(
        name=object_name(recipe.name),
        namespace=options.namespace,
        image=options.image,
        claim=options.claim,
        nodes=options.nodes,
        gpus=options.gpus,
        recipe=Path(options.recipe).read_text(encoding="utf-8"),
        overrides=options.overrides,
    )
    print(yaml.safe_dump_all(documents, sort_keys=False), end="")
    return 0


def manifest(
    *,
    name: str,
    namespace: str,
    image: str,
    claim: str,
    nodes: int,
    gpus: int,
    recipe: str,
    overrides: Sequence[str],
) -> list[dict[str, Any]]:
    """A ConfigMap with the recipe, and the PyTorchJob."""
    metadata = {"name": name, "namespace": namespace}
    replicas = {"Master": _replica(name, image, claim, gpus, 1)}
    if nodes > 1:
        replicas["Worker"] = _replica(name, image, claim, gpus, nodes - 1)
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {"runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 20}, "pytorchReplicaSpecs": replicas},
    }
    start = START.format(command=shlex.join([*("keepstep", "run", "/job/recipe.yaml"), *overrides]), nodes=nodes)
    data = {"recipe.yaml": recipe, "start.sh": start.replace("RANKS", str(max(gpus, 1)))}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}, job]


def _replica(name: str, image: str, claim: str, gpus: int, replicas: int) -> dict[str, Any]:
    """Pods of one kind."""
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator looks for this name
        "image": image,
        "command": ["bash", "/job/start.sh"],
        "workingDir": SHARED,
        "ports": [{"name": "pytorchjob-port", "containerPort": PORT}],
        "volumeMounts": [
            {"name": "shared", "mountPath": SHARED},
            {"name": "job", "mountPath": "/job"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "job", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # the default of 64 MiB is too small for NCCL
    ]
    return {
        "replicas": replicas,
        "restartPolicy": "ExitCode",  # up to 127: for good; above: again
        "template": {
            "spec": {
                "terminationGracePeriodSeconds": 180,  # to save after TERM
                "containers": [container],
                "volumes": volumes,
            }
        },
    }


def object_name(name: str) -> str:
    """A Kubernetes name: lower case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50]
