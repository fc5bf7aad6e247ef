"""06_hybrid/launch: the Slurm script on a real Slurm of two nodes, the manifests against their schemas, the page."""

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from runner import ROOT, run
from torch.distributed.run import get_args_parser

yaml = pytest.importorskip("yaml", reason="pip install pyyaml")

LAUNCH = ROOT / "06_hybrid" / "launch"
FILES = {name: (LAUNCH / name).read_text() for name in ("slurm.sh", "job.yaml", "trainjob.yaml")}
SCRIPT = FILES["slurm.sh"]
SERVICE, JOB = yaml.safe_load_all(FILES["job.yaml"])
RUNTIME, TRAINJOB = yaml.safe_load_all(FILES["trainjob.yaml"])
TRAIN = "06_hybrid/train.py"


# ---- the Slurm script, read ----
def test_bash_takes_the_script():
    subprocess.run(["bash", "-n", LAUNCH / "slurm.sh"], check=True)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="apt install shellcheck")
def test_shellcheck_finds_nothing():
    done = subprocess.run(["shellcheck", LAUNCH / "slurm.sh"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def overlooked(text):
    """Returns the lines that look like options for sbatch, and are none: with a space, or below the first command."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip() and not line.startswith("#"))
    meant = [(i, line) for i, line in enumerate(lines) if re.match(r"\s*#\s*SBATCH\b|#sbatch\b", line)]
    return [line for i, line in meant if i > first or not line.startswith("#SBATCH --")]


def test_sbatch_sees_every_option():
    assert overlooked(SCRIPT) == []
    assert SCRIPT.count("#SBATCH --") > 5


@pytest.mark.parametrize("line", ["# SBATCH --nodes=4", " #SBATCH --nodes=4", "#sbatch --nodes=4", "true\n#SBATCH -N4"])
def test_option_that_sbatch_would_overlook_is_seen(line):
    assert len(overlooked(SCRIPT.replace("#SBATCH --nodes=2", line))) >= 1


def sbatch_option(name):
    return re.search(rf"^#SBATCH --{name}=(\S+)$", SCRIPT, re.MULTILINE)[1]


def slurm_words():
    """Returns (torchrun's words, the script's) of the sbatch line at the top, as Slurm's variables make them."""
    command = shlex.split(re.search(r"^# (sbatch (?:.*\\\n# +)*.*)$", SCRIPT, re.MULTILINE)[1].replace("\\\n#", ""))
    words = re.search(r'^srun .* torchrun (.*) "\$@" &$', SCRIPT.replace("\\\n", ""), re.MULTILINE)[1]
    given = {
        "$SLURM_JOB_NUM_NODES": sbatch_option("nodes"),
        "$ranks": sbatch_option("gpus-per-node"),
        "${MAX_RESTARTS:-3}": "3",
        "$SLURM_JOB_ID": "1",
        "${nodes[0]}:$port": "node0:10001",
    }
    assert command[:2] == ["sbatch", "06_hybrid/launch/slurm.sh"]
    return [given.get(word, word) for word in words.replace('"', "").split()], command[2:]


# ---- what is launched ----
def container(job):
    return job["spec"]["template"]["spec"]["containers"][0]


REPLICATED = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0]
TRAINER = TRAINJOB["spec"]["trainer"]
PODS = [JOB["spec"]["template"]["spec"], REPLICATED["template"]["spec"]["template"]["spec"]]


def launched(name):
    """Returns (torchrun's words, the script's words) of a file."""
    if name == "slurm.sh":
        return slurm_words()
    if name == "job.yaml":
        assert container(JOB)["command"][0] == "torchrun"
        return container(JOB)["command"][1:], container(JOB)["args"]
    assert TRAINER["command"] == ["torchrun"]
    sizes = [f"--nnodes={TRAINER['numNodes']}", f"--nproc-per-node={TRAINER['numProcPerNode']}"]  # as PET_ variables
    return sizes, TRAINER["args"]


@pytest.mark.parametrize("name", FILES)
def test_torchrun_takes_its_flags_and_leaves_the_script_its_own(name):
    before, after = launched(name)
    args = get_args_parser().parse_args([*before, *after])
    assert args.training_script == TRAIN
    assert args.training_script_args == after[1:]
    assert (args.nnodes, args.nproc_per_node) == ("2", "8")
    if name != "trainjob.yaml":  # all of its pods start together, each time
        assert (args.rdzv_backend, args.max_restarts) == ("c10d", 3)


def test_all_three_launch_the_same_run_and_its_mesh_fits_the_ranks():
    flags = [" ".join(launched(name)[1]).replace("=", " ").split() for name in FILES]
    folders = {word for words in flags for word in words if "/8b" in word}
    same = [["SAVED" if word in folders else word for word in words] for words in flags]
    assert same[0] == same[1] == same[2]
    for words in flags:
        assert words[words.index("--save") + 1] == words[words.index("--resume") + 1]
        assert words[words.index("--device") + 1] == "cuda"  # else a node without its GPUs would train on the CPU
    small = ["--layers", 4, "--seq-len", 16]  # the mesh is that of 32 layers
    said = run(TRAIN, "--dry-run", "--world", 16, *flags[0][1:], *small).check().outputs[0]
    assert said.startswith("dry run | 16 ranks | pp 2 x dp 1 x tp 8 |")


def test_pods_gpus_and_ranks_are_as_many():
    assert JOB["spec"]["completions"] == JOB["spec"]["parallelism"] == 2
    assert RUNTIME["spec"]["mlPolicy"]["numNodes"] == TRAINER["numNodes"] == int(sbatch_option("nodes")) == 2
    gpus = [job["limits"]["nvidia.com/gpu"] for job in (container(JOB)["resources"], TRAINER["resourcesPerNode"])]
    assert [*gpus, TRAINER["numProcPerNode"], int(sbatch_option("gpus-per-node"))] == [8] * 4
    assert sbatch_option("ntasks-per-node") == "1"  # torchruns


def test_torchrun_gives_the_ranks_time_to_save_and_ends_before_it_is_killed():
    """Its own 30 s are few; what comes after the ranks (requeue, container) needs some, too."""
    allowed = [re.search(r"TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-(\d+)", SCRIPT)[1]]
    for env in (container(JOB)["env"], TRAINER["env"]):
        allowed += [variable["value"] for variable in env if variable["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    limits = [int(sbatch_option("signal").split("@")[1]), *(pod["terminationGracePeriodSeconds"] for pod in PODS)]
    assert len(allowed) == len(limits)
    assert all(30 < int(wait) < limit for wait, limit in zip(allowed, limits)), (allowed, limits)


def test_pods_find_each_other_by_the_names_of_the_headless_service():
    name = SERVICE["metadata"]["name"]
    assert PODS[0]["subdomain"] == name
    assert SERVICE["spec"]["clusterIP"] == "None"
    assert SERVICE["spec"]["selector"] == {"batch.kubernetes.io/job-name": JOB["metadata"]["name"]}
    endpoint = get_args_parser().parse_args([*launched("job.yaml")[0], TRAIN]).rdzv_endpoint
    assert endpoint.startswith(f"{JOB['metadata']['name']}-0.{name}.$(NAMESPACE).svc.")
    assert "NAMESPACE" in {variable["name"] for variable in container(JOB)["env"]}  # $() is filled in from env alone


def test_a_trainjob_finds_its_runtime_and_a_container_its_volumes():
    assert TRAINJOB["spec"]["runtimeRef"] == {"kind": RUNTIME["kind"], "name": RUNTIME["metadata"]["name"]}
    for pod in PODS:
        mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]} == {"shm", "checkpoints"}
    # What Trainer looks for: kubeflow/trainer, pkg/constants/constants.go, AncestorTrainer and Node.
    assert REPLICATED["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert PODS[1]["containers"][0]["name"] == "node"


# ---- schemas ----
# What releases 2.0 to 2.3 of Trainer have in common. kubeflow/trainer, pkg/apis/trainer/v1alpha1: trainjob_types.go and
# trainingruntime_types.go (torch lost its field in 2.2). kubernetes-sigs/jobset, api/jobset/v1alpha2: jobset_types.go.
FIELDS = {
    "TrainJob": "apiVersion kind metadata spec",
    "TrainJob.spec": "runtimeRef initializer trainer suspend managedBy",
    "TrainJob.spec.runtimeRef": "name apiGroup kind",
    "TrainJob.spec.trainer": "image command args env numNodes resourcesPerNode numProcPerNode",
    "TrainJob.spec.trainer.resourcesPerNode": "claims limits requests",
    "TrainingRuntime": "apiVersion kind metadata spec",
    "TrainingRuntime.spec": "mlPolicy podGroupPolicy template",
    "TrainingRuntime.spec.mlPolicy": "numNodes torch mpi",
    "TrainingRuntime.spec.mlPolicy.torch": "",
    "TrainingRuntime.spec.template": "metadata spec",
    "TrainingRuntime.spec.template.spec": "replicatedJobs network successPolicy failurePolicy startupPolicy suspend "
    "coordinator managedBy ttlSecondsAfterFinished",
    "TrainingRuntime.spec.template.spec.failurePolicy": "maxRestarts restartStrategy rules",
    "TrainingRuntime.spec.template.spec.replicatedJobs": "name groupName template replicas dependsOn",
}


def unknown_fields(value, path):
    """Returns the paths of the fields that FIELDS does not know, in the objects that it does."""
    if isinstance(value, list):
        return [name for item in value for name in unknown_fields(item, path)]
    if path not in FIELDS or not isinstance(value, dict):
        return []
    below = [name for key, item in value.items() for name in unknown_fields(item, f"{path}.{key}")]
    return [f"{path}.{key}" for key in value if key not in FIELDS[path].split()] + below


@pytest.mark.parametrize("manifest", [RUNTIME, TRAINJOB], ids=lambda manifest: manifest["kind"])
def test_trainer_has_the_fields(manifest):
    assert manifest["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert unknown_fields(manifest, manifest["kind"]) == []


def test_field_that_trainer_has_not_is_seen():
    wrong = {"spec": {"template": {"spec": {"replicatedJobs": [{"name": "node", "backoffLimit": 0}], "retries": 1}}}}
    names = unknown_fields(wrong, "TrainingRuntime")
    assert {name.rpartition(".")[2] for name in names} == {"backoffLimit", "retries"}


def test_kubernetes_takes_the_job_the_service_and_what_is_in_the_runtime():
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    inner = {"apiVersion": "batch/v1", "kind": "Job"} | REPLICATED["template"]
    for manifest in (SERVICE, JOB, inner):
        validator.validate(manifest, validator.latest_version(), strict=True)
    wrong = JOB | {"spec": JOB["spec"] | {"completion": 2}}
    with pytest.raises(validator.ValidationError):
        validator.validate(wrong, validator.latest_version(), strict=True)


# ---- the page ----
def code_lines(text):
    """Returns the lines of a file without comments, blanks, indentation and the signs that carry a line on."""
    lines = [re.sub(r"(^|\s+)#(?!SBATCH).*", "", line).strip().removesuffix("\\").strip() for line in text.splitlines()]
    return {line for line in lines if line and line != "---"}


def explained_lines(page, name):
    """Returns the lines that the page's section on a file explains: in items "- `line`, `line`: why"."""
    section = re.search(rf"^## `{re.escape(name)}`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)[1]
    items = re.findall(r"^- ((?:`[^`]+`(?:, )?)+): \S", section, re.MULTILINE)
    return {line for item in items for line in re.findall(r"`([^`]+)`", item)}


@pytest.mark.parametrize("name", FILES)
def test_page_explains_every_line_and_no_line_that_is_gone(name):
    page = (LAUNCH / "README.md").read_text()
    explained = explained_lines(page, name)
    if name == "trainjob.yaml":
        explained |= explained_lines(page, "job.yaml") & code_lines(FILES[name])  # the same lines, for the same reason
    assert sorted(code_lines(FILES[name]) - explained) == []
    assert sorted(explained - code_lines(FILES[name])) == []


# ---- the Slurm script, run ----
EXACT = 1e-9  # float64: sums in another order differ by some 1e-16 per operation, and there are thousands
STEPS = 70  # of 30 ms and more: a signal, sent after some, arrives long before the last
ROWS = 3  # steps that a job makes before it is interrupted
PATIENCE = 120  # seconds for what takes 7 on an idle machine: start two torchruns, import torch in four processes
# Two nodes, each with a network and a host name of its own, in one set of namespaces: all of it ends with its first
# process, and no port is anybody else's. No munge. A job that is requeued waits for cred_expire.
CLUSTER = """
hostname node0
mount --bind hosts /etc/hosts
touch network
unshare --net=network ip link set lo up
ip link set lo up
nsenter --net=network ip link add eth0 type veth peer name eth0 netns 1
ip addr add 10.77.0.1/24 dev eth0
nsenter --net=network ip addr add 10.77.0.2/24 dev eth0
ip link set eth0 up
nsenter --net=network ip link set eth0 up
slurmctld -D -L slurmctld.log &
slurmd -D -N node0 -L node0.log &
nsenter --net=network unshare --uts sh -c 'hostname node1; exec slurmd -D -N node1 -L node1.log' &
echo ready
wait
"""
CONF = """
ClusterName=box
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node[0-1] CPUs=64 RealMemory=1000 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES State=UP
"""
KINDS = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
TOOLS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "ip", "unshare", "nsenter", "setpriv")
FAIL = """
import os, resource, sys
names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "SLURM_CPUS_ON_NODE")
values = [*(os.environ[name] for name in names), resource.getrlimit(resource.RLIMIT_CORE)[0]]
os.write(1, f"rank has {' '.join(map(str, values))}\\n".encode())  # at once, so that the lines of ranks do not mix
sys.exit(3)
"""


def reason_to_skip_slurm():
    if missing := [tool for tool in TOOLS if not shutil.which(tool)]:
        return f"{missing[0]} is missing: apt install slurmctld slurmd slurm-client iproute2"
    if os.geteuid():
        return "slurmd needs root"
    link = "ip link add eth0 type veth peer name eth1"
    tried = subprocess.run(["unshare", *KINDS, "sh", "-c", link], capture_output=True, text=True)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


class Slurm:
    def __init__(self, folder):
        self.folder, self.env = folder, os.environ | {"SLURM_CONF": f"{folder}/slurm.conf", "OMP_NUM_THREADS": "1"}
        self.env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # torchrun beside python
        (folder / "slurm.conf").write_text(CONF.format(folder=folder))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        names = [f"{form}10.77.0.{i + 1} node{i}\n" for i in (0, 1) for form in ("", "::ffff:")]
        (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *names]))
        for i in range(8):  # what Slurm takes for GPUs: devices
            os.mknod(folder / f"gpu{i}", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        log = open(folder / "cluster.log", "w")
        # setpriv: should the tests be killed, all of it ends, too
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *KINDS, "bash", "-ec", CLUSTER]
        self.process = subprocess.Popen(
            command, cwd=folder, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert self.process.stdout.readline() == "ready\n", (folder / "cluster.log").read_text()
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        self.first = int(children.read_text())
        self.wait_for(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).stdout.strip() == "2")

    def run(self, *words, check=True, env=None):
        """Runs a command on node 0, in the repository."""
        enter = ["nsenter", "--target", self.first, "--net", "--mount", "--uts", f"--wd={ROOT}"]
        command = [str(word) for word in [*enter, *words]]
        done = subprocess.run(command, env=self.env | (env or {}), capture_output=True, text=True, timeout=PATIENCE)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done

    def submit(self, log, *words, options=(), **more):
        """Submits slurm.sh with a script and its flags, on two nodes of one GPU; returns the job's number."""
        small = ["--parsable", "--gpus-per-node=1", "--cpus-per-task=1", f"--output={log}", *options]
        return self.run("sbatch", *small, LAUNCH / "slurm.sh", *words, **more).stdout.strip()

    def job(self, number):
        said = self.run("scontrol", "show", "job", "--oneliner", number).stdout
        return dict(re.findall(r"(\w+)=(\S*)", said))

    def wait_for_state(self, number, wanted, log):
        def is_there():
            state = self.job(number)["JobState"]
            assert state in (wanted, "PENDING", "RUNNING", "COMPLETING"), f"{self.job(number)}\n{log.read_text()}"
            return state == wanted

        self.wait_for(is_there, log.read_text)

    def wait_for(self, condition, message=lambda: ""):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, message() + (self.folder / "cluster.log").read_text()
            time.sleep(0.1)

    def end(self):
        """Kills the first process of the namespaces, and with it all others; returns those that are left."""
        os.kill(self.first, signal.SIGKILL)
        self.process.wait()
        left = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                left += [environ.parent.name] * (f"{self.folder}/slurm.conf".encode() in environ.read_bytes())
            except OSError:  # not ours, or gone
                continue
        return left


@pytest.fixture(scope="module")
def slurm():
    if reason := reason_to_skip_slurm():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:  # a short name: slurmd has sockets there
        cluster = Slurm(Path(folder))
        yield cluster
        assert cluster.end() == []


@pytest.fixture(scope="module")
def jobs(slurm, flags, tmp_path_factory):
    """Three jobs. The first is told of its time limit and requeued; while it waits in the queue another one fails; in
    its second start it is cancelled, and the last goes on from there. Returns {what: what is left of it}.
    """
    folder = tmp_path_factory.mktemp("jobs")
    metrics, saved, log, failing = (folder / name for name in ("metrics.jsonl", "saved", "log", "failing"))
    places = ["--metrics", metrics, "--save", saved, "--resume", saved]
    train = [TRAIN, *flags, "--steps", STEPS, "--dtype", "float64", "--pp", 2, *places]
    found = {}

    def rows():
        return metrics.read_text().splitlines() if metrics.exists() else []

    first = slurm.submit(log, *train)
    slurm.wait_for(lambda: len(rows()) >= ROWS, log.read_text)
    slurm.run("scancel", "--batch", "--signal=USR1", first)  # as sbatch's --signal=B:USR1@300 does
    slurm.wait_for_state(first, "PENDING", log)
    found["requeued"], found["rows at the limit"] = slurm.job(first), rows()

    (folder / "fail.py").write_text(FAIL)
    env = {"RANKS_PER_NODE": "2", "MAX_RESTARTS": "0", "OMP_NUM_THREADS": ""}
    failed = slurm.submit(failing, folder / "fail.py", options=["--cpus-per-task=4"], env=env)
    slurm.wait_for_state(failed, "FAILED", failing)
    found["failed"], found["log of the failed"] = slurm.job(failed), failing.read_text()

    slurm.wait_for(lambda: len(rows()) >= len(found["rows at the limit"]) + ROWS, log.read_text)
    slurm.run("scancel", first)
    slurm.wait_for_state(first, "CANCELLED", log)
    found["cancelled"], found["rows when cancelled"] = slurm.job(first), rows()
    found["steps saved"] = [json.loads(note.read_text())["step"] for note in saved.glob("*/checkpoint.json")]

    last = slurm.submit(log, *train)
    slurm.wait_for_state(last, "COMPLETED", log)
    return found | {"last": slurm.job(last), "rows": rows(), "log": log.read_text()}


def test_sbatch_would_start_the_script_as_it_stands(slurm):
    said = slurm.run("sbatch", "--test-only", LAUNCH / "slurm.sh", TRAIN).stderr
    assert "using 128 processors on nodes node[0-1]" in said


def test_time_limit_makes_the_job_save_and_go_back_to_the_queue(jobs):
    assert jobs["requeued"]["Restarts"] == "1"
    assert ROWS <= len(jobs["rows at the limit"]) < STEPS
    # Nothing is done twice: the same lines, to the last digit of the time that a step took.
    assert jobs["rows when cancelled"][: len(jobs["rows at the limit"])] == jobs["rows at the limit"]
    assert jobs["log"].count("time limit: saving\n") == 1  # the log of the first start is there, too


def test_cancelled_job_saves_and_stays_cancelled(jobs):
    assert jobs["cancelled"]["Restarts"] == "1"
    assert len(jobs["rows at the limit"]) < len(jobs["rows when cancelled"]) < STEPS
    assert max(jobs["steps saved"]) == len(jobs["rows when cancelled"])
    assert jobs["rows"][: len(jobs["rows when cancelled"])] == jobs["rows when cancelled"]


def test_job_that_is_done_has_completed_and_is_not_requeued(jobs):
    assert (jobs["last"]["ExitCode"], jobs["last"]["Restarts"]) == ("0:0", "0")


def test_losses_are_those_of_a_run_that_nothing_interrupted(jobs, serial):
    expected, rows = serial(torch.float64, STEPS), [json.loads(row) for row in jobs["rows"]]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == pytest.approx(expected.losses, rel=EXACT)
    assert [row["grad_norm"] for row in rows] == pytest.approx(expected.grad_norms, rel=EXACT)


def test_ranks_are_on_both_nodes(jobs):
    assert "@0 is node0: 1 rank, 0\n@1 is node1: 1 rank, 1\n" in jobs["log"]


def test_failed_run_fails_the_job(jobs):
    assert (jobs["failed"]["ExitCode"], jobs["failed"]["Restarts"]) == ("1:0", "0")  # torchrun's, whatever the ranks'
    assert re.search(r"exitcode +: 3 ", jobs["log of the failed"])


def test_ranks_get_the_interface_between_the_nodes_the_cpus_of_their_node_and_no_core_files(jobs):
    said = re.findall(r"^rank has (.+)$", jobs["log of the failed"], re.MULTILINE)
    assert set(said) == {"eth0 eth0 2 4 0"}  # 2 threads for each of 2 ranks, of 4 CPUs
