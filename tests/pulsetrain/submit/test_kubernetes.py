"""Manifests for Kubernetes, compared with the definitions of two releases of JobSet, and with what webhooks check."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.submit.kubernetes import Cluster, apply, manifest, manifest_text
from pulsetrain.submit.submission import Resources, Submission
from tests.support.jobset_definition import fields_of, reduced
from tests.support.ports import free_port
from tests.support.training_jobs import loads, losses, until, write_run

jsonschema = pytest.importorskip("jsonschema")
# the first release that is supported, and the newest that was compared
SCHEMAS = {
    name: json.loads(Path(__file__).with_name(f"jobset_{name}.json").read_text()) for name in ("v0.7.0", "v0.12.0")
}
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035, which a JobSet needs for the names of its pods
RULE = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", re.ASCII)
TRAIN = ("train", "base.yaml", "--folder=runs/a", "--resume=latest", "--wait")
FOLDER = Path("runs/a/submit")
CLUSTER = Cluster(
    image="registry.example/team/train:1.2", claim="data:/data", namespace="vision", secret="keys", queue="gpus"
)


def check(submission: Submission, cluster: Cluster) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(manifest_text(submission, cluster))
    assert made == manifest(submission, cluster)
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(made, schema)
    check_names(made)
    spec: dict[str, Any] = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    check_job(spec)
    return spec


def check_names(made: dict[str, Any]) -> None:
    """What the webhook of JobSet (v0.12.0) checks on creation, of the fields that manifests have."""
    spec, name = made["spec"], made["metadata"]["name"]
    assert LABEL.fullmatch(spec["network"]["subdomain"])
    for job in spec["replicatedJobs"]:
        last_job = f"{name}-{job['name']}-{job['replicas'] - 1}"
        assert LABEL.fullmatch(f"{last_job}-{job['template']['spec']['completions'] - 1}-abcde")
    rules = spec["failurePolicy"].get("rules", [])
    assert len({rule["name"] for rule in rules}) == len(rules)
    for rule in rules:
        assert RULE.fullmatch(rule["name"])
        assert len(rule["name"]) <= 128
        assert set(rule["onJobFailureReasons"]) <= {
            "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"
        }  # fmt: skip
    assert set(made["metadata"]) <= {"name", "namespace", "labels"}
    assert all(LABEL_VALUE.fullmatch(value) for value in made["metadata"]["labels"].values())


def check_job(job: dict[str, Any]) -> None:
    """What the definition says of a Job and its pods in texts alone, and Kubernetes checks."""
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # else no podFailurePolicy is allowed
    assert "backoffLimitPerIndex" not in job or job["completionMode"] == "Indexed"
    actions = {"FailJob", "Ignore", "Count"} | ({"FailIndex"} if "backoffLimitPerIndex" in job else set())
    for rule in job["podFailurePolicy"]["rules"]:
        assert rule["action"] in actions
        assert ("onExitCodes" in rule) != ("onPodConditions" in rule)
        values = rule.get("onExitCodes", {}).get("values", [1])
        assert values == sorted(set(values))
        assert 0 not in values
    volumes = [volume["name"] for volume in pod["volumes"]]
    mounts = container(job)["volumeMounts"]
    assert sorted(volumes) == sorted(mount["name"] for mount in mounts)
    assert all(len(volume) == 2 for volume in pod["volumes"])  # its name, and one source
    assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
    amounts = container(job).get("resources", {"requests": {}, "limits": {}})
    assert amounts["requests"] == amounts["limits"]  # of GPUs they have to be equal


def container(job: dict[str, Any]) -> dict[str, Any]:
    (found,) = job["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def expanded(word: str, variables: dict[str, str]) -> str:
    """What Kubernetes puts in place of $(NAME) and $$."""
    return re.sub(
        r"\$\$|\$\((\w+)\)", lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]), word
    )


def test_a_run_on_two_nodes_meets_at_the_first_pod() -> None:
    needs = Resources(processes=4, nodes=2, gpus=4, cpus=8, memory=64 * 1024)
    job = check(Submission("a", (TRAIN,), FOLDER, needs), CLUSTER)
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    assert container(job)["command"] == [
        "python", "-m", "pulsetrain", *TRAIN, "--launch.nproc=4", "--launch.nnodes=2",
        "--launch.node_rank=$(JOB_COMPLETION_INDEX)", "--launch.master_addr=a-worker-0-0.a",
        "--launch.master_port=29400",
    ]  # fmt: skip
    amounts = {"cpu": "32", "memory": "65536Mi", "nvidia.com/gpu": "4"}
    assert container(job)["resources"] == {"requests": amounts, "limits": amounts}
    assert container(job)["workingDir"] == "/data"
    assert container(job)["envFrom"] == [{"secretRef": {"name": "keys"}}]


def pods(tmp_path: Path, nodes: int) -> list[subprocess.Popen[bytes]]:
    """The commands of the pods of a run, started on this machine."""
    port = free_port()
    needs = Resources(processes=2 // nodes, nodes=nodes)
    job = check(Submission("a", (TRAIN,), FOLDER, needs), CLUSTER)
    here = {"a-worker-0-0.a": "127.0.0.1", "=29400": f"={port}"}
    started = []
    for index in range(nodes):
        first, *words = [
            expanded(word, {"JOB_COMPLETION_INDEX": str(index)}).replace(*change)
            for word in container(job)["command"]
            for change in [next((each for each in here.items() if each[0] in word), ("", ""))]
        ]
        assert first == "python"
        started.append(subprocess.Popen([sys.executable, *words], cwd=tmp_path, stderr=subprocess.DEVNULL))
    return started


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_pods_that_are_stopped_say_so_and_train_on_when_they_are_started_again(tmp_path: Path, nodes: int) -> None:
    """One of two pods gets SIGTERM: both have saved, and have an exit status that does not count as a failure."""
    write_run(tmp_path, pause=0.03)
    started = pods(tmp_path, nodes)
    until(lambda: list(tmp_path.glob("runs/a/checkpoints/0*/manifest.json")))
    started[-1].terminate()
    job = manifest(Submission("a", (TRAIN,), FOLDER, Resources(nodes=nodes)), CLUSTER)
    rules = job["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert {each.wait() for each in started} <= set(rules[1]["onExitCodes"]["values"])
    assert [each.wait() for each in pods(tmp_path, nodes)] == [0] * nodes
    assert loads(tmp_path / "runs" / "a") == 1
    assert max(losses(tmp_path / "runs" / "a")) == 60


@pytest.mark.slow
def test_a_worker_of_a_sweep_that_is_stopped_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, pause=0.03)
    (tmp_path / "s.yaml").write_text(
        "config: base.yaml\nfolder: out\nsampler: grid\nmetric: val/loss\n"
        "space: {training.learning_rate: [1e-3, 1e-2]}\n"
    )
    words = ("sweep", "s.yaml", "--folder=out", "--workers=1")
    job = check(Submission("s", (words,), Path("out/submit"), Resources()), CLUSTER)
    command = [sys.executable, *container(job)["command"][1:]]
    worker = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    until(lambda: list(tmp_path.glob("out/trials/*/checkpoints/0*/manifest.json")))
    worker.terminate()
    assert worker.wait() in job["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]


def test_one_process_needs_no_launcher_and_no_devices() -> None:
    job = check(Submission("a", (TRAIN,), FOLDER, Resources()), Cluster(image="train"))
    assert container(job)["command"] == ["python", "-m", "pulsetrain", *TRAIN]
    assert "resources" not in container(job)
    assert "workingDir" not in container(job)


def test_a_pod_of_a_sweep_is_a_worker() -> None:
    commands = tuple(("sweep", "s.yaml", "--folder=out", "--workers=1", "--worker", str(index)) for index in range(3))
    job = check(Submission("s", commands, Path("out/submit"), Resources(gpus=1, restarts=5)), CLUSTER)
    assert (job["completions"], job["parallelism"], job["backoffLimitPerIndex"]) == (3, 3, 5)
    assert "backoffLimit" not in job
    made = manifest(Submission("s", commands, Path("out/submit"), Resources(restarts=5)), CLUSTER)
    assert made["spec"]["failurePolicy"] == {"maxRestarts": 0}  # else each worker could fail (5 + 1) ** 2 times
    words = [expanded(word, {"JOB_COMPLETION_INDEX": "2"}) for word in container(job)["command"]]
    assert words == ["python", "-m", "pulsetrain", *commands[2]]


@pytest.mark.parametrize("name", ["a b", "a'b\"c", "$(HOME)", "$$(HOME)", "$HOME", "`x`", "a: b # c", "{a}", "é", "$"])
def test_names_are_kept_as_they_are(name: str) -> None:
    words = ("train", f"{name}.yaml", f"--folder={name}")
    job = check(Submission("a", (words,), FOLDER, Resources()), CLUSTER)
    command = [expanded(word, {"HOME": "/root"}) for word in container(job)["command"]]
    assert command[-3:] == list(words)
    assert "sh" not in command


@pytest.mark.parametrize(
    "wrong",
    [
        {"image": ""},
        {"image": "a b"},
        {"image": "-x"},
        {"claim": "data"},
        {"claim": "Data:/data"},
        {"claim": "data:/a:/b"},
        {"directory": "data"},
        {"namespace": "a;b"},
        {"namespace": "a.b"},
        {"namespace": "a" * 64},
        {"secret": "a..b"},
        {"secret": "A"},
        {"queue": "$(x)"},
    ],
    ids=str,
)
def test_an_invalid_name_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=f"--{next(iter(wrong))}"):
        Cluster(**{"image": "train", **wrong})


@pytest.mark.parametrize("version", SCHEMAS)
def test_the_definition_finds_a_misspelt_field_a_wrong_type_and_a_newer_action(version: str) -> None:
    made = manifest(Submission("a", (TRAIN,), FOLDER, Resources()), CLUSTER)
    job = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["backofLimit"] = 0
    with pytest.raises(jsonschema.ValidationError, match="backofLimit"):
        jsonschema.validate(made, SCHEMAS[version])
    del job["backofLimit"]
    job["completions"] = "2"
    with pytest.raises(jsonschema.ValidationError, match="'2' is not of type 'integer'"):
        jsonschema.validate(made, SCHEMAS[version])
    job["completions"] = 2
    made["spec"]["failurePolicy"]["rules"][0]["action"] = "RestartJob"
    if version == "v0.7.0":
        with pytest.raises(jsonschema.ValidationError, match="RestartJob"):
            jsonschema.validate(made, SCHEMAS[version])
    else:
        jsonschema.validate(made, SCHEMAS[version])


def test_a_definition_is_reduced_to_its_facts() -> None:
    rules = {"type": "array", "maxItems": 2, "items": {"type": "object", "properties": {"name": {"type": "string"}}}}
    amount = {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer"}], "pattern": "^[0-9]+$"}
    properties = {
        "rules": {**rules, "description": "a text"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "amount": amount,
        "volumeClaimPolicies": {"type": "array"},
    }
    spec = {"type": "object", "required": ["rules"], "properties": properties, "description": "a text"}
    served = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec, "status": {"type": "object"}}}}
    definition = {
        "spec": {
            "group": "g", "names": {"kind": "JobSet"},
            "versions": [{"name": "v1alpha1", "schema": {}}, {"name": "v1alpha2", "schema": served}],
        }
    }  # fmt: skip
    made = reduced(definition, "v1.2.3", "abc")
    assert "text" not in json.dumps(made)
    assert made["properties"]["apiVersion"] == {"const": "g/v1alpha2"}
    assert made["$comment"].endswith("JobSet v1.2.3, SHA-256 abc")
    assert set(made["properties"]) == {"apiVersion", "kind", "metadata", "spec"}
    right = {"apiVersion": "g/v1alpha2", "kind": "JobSet", "metadata": {}}
    jsonschema.validate({**right, "spec": {"rules": [{"name": "a"}], "labels": {"x": "y"}, "amount": 3}}, made)
    for wrong in ({}, {"rules": [{"nam": "a"}]}, {"rules": [], "labels": {"x": 1}}, {"rules": [], "amount": "x"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**right, "spec": wrong}, made)


def test_fields_that_manifests_have_are_in_both_releases() -> None:
    older, newer = (set(fields_of(schema)) for schema in SCHEMAS.values())
    assert older < newer
    assert "spec.failurePolicy.rules[].onJobFailureMessagePatterns" in newer - older


class TestKubectl:
    SUBMISSION = Submission("a", (TRAIN,), FOLDER, Resources())

    def program(self, folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "kubectl").write_text(f"#!{shutil.which('bash')}\n{text}")
        (folder / "kubectl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def test_it_gets_the_manifest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program(tmp_path, f'cat > "{tmp_path}/got"; echo "jobset/a created: $*"', monkeypatch)
        assert apply(self.SUBMISSION, CLUSTER) == "jobset/a created: create -f -"
        assert yaml.safe_load((tmp_path / "got").read_text()) == manifest(self.SUBMISSION, CLUSTER)

    def test_its_error_is_reported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.program(tmp_path, 'cat > /dev/null; echo "error: no matches for kind JobSet" >&2; exit 1', monkeypatch)
        with pytest.raises(ConfigurationError, match="no matches for kind JobSet; --print"):
            apply(self.SUBMISSION, CLUSTER)

    def test_where_it_is_missing_the_remedy_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(ConfigurationError, match="kubectl was not found; install it, or --print"):
            apply(self.SUBMISSION, CLUSTER)
