"""Launching a run on several hosts, as far as one machine permits: SLURM, Kubernetes, TPUs.

`srun` is a small stand-in that starts the processes on this machine.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import launch_scripts
import launched
import pytest
import yaml

LAUNCH = launched.ROOT / "launch"
# Prints its arguments and its place in the job.
ECHO = '#!/bin/sh\necho "process $SLURM_PROCID of $SLURM_NTASKS: $*"\n'
# Takes its own flags, and runs the rest SLURM_NTASKS times.
SRUN = """#!/bin/bash
while [ "${1#--}" != "$1" ]; do
  case $1 in --output=*) output=${1#*=} ;; esac
  shift
done
for ((rank = 0; rank < SLURM_NTASKS; rank++)); do
  SLURM_PROCID=$rank SLURM_LOCALID=0 SLURM_STEP_NODELIST=127.0.0.1 SLURM_STEP_NUM_NODES=1 \\
    "$@" >"${output//%t/$rank}" 2>&1 &
done
wait
"""


def tool(path: pathlib.Path, text: str) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
  path.chmod(0o755)


def read(name: str) -> dict[str, Any]:
  [found] = yaml.safe_load_all((LAUNCH / name).read_text())
  return found


@pytest.mark.parametrize("path", sorted(LAUNCH.rglob("*.s[hb]*")), ids=lambda path: path.name)
def test_every_script_is_bash(path):
  done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr


def slurm(root: pathlib.Path, *arguments: str, **others: str) -> subprocess.CompletedProcess:
  tool(root / "tools" / "srun", SRUN)
  tool(root / "tools" / "scontrol", f'#!/bin/sh\necho "$*" >"{root}/scontrol"\n')
  if not (root / "launch").exists():
    (root / "launch").symlink_to(LAUNCH)
  return subprocess.run(
    ["bash", str(LAUNCH / "slurm" / "run.sbatch"), *arguments],
    cwd=root,
    env=os.environ
    | {"PATH": f"{root / 'tools'}:{os.environ['PATH']}", "SLURM_JOB_ID": "31", "SLURM_NTASKS": "2"}
    | others,
    capture_output=True,
    text=True,
  )


def test_slurm_begins_a_process_a_task_and_resumes_what_has_begun(tmp_path):
  tool(tmp_path / ".venv" / "bin" / "python", ECHO)
  done = slurm(tmp_path, "experiments.other", "--x=1")
  assert done.returncode == 0, done.stderr
  for rank in (0, 1):
    assert (tmp_path / f"runs/slurm-31.logs/process_{rank}.log").read_text() == (
      f"process {rank} of 2: -P -m experiments.other --x=1 --workdir=runs/slurm-31"
      " --num_processes=2 --launcher=slurm\n"
    )
  (tmp_path / "mine" / "checkpoints").mkdir(parents=True)
  assert slurm(tmp_path, "--workdir=mine").returncode == 0
  assert (tmp_path / "mine.logs/process_1.log").read_text() == (
    "process 1 of 2: -P -m seerjax.commands train --workdir=mine --workdir=mine --resume"
    " --num_processes=2 --launcher=slurm\n"
  )


def test_a_job_that_hangs_is_begun_again_and_one_that_fails_is_not(tmp_path):
  limits = {"SEERJAX_HANGS_AFTER": "1", "SEERJAX_LOOKS_EVERY": "0.1"}
  python = tmp_path / ".venv" / "bin" / "python"
  tool(python, "#!/bin/sh\nexit 3\n")
  slurm(tmp_path, **limits)
  assert not (tmp_path / "scontrol").exists()
  hangs = (
    "#!/bin/sh\nfor word; do case $word in --workdir=*) place=${word#*=} ;; esac; done\n"
    'mkdir -p "$place"; sleep 0.3; echo {} >"$place/status.json"; exec sleep 60\n'
  )
  tool(python, hangs)
  done = slurm(tmp_path, **limits)
  assert done.returncode == 75, done.stderr
  assert "got no status from runs/slurm-31 for 1 s, expected one every 10 s" in done.stderr
  assert (tmp_path / "scontrol").read_text() == "requeue 31\n"


@pytest.mark.parametrize(
  "command, status",
  [
    ("exit 3", 3),
    ("exit 0", 0),
    # The previous run's last status is old, and this run has written none yet.
    ("sleep 1", 0),
    ('for i in 1 2 3 4 5 6; do echo {} >"$0/status.json"; sleep 0.3; done', 0),
    ('echo {} >"$0/status.json"; sleep 60', 75),
    ('trap "" TERM; kill -9 $$', 137),
  ],
)
def test_a_watched_run_ends_as_it_ends_or_when_it_hangs(tmp_path, command: str, status: int):
  (tmp_path / "status.json").write_text("{}")
  os.utime(tmp_path / "status.json", (0, 0))
  done = subprocess.run(
    ["bash", str(LAUNCH / "watched.sh"), str(tmp_path), "bash", "-c", f"sleep 0.1; {command}",
     str(tmp_path)],
    env=os.environ | {"SEERJAX_HANGS_AFTER": "1", "SEERJAX_LOOKS_EVERY": "0.1"},
    capture_output=True,
    text=True,
  )  # fmt: skip
  assert done.returncode == status, done.stderr


def test_a_run_is_alive_while_its_status_is_young(tmp_path):
  alive = lambda *seconds: subprocess.run(
    ["bash", str(LAUNCH / "alive.sh"), str(tmp_path), *seconds], capture_output=True, text=True
  )
  assert "got no update for 120 s" in alive().stderr
  (tmp_path / "status.json").write_text("{}")
  assert alive().returncode == 0
  ago = time.time() - 200
  os.utime(tmp_path / "status.json", (ago, ago))
  assert alive().returncode == 1 and alive("300").returncode == 0


def asks_for_an_accelerator(pod: dict[str, Any]) -> bool:
  [container] = pod["containers"]
  resources = container["resources"]
  assert resources["requests"]["memory"] == resources["limits"]["memory"]
  assert "cloud.google.com/gke-accelerator" in pod["nodeSelector"]
  return int(resources["limits"]["nvidia.com/gpu"]) == 1


def test_pods_ask_for_accelerators_and_their_life_is_the_runs_status(tmp_path):
  [part] = read("gke/jobset.yaml")["spec"]["replicatedJobs"]
  pod = part["template"]["spec"]["template"]["spec"]
  assert asks_for_an_accelerator(pod)
  [container] = pod["containers"]
  (tmp_path / "launch").symlink_to(LAUNCH)
  workdir = next(one["value"] for one in container["env"] if one["name"] == "WORKDIR")
  for name in ("startupProbe", "livenessProbe"):
    command = container[name]["exec"]["command"]
    assert workdir in command
    (tmp_path / "status.json").unlink(missing_ok=True)
    words = [str(tmp_path) if word == workdir else word for word in command]
    assert subprocess.run(words, cwd=tmp_path, capture_output=True).returncode == 1
    (tmp_path / "status.json").write_text("{}")
    assert subprocess.run(words, cwd=tmp_path, capture_output=True).returncode == 0
  cluster = read("gke/rayjob.yaml")["spec"]["rayClusterSpec"]
  for one in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
    assert asks_for_an_accelerator(one["template"]["spec"])
  slurm_lines = (LAUNCH / "slurm" / "run.sbatch").read_text().splitlines()
  assert "#SBATCH --gpus-per-node=1" in slurm_lines


@pytest.mark.thorough
def test_processes_that_slurm_begins_find_each_other(tmp_path):
  program = (
    "import sys, jax; from seerjax import agreement, parallel\n"
    "config = parallel.SliceConfig(num_processes=2, launcher='slurm')\n"
    "parallel.start(config, num_devices=2)\n"
    "print('got', agreement.from_first(lambda: 'by the first'), jax.process_index(), flush=True)\n"
  )
  (tmp_path / "program.py").write_text(program)
  python = f'#!/bin/sh\nPYTHONPATH={launched.ROOT} exec {sys.executable} "{tmp_path}/program.py"\n'
  tool(tmp_path / ".venv" / "bin" / "python", python)
  assert slurm(tmp_path).returncode == 0
  for rank in (0, 1):
    text = (tmp_path / f"runs/slurm-31.logs/process_{rank}.log").read_text()
    assert f"got by the first {rank}" in text, text


def test_a_jobsets_pods_are_the_processes_of_one_slice(tmp_path):
  jobset = read("gke/jobset.yaml")
  assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
  [part] = jobset["spec"]["replicatedJobs"]
  job = part["template"]["spec"]
  assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"] == 2
  assert job["backoffLimit"] == 0 and jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
  pod = job["template"]["spec"]
  [container] = pod["containers"]
  given = {one["name"]: one["value"] for one in container["env"]}
  # JobSet's name of the first pod: JOBSET-JOB-REPLICA-INDEX.SUBDOMAIN.
  name, port = jobset["metadata"]["name"], container["ports"][0]["containerPort"]
  assert given["COORDINATOR"] == f"{name}-{part['name']}-0-0.{name}:{port}"
  assert given["NUM_PROCESSES"] == str(job["completions"])
  mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
  assert {one["name"] for one in pod["volumes"]} == set(mounts)
  assert given["WORKDIR"].startswith(mounts["runs"])

  tool(tmp_path / ".venv" / "bin" / "python", '#!/bin/sh\necho "$*"\n')
  run = dict(cwd=tmp_path, capture_output=True, text=True)
  given |= {"WORKDIR": str(tmp_path / "run"), "JOB_COMPLETION_INDEX": "1"}
  output = subprocess.run(container["command"], env=os.environ | given, **run).stdout
  assert output == (
    f"-P -m seerjax.commands train --workdir={tmp_path}/run --config.data_parallel_size=2"
    f" --num_processes=2 --process_id=1 --coordinator={given['COORDINATOR']}\n"
  )
  (tmp_path / "run" / "checkpoints").mkdir(parents=True)
  assert "--resume" in subprocess.run(container["command"], env=os.environ | given, **run).stdout


def test_a_rayjobs_workers_are_those_of_the_run(tmp_path):
  job = read("gke/rayjob.yaml")
  assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
  cluster = job["spec"]["rayClusterSpec"]
  locks = sorted((LAUNCH / "locks").glob("cluster-*.txt"))
  assert locks
  for lock in locks:
    assert f"ray=={cluster['rayVersion']}\n" in lock.read_text()
  [group] = cluster["workerGroupSpecs"]
  assert group["replicas"] == group["maxReplicas"] == 2
  assert group["rayStartParams"] == {"num-cpus": "1"}
  assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
  for one in (cluster["headGroupSpec"], group):
    [container] = one["template"]["spec"]["containers"]
    assert {"name": "PYTHONPATH", "value": "/seerjax"} in container["env"]

  tool(tmp_path / ".venv" / "bin" / "python", '#!/bin/sh\necho "$*"\n')
  (tmp_path / "launch").symlink_to(LAUNCH)
  entrypoint = job["spec"]["entrypoint"].replace("/seerjax", str(tmp_path))
  given = os.environ | {"WORKDIR": str(tmp_path / "run")}
  run = dict(shell=True, env=given, capture_output=True, text=True)
  assert subprocess.run(entrypoint, **run).stdout == (
    f"-P -m seerjax.commands train --workdir={tmp_path}/run --config.cluster.workers=2"
    " --config.cluster.address=auto\n"
  )
  checkpoints = tmp_path / "run" / "checkpoints"
  checkpoints.mkdir(parents=True)
  assert f"--workdir={tmp_path}/run --resume" in subprocess.run(entrypoint, **run).stdout
  # Checkpoints in a store: the later numbers belong to them.
  checkpoints.rmdir()
  checkpoints.write_text("gs://bucket/run\n")
  assert "--resume" not in subprocess.run(entrypoint, **run).stdout
  (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0}\n')
  assert "--resume" in subprocess.run(entrypoint, **run).stdout


def test_every_host_of_a_tpu_runs_one_command(tmp_path):
  tool(tmp_path / "gcloud", '#!/bin/sh\nfor word; do echo "<$word>"; done\n')
  asked = ("--tpu=pod", "--zone=a", "--hosts=4", "train", "--workdir=/gcs/my run")
  status, text = launch_scripts.run("tpu_pod", *asked, PATH=f"{tmp_path}:{os.environ['PATH']}")
  assert status == 0
  command = (
    "cd seerjax && exec bash launch/local.sh --platform=tpu train"
    r" --workdir=/gcs/my\ run --num_processes=4 --launcher=gcetpu"
  )
  words = re.findall(r"<(.*)>", text)
  assert words[:5] == ["compute", "tpus", "tpu-vm", "ssh", "pod"]
  assert words[5:] == ["--zone=a", "--worker=all", f"--command={command}"]
  assert launch_scripts.run("tpu_pod", *asked, "--dry-run")[1] == f"on every host: {command}\n"
  assert "has never run on a TPU" in launch_scripts.run("tpu_pod", "--help")[1]


@pytest.mark.parametrize(
  "arguments, message",
  [
    ((), "got --tpu='', --zone='', expected both; write --tpu=NAME --zone=ZONE."),
    (("--tpu=a", "--zone=b"), "--hosts: got '', expected a number of at least 1; write --hosts=4."),
    (("--tpu=a", "--zone=b", "--hosts=2", "experiments.none"), "got the experiment"),
  ],
)
def test_a_tpu_that_is_not_named_is_refused(arguments, message):
  status, text = launch_scripts.run("tpu_pod", *arguments)
  assert status == 1 and message in text


def test_without_gcloud_it_is_named(tmp_path):
  for name in ("bash", "dirname", "tr"):
    (tmp_path / name).symlink_to(subprocess.getoutput(f"command -v {name}"))
  asked = ("--tpu=pod", "--zone=a", "--hosts=4")
  status, text = launch_scripts.run("tpu_pod", *asked, PATH=str(tmp_path))
  assert status == 1 and "got no gcloud, expected Google Cloud's command line; install it" in text
