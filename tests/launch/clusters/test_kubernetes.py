"""The manifest is valid for the operator, and its start script runs without Kubernetes."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from launch import cli
from launch.clusters.kubernetes import object_name


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    wanted = list(required or properties)
    return {"type": "object", "properties": properties, "required": wanted, "additionalProperties": False}


TEXT, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
METADATA = closed({"name": NAME, "namespace": NAME})
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": "^[1-9][0-9]*(Gi|Mi|m)?$"}}
KINDS = ["limits", "requests"]
CONTAINER = closed(
    {
        "name": {"const": "pytorch"},
        "image": TEXT,
        "command": {"type": "array", "items": TEXT},
        "workingDir": TEXT,
        "ports": {"type": "array", "items": closed({"name": {**NAME, "maxLength": 15}, "containerPort": COUNT})},
        "env": {
            "type": "array",
            "items": closed(
                {
                    "name": TEXT,
                    "value": {"type": "string"},
                    "valueFrom": closed({"secretKeyRef": closed({"name": NAME, "key": TEXT})}),
                },
                "name",
            ),
        },
        "resources": {"type": "object", "additionalProperties": QUANTITIES, "propertyNames": {"enum": KINDS}},
        "securityContext": closed({"capabilities": closed({"add": {"type": "array", "items": TEXT}})}),
        "volumeMounts": {"type": "array", "items": closed({"name": NAME, "mountPath": TEXT})},
    },
    "name",
    "image",
    "command",
    "volumeMounts",
)
VOLUME = closed(
    {
        "name": NAME,
        "persistentVolumeClaim": closed({"claimName": NAME}),
        "configMap": closed({"name": NAME}),
        "emptyDir": closed({"medium": {"const": "Memory"}, "sizeLimit": TEXT}, "medium"),
    },
    "name",
) | {"minProperties": 2, "maxProperties": 2}
POD = closed(
    {
        "terminationGracePeriodSeconds": COUNT,
        "containers": {"type": "array", "items": CONTAINER, "minItems": 1},
        "volumes": {"type": "array", "items": VOLUME},
        "tolerations": {
            "type": "array",
            "items": closed({"key": TEXT, "operator": TEXT, "value": TEXT, "effect": TEXT}, "key", "operator"),
        },
        "imagePullSecrets": {"type": "array", "items": closed({"name": NAME})},
    },
    "terminationGracePeriodSeconds",
    "containers",
    "volumes",
)
REPLICA = closed(
    {
        "replicas": COUNT,
        "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
        "template": closed({"spec": POD}),
    }
)
POLICY = closed({"cleanPodPolicy": {"enum": ["All", "Running", "None"]}, "backoffLimit": COUNT})
JOB = closed(
    {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": METADATA,
        "spec": closed(
            {"runPolicy": POLICY, "pytorchReplicaSpecs": closed({"Master": REPLICA, "Worker": REPLICA}, "Master")}
        ),
    }
)

SECRET = closed(
    {
        "apiVersion": {"const": "v1"},
        "kind": {"const": "Secret"},
        "metadata": METADATA,
        "stringData": closed({"job-secret": {"type": "string", "pattern": "^[0-9a-f]{64}$"}}),
    }
)


def as_the_operator_reads_it(job: dict[str, Any]) -> Any:
    """Pass the job through the models that Kubeflow generates from its definition of PyTorchJob.

    They drop unknown fields, and refuse missing ones and wrong types."""
    from kubeflow.training import ApiClient

    client = ApiClient()
    response = types.SimpleNamespace(data=json.dumps(job))
    return client.sanitize_for_serialization(client.deserialize(response, "KubeflowOrgV1PyTorchJob"))


OPTIONS = ["--image", "site/keepstep:1", "--claim", "data"]
PATHS = ["runs_dir=/shared/runs", "data.sources.0.path=/shared/data", "train.global_batch_size=128"]


def documents(capsys, *options: str) -> list[dict[str, Any]]:
    assert cli.main(["kubernetes", "recipes/laptop.yaml", *PATHS, *OPTIONS, *options]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 0), (1, 8), (4, 8)])
def test_the_manifest_is_a_valid_pytorchjob(capsys, nodes, gpus):
    config, secret, job = documents(capsys, "--nodes", str(nodes), "--gpus", str(gpus))
    jsonschema.validate(secret, SECRET)
    jsonschema.validate(job, JOB)
    assert as_the_operator_reads_it(job) == job
    assert config["data"]["recipe.yaml"] == Path("recipes/laptop.yaml").read_text()
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert sum(replica["replicas"] for replica in replicas.values()) == nodes
    mounted = {mount["name"] for mount in replicas["Master"]["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in replicas["Master"]["template"]["spec"]["volumes"]}


def test_pods_get_a_new_secret_by_reference(capsys):
    _, secret, job = documents(capsys, "--nodes", "2")
    text = secret["stringData"]["job-secret"]
    assert documents(capsys)[1]["stringData"]["job-secret"] != text
    assert text not in json.dumps(job)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        (variable,) = replica["template"]["spec"]["containers"][0]["env"]
        reference = {"name": secret["metadata"]["name"], "key": "job-secret"}
        assert variable == {"name": "KEEPSTEP_JOB_SECRET", "valueFrom": {"secretKeyRef": reference}}


def test_a_field_that_the_operator_does_not_know_is_noticed(capsys):
    *_, job = documents(capsys)
    job["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicies"] = "ExitCode"
    assert as_the_operator_reads_it(job) != job
    del job["spec"]["pytorchReplicaSpecs"]
    with pytest.raises(ValueError, match="`pytorch_replica_specs`, must not be `None`"):
        as_the_operator_reads_it(job)


@pytest.mark.parametrize(("code", "pod"), [(0, 0), (1, 200), (2, 2), (75, 200)])
def test_the_start_script_passes_what_the_operator_sets_and_maps_exit_codes(tmp_path, capsys, code, pod):
    config, *_ = documents(capsys, "--nodes", "4")
    (tmp_path / "start.sh").write_text(config["data"]["start.sh"])
    fake = tmp_path / "keepstep"
    fake.write_text(f'#!/bin/bash\necho "$@" rank=${{RANK-none}} > {tmp_path}/called\nexit {code}\n')
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0"}
    assert subprocess.run(["bash", str(tmp_path / "start.sh")], env=env, check=False).returncode == pod
    expected = f"run /job/recipe.yaml {' '.join(PATHS)} --ranks 8 --nodes 4 --node-rank 3 --head job-master-0:29400"
    assert (tmp_path / "called").read_text() == f"{expected} rank=none\n"


def test_the_start_script_is_clean(capsys):
    config, *_ = documents(capsys)
    tool = str(Path(sys.executable).with_name("shellcheck"))
    script = config["data"]["start.sh"]
    result = subprocess.run([tool, "--shell=bash", "-"], input=script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_a_path_that_pods_do_not_share_is_refused(capsys):
    assert cli.main(["kubernetes", "recipes/laptop.yaml", "runs_dir=runs", *OPTIONS]) == 2
    assert "runs_dir (runs) must be below /shared/, which all pods share" in capsys.readouterr().err


NEEDS = [
    *("--env", "NCCL_IB_HCA=mlx5", "--env", "EMPTY=", "--rdma", "rdma/hca_shared_devices_a=1"),
    *("--request", "cpu=32", "--request", "memory=200Gi", "--pull-secret", "registry"),
    *("--toleration", "gpu", "--toleration", "team=nlp:NoSchedule", "--allow", "schedule"),
]


def test_pods_get_what_the_cluster_asks_for(capsys):
    config, _, job = documents(capsys, *NEEDS)
    jsonschema.validate(job, JOB)
    assert as_the_operator_reads_it(job) == job
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["env"][:2] == [{"name": "NCCL_IB_HCA", "value": "mlx5"}, {"name": "EMPTY", "value": ""}]
    assert container["resources"] == {
        "limits": {"nvidia.com/gpu": "8", "rdma/hca_shared_devices_a": "1"},
        "requests": {"cpu": "32", "memory": "200Gi"},
    }
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["tolerations"] == [
        {"key": "gpu", "operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "nlp", "effect": "NoSchedule"},
    ]
    assert " --allow=schedule --ranks 8 " in config["data"]["start.sh"]


def test_pods_may_pin_memory_without_a_resource_and_get_shared_memory(capsys):
    *_, job = documents(capsys, "--ipc-lock", "--shared-memory", "64Gi")
    jsonschema.validate(job, JOB)
    assert as_the_operator_reads_it(job) == job
    pod = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    assert pod["containers"][0]["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    [shared] = [volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shared == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_the_recipe_and_the_script_are_readable(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(Path("recipes/laptop.yaml").read_text().replace("name: laptop\n", "name: laptop  # für alle  \n"))
    assert cli.main(["kubernetes", str(recipe), *PATHS, *OPTIONS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "    name: laptop  # für alle" in lines
    assert "    node=${RANK:-0}" in lines


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--env", "X"], "--env X must read NAME=VALUE"),
        (["--rdma", "rdma/hca="], "--rdma rdma/hca= must read NAME=VALUE"),
        (["--toleration", "a:Never"], "--toleration a:Never must read KEY[=VALUE][:EFFECT]"),
        (["--namespace", "My_Team"], "--namespace (My_Team) is no name in Kubernetes"),
        (["--pull-secret", "-x-"], "--pull-secret (-x-) is no name in Kubernetes"),
        (["--shared-memory", "lots"], "--shared-memory lots must be a size of Kubernetes, such as 64Gi"),
        (["--nodes", "3", "--gpus", "3"], "9 ranks (3 nodes x 3) do not fit the recipe"),
        (["--nodes", "-1"], "--nodes (-1) must be at least 1"),
    ],
)
def test_wrong_options_are_refused(options, message, capsys):
    option, *rest = options
    words = [f"{option}={rest[0]}", *rest[1:]]  # argparse takes a value with a dash only so
    assert cli.main(["kubernetes", "recipes/laptop.yaml", *PATHS, *OPTIONS, *words]) == 2
    assert message in capsys.readouterr().err


def test_a_head_with_an_ipv6_address_gets_brackets(tmp_path, capsys):
    config, *_ = documents(capsys, "name=RANKS-NODES")
    (tmp_path / "hostname").write_text("#!/bin/bash\necho fd00::7 10.0.0.7\n")
    (tmp_path / "keepstep").write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/called\n')
    for name in ("hostname", "keepstep"):
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", config["data"]["start.sh"]], env=env, check=True)
    assert (
        (tmp_path / "called")
        .read_text()
        .endswith("name=RANKS-NODES --ranks 8 --nodes 1 --node-rank 0 --head [fd00::7]:29400\n")
    )


NAMES = ["Llama_1B.v2", "llama-1b-v2", "llama.1b.v2", "8b", "run-8b", "---", "a" * 80, "a" * 44 + "-b", "a" * 44 + "_b"]


def test_names_are_valid_in_kubernetes_and_differ():
    made = [object_name(name) for name in NAMES]
    assert len(set(made)) == len(NAMES)
    assert all(re.fullmatch("[a-z]([-a-z0-9]{0,43}[a-z0-9])?", name) for name in made), made
    assert object_name("llama-1b-v2") == "llama-1b-v2"
