"""Files with which schedulers start a script on a cluster's machines: for Slurm, Kubernetes' JobSet, Ray Train and SkyPilot.

Each has as many machines and processes, and as many devices of each, as a strategy was made for.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.cluster.hosts import Hosts
from autoshard.errors import ClusterError

PORT = 8476  # of the coordinator, as JAX has it on Cloud TPUs
RESTARTS = 3
YAML_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")  # that are no strings in YAML 1.1


@dataclass(frozen=True, slots=True)
class Job:
    """A script on the machines of a cluster.

    Attributes:
        hosts: the machines.
        cluster: its name, for the comment at the head.
        program: what `autoshard.cli.rank` runs: ``["script", path, *arguments]`` or ``["module", name, *arguments]``.
    """

    hosts: Hosts
    cluster: str
    program: Sequence[str]

    @property
    def name(self) -> str:
        """The script's name as Kubernetes takes names of jobs."""
        stem = self.program[1].replace("\\", "/").rpartition("/")[2].removesuffix(".py")
        plain = re.sub("[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
        return plain if plain[:1].isalpha() and plain not in YAML_WORDS else f"job-{plain}".rstrip("-")

    @property
    def command(self) -> list[str]:
        kind, what, *arguments = self.program
        return ["python", *(["-m"] if kind == "module" else []), what, *arguments]

    def heading(self, kind: str, start: str, per_host: int = 1) -> str:
        n, each = self.hosts.count * per_host, self.hosts.devices // per_host
        processes = f"{n} process{'es' * (n > 1)} of {each} device{'s' * (each > 1)}"
        joined = "" if kind == "ray" else " The script calls autoshard.distributed.initialize() first."
        return f"Written by `autoshard launch --write {kind}` for {self.cluster}: {processes}.{joined} Start it with: {start}"


def slurm(job: Job) -> str:
    """A batch script: a task for each GPU, as JAX detects it there, and one for each machine of other devices."""
    tasks = job.hosts.devices if job.hosts.per_device else 1
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.hosts.count}",
        f"#SBATCH --ntasks-per-node={tasks}",
        *([f"#SBATCH --gpus-per-node={job.hosts.devices}"] if job.hosts.per_device else []),
        "#SBATCH --output=%x-%j.log",
        f"# {job.heading('slurm', 'sbatch FILE', tasks)}",
        "# Add what your site asks for, such as --partition, --account and --time, and activate your environment here.",
        "set -euo pipefail",
        *_exports(job.hosts.environment),
        f"srun --kill-on-bad-exit=1 {shlex.join(job.command)}",
    ]
    return "\n".join(lines) + "\n"


def jobset(job: Job) -> str:
    """A manifest of Kubernetes' JobSet: a pod for each machine, and a job for each TPU slice."""
    hosts = job.hosts
    pods = hosts.count // hosts.slices
    one_pool = "\n  annotations:\n    alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool" if hosts.labels else ""
    container = textwrap.indent(_container(job), " " * 14)
    selector = "".join(f"\n                {name}: {json.dumps(value)}" for name, value in hosts.labels.items())
    return (
        f"# {job.heading('jobset', 'kubectl apply -f FILE')}\n"
        "# Name your image, which has the script, JAX for these devices and autoshard.\n"
        "apiVersion: jobset.x-k8s.io/v1alpha2\n"
        "kind: JobSet\n"
        f"metadata:\n  name: {job.name}{one_pool}\n"
        "spec:\n"
        f"  failurePolicy:\n    maxRestarts: {RESTARTS}\n"
        "  replicatedJobs:\n"
        f"    - name: workers\n      replicas: {hosts.slices}\n"
        "      template:\n"
        f"        spec:\n          parallelism: {pods}\n          completions: {pods}\n          backoffLimit: 0\n"
        "          template:\n"
        "            spec:\n              restartPolicy: Never\n"
        + (f"              nodeSelector:{selector}\n" if selector else "")
        + f"{container}\n"
        "              volumes:\n                - name: shared-memory\n"
        "                  emptyDir:\n                    medium: Memory\n"
    )


def _container(job: Job) -> str:
    """The pod's container, with NCCL's shared memory, and who it is where JAX does not detect that."""
    hosts = job.hosts
    values = dict(hosts.environment)
    if not hosts.detected:
        values |= {"JAX_COORDINATOR_ADDRESS": f"{job.name}-workers-0-0.{job.name}:{PORT}", "JAX_NUM_PROCESSES": str(hosts.count)}
    environment = "".join(f"\n      - name: {name}\n        value: {json.dumps(value)}" for name, value in values.items())
    if not hosts.detected:
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        environment += f"\n      - name: JAX_PROCESS_ID\n        valueFrom:\n          fieldRef:\n            fieldPath: {index}"
    limits = f'\n    resources:\n      limits:\n        {hosts.resource}: "{hosts.amount}"' if hosts.resource else ""
    return (
        "containers:\n"
        f"  - name: {job.name}\n"
        "    image: IMAGE\n"
        f"    command: {json.dumps(job.command)}"
        + (f"\n    env:{environment}" if environment else "")
        + limits
        + "\n    volumeMounts:\n      - name: shared-memory\n        mountPath: /dev/shm"
    )


def ray(job: Job) -> str:
    """A script of Ray Train's `JaxTrainer`: a worker for each machine. It joins the processes itself, before the script runs."""
    hosts = job.hosts
    arguments = "".join(f"{name}={value!r}, " for name, value in {"num_workers": hosts.count, **hosts.ray}.items()).rstrip(", ")
    joined = "JaxConfig(use_tpu=True)" if hosts.environment else "None"
    kind, what, *rest = job.program
    environment = {**hosts.environment, **({"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"} if hosts.environment else {})}
    note = "  # joins the processes; JAX_PLATFORMS says on what" if hosts.environment else "  # as the scaling says"
    return f'''"""{job.heading("ray", "python FILE").replace(". Start", f".{chr(10)}{chr(10)}Start")}, from the folder of the script."""

import os
import runpy
import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer


def train():
    sys.path.insert(0, os.getcwd())
    sys.argv = {[what, *rest]!r}
    runpy.run_{"module" if kind == "module" else "path"}({what!r}, run_name="__main__")


os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # each worker runs in a copy of this folder; write elsewhere what is to stay
ray.init(runtime_env={{"working_dir": "."}})
trainer = JaxTrainer(
    train,
    jax_config={joined},{note}
    scaling_config=ScalingConfig({arguments}),
    run_config=RunConfig(worker_runtime_env={{"env_vars": {environment!r}}}),
)
trainer.fit()
'''


def sky(job: Job) -> str:
    """A task of SkyPilot: a node for each machine, or one for a TPU slice, on whose machines it runs the command.

    Raises:
        ClusterError: several TPU slices.
    """
    hosts = job.hosts
    if hosts.slices > 1:
        raise ClusterError(
            f"SkyPilot starts one TPU slice, and {job.cluster} has {hosts.slices}. Write a JobSet (--write jobset), or plan for one slice."
        )
    who = {
        "JAX_COORDINATOR_ADDRESS": f'"$(echo "$SKYPILOT_NODE_IPS" | head -n1):{PORT}"',
        "JAX_NUM_PROCESSES": '"$SKYPILOT_NUM_NODES"',
        "JAX_PROCESS_ID": '"$SKYPILOT_NODE_RANK"',
    }
    exports = [*_exports(hosts.environment), *(f"export {name}={value}" for name, value in who.items() if not hosts.detected)]
    run = textwrap.indent("\n".join([*exports, shlex.join(job.command)]), "  ")
    return (
        f"# {job.heading('sky', 'sky launch FILE')}\n"
        f"name: {job.name}\n"
        "workdir: .\n"
        f"num_nodes: {1 if hosts.detected else hosts.count}\n"
        + (f"resources:\n  accelerators: {hosts.sky}\n" if hosts.sky else "")
        + "# JAX for these devices, autoshard, and what the script imports.\n"
        "setup: |\n  pip install -r requirements.txt\n"
        f"run: |\n{run}\n"
    )


def _exports(values: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in values.items()]


WRITERS = {"slurm": slurm, "jobset": jobset, "ray": ray, "sky": sky}
