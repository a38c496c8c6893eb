"""The manifest for Kubernetes has the fields that a PyTorchJob has."""

import pytest
import yaml

from tests.helpers.examples import EXAMPLES

MANIFEST = EXAMPLES / "pytorchjob.yaml"
FIELDS = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str},
    "spec": {
        "nprocPerNode": str,
        "runPolicy": {"cleanPodPolicy": ("Running", "All", "None"), "backoffLimit": int},
        "pytorchReplicaSpecs": {
            name: {
                "replicas": int,
                "restartPolicy": ("Always", "OnFailure", "Never", "ExitCode"),
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": str,
                                "image": str,
                                "command": [str],
                                "env": [
                                    {"name": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}},
                                ],
                                "volumeMounts": [{"name": str, "mountPath": str}],
                            }
                        ],
                        "volumes": [{"name": str, "emptyDir": {"medium": str}}],
                    }
                },
            }
            for name in ("Master", "Worker")
        },
    },
}
"""The fields of a PyTorchJob that the manifest uses, as kubeflow.org/v1 defines them: a type, or the values allowed."""


def objections(value, fields, path="job"):
    """Returns what in `value` is not as `fields` have it."""
    if isinstance(fields, dict):
        if not isinstance(value, dict):
            return [f"{path} is no object"]
        unknown = [f"{path}.{name} is unknown" for name in value.keys() - fields.keys()]
        return unknown + [
            one
            for name in value.keys() & fields.keys()
            for one in objections(value[name], fields[name], f"{path}.{name}")
        ]
    if isinstance(fields, list):
        if not isinstance(value, list):
            return [f"{path} is no list"]
        return [one for item in value for one in objections(item, fields[0], f"{path}[]")]
    if isinstance(fields, tuple):
        return [] if value in fields else [f"{path} is none of {fields}"]
    return [] if type(value) is fields else [f"{path} is no {fields.__name__}"]


def test_the_manifest_has_the_fields_of_a_pytorchjob():
    job = yaml.safe_load(MANIFEST.read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert objections(job, FIELDS) == []
    for replicas in job["spec"]["pytorchReplicaSpecs"].values():
        assert [container["name"] for container in replicas["template"]["spec"]["containers"]] == ["pytorch"]


@pytest.mark.parametrize(
    ("old", "new", "objection"),
    [
        ("replicas: 1", "replicas: one", "replicas is no int"),
        ("cleanPodPolicy", "cleanPodPolice", "cleanPodPolice is unknown"),
        ("OnFailure", "Sometimes", "restartPolicy is none of"),
        ('nprocPerNode: "2"', "nprocPerNode: 2", "nprocPerNode is no str"),
        ("[torchrun", "[1", "command[] is no str"),
        ("env:", "environment:", "environment is unknown"),
    ],
)
def test_a_manifest_with_a_mistake_is_found(old, new, objection):
    changed = yaml.safe_load(MANIFEST.read_text().replace(old, new))
    assert objection in "\n".join(objections(changed, FIELDS))
