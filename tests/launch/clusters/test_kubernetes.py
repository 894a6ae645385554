"""The manifest is what the operator and Kubernetes accept; its start script runs without Kubernetes."""

import json
import os
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
CONTAINER = closed(
    {
        "name": {"const": "pytorch"},
        "image": TEXT,
        "command": {"type": "array", "items": TEXT},
        "workingDir": TEXT,
        "ports": {"type": "array", "items": closed({"name": {**NAME, "maxLength": 15}, "containerPort": COUNT})},
        "resources": closed({"limits": {"type": "object", "additionalProperties": {"pattern": "^[1-9][0-9]*$"}}}),
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
        "emptyDir": closed({"medium": {"const": "Memory"}}),
    },
    "name",
) | {"minProperties": 2, "maxProperties": 2}
POD = closed(
    {
        "terminationGracePeriodSeconds": COUNT,
        "containers": {"type": "array", "items": CONTAINER, "minItems": 1},
        "volumes": {"type": "array", "items": VOLUME},
    }
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


def as_the_operator_reads_it(job: dict[str, Any]) -> Any:
    """Through the models that Kubeflow generates from the definition of PyTorchJob: a field that it does not know is
    lost, and one that lacks or has another type is an error."""
    from kubeflow.training import ApiClient

    client = ApiClient()
    response = types.SimpleNamespace(data=json.dumps(job))
    return client.sanitize_for_serialization(client.deserialize(response, "KubeflowOrgV1PyTorchJob"))


OPTIONS = ["--image", "site/keepstep:1", "--claim", "data"]
PLACES = ["runs_dir=/shared/runs", "data.sources.0.path=/shared/data"]


def documents(capsys, *options: str) -> list[dict[str, Any]]:
    assert cli.main(["kubernetes", "recipes/laptop.yaml", *PLACES, *OPTIONS, *options]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 0), (1, 8), (4, 8)])
def test_the_manifest_is_a_valid_pytorchjob(capsys, nodes, gpus):
    config, job = documents(capsys, "--nodes", str(nodes), "--gpus", str(gpus))
    jsonschema.validate(job, JOB)
    assert as_the_operator_reads_it(job) == job
    assert config["data"]["recipe.yaml"] == Path("recipes/laptop.yaml").read_text()
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert sum(replica["replicas"] for replica in replicas.values()) == nodes
    mounted = {mount["name"] for mount in replicas["Master"]["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in replicas["Master"]["template"]["spec"]["volumes"]}


def test_a_field_that_the_operator_does_not_know_would_be_noticed(capsys):
    _, job = documents(capsys)
    job["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicies"] = "ExitCode"
    assert as_the_operator_reads_it(job) != job
    del job["spec"]["pytorchReplicaSpecs"]
    with pytest.raises(ValueError, match="`pytorch_replica_specs`, must not be `None`"):
        as_the_operator_reads_it(job)


@pytest.mark.parametrize(("code", "pod"), [(0, 0), (1, 200), (2, 2), (75, 200)])
def test_the_start_script_passes_what_the_operator_sets_and_maps_exit_codes(tmp_path, capsys, code, pod):
    config, _ = documents(capsys, "--nodes", "4")
    (tmp_path / "start.sh").write_text(config["data"]["start.sh"])
    fake = tmp_path / "keepstep"
    fake.write_text(f'#!/bin/bash\necho "$@" rank=${{RANK-none}} > {tmp_path}/said\nexit {code}\n')
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "job-master-0"}
    assert subprocess.run(["bash", str(tmp_path / "start.sh")], env=env, check=False).returncode == pod
    expected = f"run /job/recipe.yaml {' '.join(PLACES)} --ranks 8 --nodes 4 --node-rank 3 --head job-master-0:29400"
    assert (tmp_path / "said").read_text() == f"{expected} rank=none\n"


def test_the_start_script_is_clean(capsys):
    config, _ = documents(capsys)
    tool = str(Path(sys.executable).with_name("shellcheck"))
    script = config["data"]["start.sh"]
    result = subprocess.run([tool, "--shell=bash", "-"], input=script, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_data_that_pods_do_not_share_is_refused(capsys):
    assert cli.main(["kubernetes", "recipes/laptop.yaml", "runs_dir=runs", *OPTIONS]) == 2
    assert "runs_dir (runs) must lie below /shared/, which all pods share" in capsys.readouterr().err


def test_names_fit_kubernetes():
    assert object_name("Llama_1B.v2") == "llama-1b-v2"
