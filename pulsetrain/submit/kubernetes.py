"""Manifests for Kubernetes (1.29 or later): a JobSet (https://jobset.sigs.k8s.io) of version 0.7 or later.

A run is one job with a pod for each node; if one fails, all start again, and resume. A sweep is one job with a pod for
each of its workers, which start again separately.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from typing import Any

from pulsetrain.configuration.yaml_text import dump_yaml
from pulsetrain.engine.errors import ConfigurationError
from pulsetrain.submit.submission import Submission

__all__ = ["Cluster", "apply", "manifest", "manifest_text"]

_PORT = 29400
_GRACE = 120  # seconds to finish an iteration, a validation and a save
_INDEX = "$(JOB_COMPLETION_INDEX)"  # Kubernetes puts the number of the pod there
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
# of a command that was stopped by SIGTERM: a run, and a sweep
_STOPPED = [128 + signal.SIGINT, 128 + signal.SIGTERM]
_IMAGE = re.compile(r"[A-Za-z0-9][\w./:@-]*")
_SHARED_MEMORY = "shared-memory"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a manifest needs besides the command and its resources.

    Args:
        image: of the container, with pulsetrain and what the configuration imports.
        claim: a PersistentVolumeClaim and where it is mounted, "data:/data"; configuration and runs are there.
        directory: in which the command runs; by default where the claim is mounted.
        namespace: None: kubectl's.
        secret: a Secret whose entries become environment variables. The manifest has its name only.
        queue: a LocalQueue of Kueue.

    Raises:
        ConfigurationError: a name is none of Kubernetes.
    """

    image: str
    claim: str | None = None
    directory: str | None = None
    namespace: str | None = None
    secret: str | None = None
    queue: str | None = None

    def __post_init__(self) -> None:
        if not _IMAGE.fullmatch(self.image):
            raise ConfigurationError(f"--image {self.image!r}: is not the name of an image, such as registry/name:tag")
        for name, longest in (("namespace", 63), ("secret", 253), ("queue", 63)):  # Kueue's name becomes a label
            value = getattr(self, name)
            if value is None:
                continue
            if not _NAME.fullmatch(value) or len(value) > longest or (name == "namespace" and "." in value):
                raise ConfigurationError(
                    f"--{name} {value!r}: is not a name of Kubernetes; use small letters, digits and hyphens"
                )
        if self.claim is not None:
            name, _, path = self.claim.partition(":")
            if not _NAME.fullmatch(name) or not path.startswith("/") or ":" in path:
                raise ConfigurationError(
                    f"--claim {self.claim!r}: needs the claim's name and a path, such as data:/data"
                )
        if self.directory is not None and not self.directory.startswith("/"):
            raise ConfigurationError(
                f"--directory {self.directory!r}: needs a path in the container that begins with /"
            )


def manifest(submission: Submission, cluster: Cluster) -> dict[str, Any]:
    """The JobSet as plain values."""
    needs, commands = submission.resources, submission.commands
    name, labels = submission.name, {"app.kubernetes.io/name": "pulsetrain"}
    is_sweep = commands[0][0] == "sweep"
    pods = len(commands) if is_sweep else needs.nodes
    # a pod that was preempted or evicted, which kubectl get shows as failed, and those that have stopped along with it
    action = "Ignore" if is_sweep else "FailJob"
    interrupted: list[dict[str, Any]] = [
        {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": action, "onExitCodes": {"operator": "In", "values": _STOPPED}},
    ]
    job = {
        # the workers of a sweep do not wait for each other
        **({"backoffLimitPerIndex": needs.restarts} if is_sweep else {"backoffLimit": 0}),
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "podFailurePolicy": {"rules": interrupted},
        "template": {"metadata": {"labels": labels}, "spec": _pod(submission, cluster)},
    }
    failure: dict[str, Any] = {"maxRestarts": 0}  # of a sweep: its job restarts the pods
    if not is_sweep:
        rule = {
            "name": "interrupted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
        failure = {"maxRestarts": needs.restarts, "rules": [rule]}
    metadata: dict[str, Any] = {"name": name}
    if cluster.namespace is not None:
        metadata["namespace"] = cluster.namespace
    metadata["labels"] = {**labels, **({"kueue.x-k8s.io/queue-name": cluster.queue} if cluster.queue else {})}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": failure,
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "replicatedJobs": [{"name": "worker", "replicas": 1, "template": {"spec": job}}],
        },
    }


def manifest_text(submission: Submission, cluster: Cluster) -> str:
    """The JobSet as YAML."""
    return dump_yaml(manifest(submission, cluster))


def apply(submission: Submission, cluster: Cluster) -> str:
    """Have kubectl create the JobSet; returns what it prints.

    Raises:
        ConfigurationError: kubectl is not there, or the cluster rejects the manifest; the message has the reason.
    """
    remedy = "--print prints the manifest, for `kubectl create -f -` where there is one"
    if shutil.which("kubectl") is None:
        raise ConfigurationError(f"--to kubernetes: the program kubectl was not found; install it, or {remedy}")
    text = manifest_text(submission, cluster)
    done = subprocess.run(
        ["kubectl", "create", "-f", "-"], input=text, capture_output=True, text=True, encoding="utf-8", check=False
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"status {done.returncode}"
        raise ConfigurationError(f"--to kubernetes: kubectl could not create the JobSet: {reason}; {remedy}")
    return done.stdout.strip()


def _pod(submission: Submission, cluster: Cluster) -> dict[str, Any]:
    needs = submission.resources
    amounts: dict[str, Any] = {}
    if needs.cpus is not None:
        amounts["cpu"] = str(needs.cpus * needs.processes)
    if needs.memory is not None:
        amounts["memory"] = f"{needs.memory}Mi"
    if needs.gpus:
        amounts["nvidia.com/gpu"] = str(needs.gpus)
    container: dict[str, Any] = {"name": "pulsetrain", "image": cluster.image, "command": _command(submission)}
    # how long the launcher waits for the processes that it has signalled
    container["env"] = [{"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(_GRACE - 10)}]
    mounts = [{"name": _SHARED_MEMORY, "mountPath": "/dev/shm"}]
    # without a volume of its own, /dev/shm has 64 MiB, too little for the workers of a DataLoader and for NCCL
    volumes: list[dict[str, Any]] = [{"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}]
    directory = cluster.directory
    if cluster.claim is not None:
        claim, _, path = cluster.claim.partition(":")
        mounts.append({"name": "work", "mountPath": path})
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": claim}})
        directory = directory or path
    if directory is not None:
        container["workingDir"] = directory
    if cluster.secret is not None:
        container["envFrom"] = [{"secretRef": {"name": cluster.secret}}]
    if amounts:
        container["resources"] = {"requests": dict(amounts), "limits": dict(amounts)}
    container["volumeMounts"] = mounts
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE,
        "containers": [container],
        "volumes": volumes,
    }


def _command(submission: Submission) -> list[str]:
    needs, words = submission.resources, submission.commands[0]
    if words[0] == "sweep":
        own = [_escaped(word) for word in words]
        if len(submission.commands) > 1:
            own[own.index("--worker") + 1] = _INDEX
        return ["python", "-m", "pulsetrain", *own]
    # not torchrun, whose exit status is 1 also where the run was stopped
    launch = [f"--launch.nproc={needs.processes}"] if needs.nodes * needs.processes > 1 else []
    if needs.nodes > 1:
        launch += [
            f"--launch.nnodes={needs.nodes}",
            f"--launch.node_rank={_INDEX}",
            f"--launch.master_addr={submission.name}-worker-0-0.{submission.name}",
            f"--launch.master_port={_PORT}",
        ]
    return ["python", "-m", "pulsetrain", *map(_escaped, words), *launch]


def _escaped(word: str) -> str:
    """The word, in which Kubernetes replaces nothing: it puts a variable in place of $(NAME), and $ in place of $$.

    >>> _escaped("runs/$(HOME)")
    'runs/$$(HOME)'
    """
    return word.replace("$", "$$")
