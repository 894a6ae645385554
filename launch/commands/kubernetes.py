"""`keepstep kubernetes`: print the manifest that trains a recipe on Kubernetes (`launch/clusters/kubernetes.py`)."""

import argparse
from pathlib import Path
from typing import Any

from launch.clusters.checks import check_ranks
from launch.clusters.kubernetes import SHARED, Pods, check_job, check_names, check_recipe, manifest, object_name, pairs
from launch.numbers import whole
from train.config_file import load_recipe
from train.recipe.yaml_text import read_text
from train.run_folder import MAY_DIFFER

EXAMPLE = """\
example:
  keepstep kubernetes recipes/llama-8b.yaml --nodes 4 --gpus 8 --image IMAGE --claim VOLUME | kubectl apply -f -
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `keepstep kubernetes`."""
    parser.epilog = EXAMPLE
    parser.add_argument("recipe", type=Path, help="YAML file of the recipe; the manifest contains its text")
    parser.add_argument("overrides", nargs="*", help="settings that replace the recipe's, such as train.steps=200")
    parser.add_argument("--nodes", type=whole("--nodes", 1), default=1, help="pods (default: 1)")
    parser.add_argument(
        "--gpus", type=whole("--gpus", 0), default=8, help="GPUs and ranks of a pod; 0: one CPU rank (default: 8)"
    )
    parser.add_argument("--image", required=True, help="container image with keepstep, built from slurm/Dockerfile")
    parser.add_argument("--claim", required=True, help=f"PersistentVolumeClaim that all pods mount at {SHARED}")
    parser.add_argument("--namespace", default="default", help="Kubernetes namespace (default: default)")
    for option, metavar, words in (
        ("--env", "NAME=VALUE", "environment variable of the pods, such as NCCL_IB_HCA=mlx5; repeatable"),
        ("--rdma", "RESOURCE=N", "RDMA devices of a pod, such as rdma/hca_shared_devices_a=1; repeatable"),
        ("--request", "NAME=QUANTITY", "resource that a pod requests, such as cpu=32 or memory=200Gi; repeatable"),
        ("--toleration", "KEY[=VALUE][:EFFECT]", "taint of nodes that the pods tolerate; repeatable"),
        ("--pull-secret", "NAME", "secret with which the image is pulled; repeatable"),
    ):
        parser.add_argument(option, action="append", default=[], metavar=metavar, help=words)
    parser.add_argument("--ipc-lock", action="store_true", help="let pods pin memory (IPC_LOCK); --rdma implies it")
    parser.add_argument("--shared-memory", default="", metavar="SIZE", help="limit of /dev/shm in a pod, such as 64Gi")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        choices=MAY_DIFFER,
        help="accept that this part of the recipe differs from the checkpoint's",
    )


def run(options: argparse.Namespace) -> int:
    """Print the manifest as YAML."""
    import yaml

    recipe = load_recipe(options.recipe, options.overrides)
    check_job(recipe, options.nodes, options.gpus)
    check_ranks(recipe, max(options.gpus, 1), range(options.nodes, options.nodes + 1))
    check_names(namespace=options.namespace, claim=options.claim)
    for secret in options.pull_secret:
        check_names(pull_secret=secret)
    pods = Pods(
        image=options.image,
        claim=options.claim,
        gpus=options.gpus,
        env=pairs("--env", options.env),
        rdma=pairs("--rdma", options.rdma),
        ipc_lock=options.ipc_lock,
        shared_memory=options.shared_memory,
        requests=pairs("--request", options.request),
        tolerations=options.toleration,
        pull_secrets=options.pull_secret,
    )
    documents = manifest(
        name=object_name(recipe.name),
        namespace=options.namespace,
        pods=pods,
        nodes=options.nodes,
        recipe=check_recipe(read_text(options.recipe)),
        arguments=[*options.overrides, *(f"--allow={name}" for name in options.allow)],
    )

    class Dumper(yaml.SafeDumper):
        """Writes texts of several lines as they are, so that people can read the recipe."""

    def write_text(dumper: Dumper, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)  # pyright: ignore[reportUnknownMemberType]

    Dumper.add_representer(str, write_text)
    print(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True), end="")
    return 0
