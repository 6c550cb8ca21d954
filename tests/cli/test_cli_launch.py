"""Files that ``autoshard launch --write`` prints: each has a strategy's machines and devices, and is of its scheduler's form."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="manifests are read with PyYAML")
jsonschema = pytest.importorskip("jsonschema", reason="manifests are compared with schemas")

CLUSTERS = ("2*cpu:4", "h100:8x4", "gb200:72x2", "v5e:2x4", "2*v5e:4x4", "v5p:4x4x4")
MACHINES = {"2*cpu:4": (2, 4), "h100:8x4": (4, 8), "gb200:72x2": (36, 4), "v5e:2x4": (1, 8), "2*v5e:4x4": (8, 4), "v5p:4x4x4": (16, 4)}
HARD = ("it's", "two words", "line\n  and line", "$HOME", "--steps")


def closed(properties, required=()):
    """The schema of an object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": [*required], "additionalProperties": False}


TEXT, COUNT, TEXTS = {"type": "string"}, {"type": "integer", "minimum": 1}, {"type": "object", "additionalProperties": {"type": "string"}}
# The fields of JobSet v1alpha2, of batch/v1 Jobs and of pods (jobset.sigs.k8s.io and kubernetes.io, API references) that are written
VARIABLE = closed({"name": TEXT, "value": TEXT, "valueFrom": closed({"fieldRef": closed({"fieldPath": TEXT}, ["fieldPath"])})}, ["name"])
CONTAINER = closed(
    {
        "name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"},
        "image": TEXT,
        "command": {"type": "array", "items": TEXT},
        "env": {"type": "array", "items": VARIABLE},
        "resources": closed({"limits": TEXTS}),
        "volumeMounts": {"type": "array", "items": closed({"name": TEXT, "mountPath": TEXT}, ["name", "mountPath"])},
    },
    ["name", "image"],
)
POD = closed(
    {
        "restartPolicy": {"enum": ["Never", "OnFailure"]},
        "nodeSelector": TEXTS,
        "containers": {"type": "array", "items": CONTAINER, "minItems": 1},
        "volumes": {"type": "array", "items": closed({"name": TEXT, "emptyDir": closed({"medium": {"enum": ["", "Memory"]}})}, ["name"])},
    },
    ["containers", "restartPolicy"],
)
JOB = closed({"parallelism": COUNT, "completions": COUNT, "backoffLimit": {"type": "integer"}, "template": closed({"spec": POD}, ["spec"])})
REPLICATED = closed({"name": TEXT, "replicas": COUNT, "template": closed({"spec": JOB}, ["spec"])}, ["name", "template"])
JOBSET = closed(
    {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": closed({"name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"}, "annotations": TEXTS}, ["name"]),
        "spec": closed(
            {"failurePolicy": closed({"maxRestarts": COUNT}), "replicatedJobs": {"type": "array", "items": REPLICATED}}, ["replicatedJobs"]
        ),
    },
    ["apiVersion", "kind", "metadata", "spec"],
)
# docs.skypilot.co/en/latest/reference/yaml-spec.html
SKY = closed({"name": TEXT, "workdir": TEXT, "num_nodes": COUNT, "resources": closed({"accelerators": TEXT}), "setup": TEXT, "run": TEXT})


@pytest.fixture
def write(run):
    """A function that gives what is printed for a format and a cluster."""

    def call(kind, cluster, *arguments, script="train.py"):
        Path(script).touch()
        code, out, err = run("launch", "--write", kind, "--cluster", cluster, script, *arguments)
        assert code == 0, err
        return out

    return call


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_slurm_has_the_machines(write, cluster):
    """Nodes, and a task for each GPU or for each machine; directives before the first command, and the command as it was given."""
    text = write("slurm", cluster, *HARD)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, flags=re.MULTILINE))
    nodes, devices = MACHINES[cluster]
    gpus = int(asked.get("gpus-per-node", 0))
    assert int(asked["nodes"]) == nodes and gpus in (0, devices) and int(asked["ntasks-per-node"]) == (gpus or 1)
    assert asked.keys() <= {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "output"}
    assert all(line.startswith("#") for line in text[: text.rindex("#SBATCH")].splitlines())
    assert shlex.split(text[text.index("srun") :])[2:] == ["python", "train.py", *HARD]
    assert (f"JAX_NUM_CPU_DEVICES={devices}" in text) == ("cpu" in cluster)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_jobset_has_the_machines(write, cluster):
    """A pod for each, a job for each slice, and all that JAX does not detect."""
    manifest = yaml.safe_load(write("jobset", cluster, *HARD))
    jsonschema.validate(manifest, JOBSET)
    (job,) = manifest["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    nodes, devices = MACHINES[cluster]
    assert job["replicas"] * pods["parallelism"] == nodes and pods["completions"] == pods["parallelism"]
    assert container["command"] == ["python", "train.py", *HARD]
    limits = container.get("resources", {}).get("limits", {})
    assert [*limits.values()] == ([] if "cpu" in cluster else [str(devices)])
    environment = {each["name"]: each.get("value") for each in container.get("env", [])}
    is_tpu = "google.com/tpu" in limits
    assert is_tpu or (environment["JAX_NUM_PROCESSES"] == str(nodes) and "JAX_PROCESS_ID" in environment)
    assert is_tpu == ("cloud.google.com/gke-tpu-topology" in pods["template"]["spec"].get("nodeSelector", {}))
    assert job["replicas"] == (2 if cluster.startswith("2*v") else 1)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_task_of_skypilot_has_the_machines(write, run, cluster):
    """A node for each, or one for a slice; several slices are refused."""
    if cluster.startswith("2*v"):
        code, _, err = run("launch", "--write", "sky", "--cluster", cluster, "user_program.py")
        assert code == 2 and "one TPU slice" in err
        return
    task = yaml.safe_load(write("sky", cluster, *HARD))
    jsonschema.validate(task, SKY)
    nodes, devices = MACHINES[cluster]
    accelerators = task.get("resources", {}).get("accelerators", "")
    assert task["num_nodes"] == (1 if accelerators.startswith("tpu") else nodes)
    assert accelerators in ("", f"H100:{devices}", f"GB200:{devices}", "tpu-v5litepod-8", "tpu-v5p-128")
    assert shlex.split(task["run"][task["run"].index("python") :]) == ["python", "train.py", *HARD]
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True, check=False).returncode == 0


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_script_of_ray_has_the_machines(write, cluster):
    """A worker for each, with its devices as resources."""
    tree = ast.parse(write("ray", cluster, *HARD))
    scaling = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "ScalingConfig")
    asked = {each.arg: ast.literal_eval(each.value) for each in scaling.keywords}
    nodes, devices = MACHINES[cluster]
    assert asked["num_workers"] == nodes and ["train.py", *HARD] in [ast.literal_eval(node) for node in ast.walk(tree) if is_strings(node)]
    assert [*asked.get("resources_per_worker", {}).values()] == ([] if "cpu" in cluster else [devices])
    assert ("topology" in asked) == asked.get("use_tpu", False)


def is_strings(node):
    return isinstance(node, ast.List) and node.elts and all(isinstance(each, ast.Constant) for each in node.elts)


def test_a_strategy_says_for_what_it_is(run):
    """Its cluster is that of the file; a module runs as one, and a name that YAML or Kubernetes would misread gets another."""
    code, out, _ = run("launch", "--write", "sky", "--strategy", "gpt_2_h100_8x1_auto", "-m", "on")
    assert code == 0 and yaml.safe_load(out) | {"setup": ""} == {
        "name": "job-on",
        "workdir": ".",
        "num_nodes": 1,
        "resources": {"accelerators": "H100:8"},
        "setup": "",
        "run": yaml.safe_load(out)["run"],
    }
    assert yaml.safe_load(out)["run"].endswith("python -m on\n")


@pytest.mark.parametrize(
    ("options", "piece"),
    [
        (["--write", "slurm"], "one of them"),
        (["--write", "slurm", "--cluster", "cpu:8", "--strategy", "gpt_2_h100_8x1_auto"], "one of them"),
        (["--write", "slurm", "--cluster", "cpu:8", "-n", "2"], "no -n"),
        (["--write", "jobset", "--cluster", "ascend-910b:8x2"], "planning alone"),
        (["--cluster", "cpu:8"], "-n processes"),
        ([], "-n processes"),
    ],
)
def test_what_is_missing_is_said(run, options, piece):
    """A file needs a cluster, and processes of this machine a number."""
    code, _, err = run("launch", *options, "user_program.py")
    assert code == 2 and piece in err


TRAIN = """
import sys
import autoshard
processes = autoshard.distributed.initialize()
import jax, jax.numpy as jnp
def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
w, x = jnp.ones((64, 8)), jnp.ones((32, 64))
w = autoshard.search(step, w, x, cluster=None).apply(step)(w, x)
open(f"{sys.argv[1]}-{processes.index}", "w").write(f"{processes.count} {jax.device_count()} {float(w.sum()):.1f}")
"""


@pytest.mark.slow
def test_the_script_of_ray_runs(write, tmp_path):
    """Two workers of two virtual devices on this machine search and step together."""
    pytest.importorskip("ray.train.v2.jax", reason="the workers are Ray Train's: pip install 'ray[train]'", exc_type=ImportError)
    job = write("ray", "2*cpu:2", tmp_path / "done")
    Path("train.py").write_text(TRAIN, encoding="utf-8")
    Path("job.py").write_text(job, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, "job.py"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [Path(f"done-{index}").read_text() for index in (0, 1)] == ["2 4 -307.2"] * 2
