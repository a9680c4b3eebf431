"""The fields of a JobSet as a JSON schema, made from the CustomResourceDefinition of a release of JobSet.

    python -m tests.support.jobset_definition jobset.x-k8s.io_jobsets.yaml v0.12.0 > jobset_v0.12.0.json

Names, types, enumerations, bounds and required fields are kept, and no texts. Objects accept no other fields, since an
API server drops them. Of the pod and what is in it, only the fields in `_OF_PODS` are kept: a manifest with another one
does not fit, and needs the definition again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

__all__ = ["fields_of", "reduced"]

_KEPT = ("type", "enum", "required", "pattern", "minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength")
_POD = "spec.replicatedJobs[].template.spec.template.spec"
_OF_PODS = {
    "": ("containers", "restartPolicy", "terminationGracePeriodSeconds", "volumes"),
    ".containers[]": (
        "args", "command", "env", "envFrom", "image", "name", "resources", "volumeMounts", "workingDir",
    ),
    ".containers[].env[]": ("name", "value"),
    ".volumes[]": ("emptyDir", "name", "persistentVolumeClaim"),
}  # fmt: skip
_LEFT_OUT = ("status", "spec.volumeClaimPolicies")


def reduced(definition: Mapping[str, Any], version: str, digest: str) -> dict[str, Any]:
    """The schema.

    Args:
        definition: the content of the file with the CustomResourceDefinition.
        version: the release that it is of.
        digest: SHA-256 of the file.
    """
    (served,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1alpha2")
    schema = _reduced(served["schema"]["openAPIV3Schema"], "")
    schema["properties"]["apiVersion"] = {"const": f"{definition['spec']['group']}/{served['name']}"}
    schema["properties"]["kind"] = {"const": definition["spec"]["names"]["kind"]}
    schema["properties"]["metadata"] = {"type": "object"}  # every kind has the same, and a definition does not say it
    origin = f"made by tests/support/jobset_definition.py from the CustomResourceDefinition of JobSet {version}"
    return {
        "$comment": f"{origin}, SHA-256 {digest}",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "required": ["apiVersion", "kind", "metadata", "spec"],
    }


def fields_of(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """The dotted names of all fields of a schema."""
    for name, inner in schema.get("properties", {}).items():
        yield (own := f"{path}.{name}".lstrip("."))
        yield from fields_of(inner, own)
    if "items" in schema:
        yield from fields_of(schema["items"], f"{path}[]")


def _reduced(schema: Mapping[str, Any], path: str) -> dict[str, Any]:
    found = {name: schema[name] for name in _KEPT if name in schema}
    if schema.get("x-kubernetes-int-or-string"):
        found["type"] = ["integer", "string"]
    if "properties" in schema:
        found["properties"] = {
            name: _reduced(inner, own)
            for name, inner in schema["properties"].items()
            if _is_kept(own := f"{path}.{name}".lstrip("."), path, name)
        }
        found["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = _reduced(schema["additionalProperties"], f"{path}{{}}")
    if "items" in schema:
        found["items"] = _reduced(schema["items"], f"{path}[]")
    return found


def _is_kept(own: str, path: str, name: str) -> bool:
    kept = _OF_PODS.get(path.removeprefix(_POD)) if path.startswith(_POD) else None
    return own not in _LEFT_OUT and (kept is None or name in kept)


if __name__ == "__main__":
    _file = Path(sys.argv[1]).read_bytes()
    _schema = reduced(yaml.safe_load(_file), sys.argv[2], hashlib.sha256(_file).hexdigest())
    print(json.dumps(_schema, indent=1, sort_keys=True))
