"""Manifests for Kubernetes, compared with the documented fields of JobSet."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.submit.kubernetes import Cluster, apply, manifest, manifest_text
from pulsetrain.submit.submission import Resources, Submission
from tests.support.training_jobs import losses, write_run

jsonschema = pytest.importorskip("jsonschema")
SCHEMA = json.loads(Path(__file__).with_name("jobset_schema.json").read_text())
TRAIN = ("train", "base.yaml", "--folder=runs/a", "--resume=latest", "--wait")
FOLDER = Path("runs/a/submit")
CLUSTER = Cluster(
    image="registry.example/team/train:1.2", claim="data:/data", namespace="vision", secret="keys", queue="gpus"
)


def check(submission: Submission, cluster: Cluster) -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(manifest_text(submission, cluster))
    assert made == manifest(submission, cluster)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(made, SCHEMA)
    spec: dict[str, Any] = made["spec"]["replicatedJobs"][0]["template"]["spec"]
    return spec


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
        "torchrun", "--nnodes=2", "--nproc_per_node=4", "--node_rank=$(JOB_COMPLETION_INDEX)",
        "--master_addr=a-worker-0-0.a", "--master_port=29400", "-m", "pulsetrain", *TRAIN,
    ]  # fmt: skip
    amounts = {"cpu": "32", "memory": "65536Mi", "nvidia.com/gpu": "4"}
    assert container(job)["resources"] == {"requests": amounts, "limits": amounts}
    assert container(job)["workingDir"] == "/data"
    assert container(job)["envFrom"] == [{"secretRef": {"name": "keys"}}]


@pytest.mark.slow
def test_the_command_of_a_pod_trains(tmp_path: Path) -> None:
    write_run(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = check(Submission("a", (TRAIN,), FOLDER, Resources(processes=2)), CLUSTER)
    first, *words = [expanded(word, {"JOB_COMPLETION_INDEX": "0"}) for word in container(job)["command"]]
    assert first == "torchrun"
    changed = {
        "--master_addr=a-worker-0-0.a": "--master_addr=127.0.0.1",
        "--master_port=29400": f"--master_port={port}",
    }
    command = [sys.executable, "-m", "torch.distributed.run", *(changed.get(word, word) for word in words)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert max(losses(tmp_path / "runs" / "a")) == 60


def test_one_process_needs_no_launcher_and_no_devices() -> None:
    job = check(Submission("a", (TRAIN,), FOLDER, Resources()), Cluster(image="train"))
    assert container(job)["command"] == ["python", "-m", "pulsetrain", *TRAIN]
    assert "resources" not in container(job)
    assert "workingDir" not in container(job)


def test_a_pod_of_a_sweep_is_a_worker() -> None:
    commands = tuple(("sweep", "s.yaml", "--folder=out", "--workers=1", "--worker", str(index)) for index in range(3))
    job = check(Submission("s", commands, Path("out/submit"), Resources(gpus=1, restarts=5)), CLUSTER)
    assert (job["completions"], job["parallelism"], job["backoffLimitPerIndex"]) == (3, 3, 5)
    words = [expanded(word, {"JOB_COMPLETION_INDEX": "2"}) for word in container(job)["command"]]
    assert words == ["python", "-m", "pulsetrain", *commands[2]]


@pytest.mark.parametrize("name", ["a b", "a'b\"c", "$(HOME)", "$$(HOME)", "$HOME", "`x`", "a: b # c", "{a}", "é", "$"])
def test_names_are_kept_as_they_are(name: str) -> None:
    words = ("train", f"{name}.yaml", f"--folder={name}")
    job = check(Submission("a", (words,), FOLDER, Resources(processes=2)), CLUSTER)
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
        {"secret": "A"},
        {"queue": "$(x)"},
    ],
    ids=str,
)
def test_an_invalid_name_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=f"--{next(iter(wrong))}"):
        Cluster(**{"image": "train", **wrong})


def test_the_schema_finds_a_misspelt_field() -> None:
    made = manifest(Submission("a", (TRAIN,), FOLDER, Resources()), CLUSTER)
    made["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 0
    with pytest.raises(jsonschema.ValidationError, match="backofLimit"):
        jsonschema.validate(made, SCHEMA)


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
