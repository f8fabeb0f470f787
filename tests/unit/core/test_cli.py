"""Commands that need no cluster."""

import json
import os
import re
import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from typer import Context
from typer.main import get_command
from typer.testing import CliRunner

from examples.tiny_policy import build_tokenizer
from rlsys.cli import KINDS_OF_COMMANDS, app
from rlsys.config import Config
from rlsys.errors import ConfigError, DataError, ModelError
from rlsys.launch import with_device_defaults
from tests.histories import small_run

pytestmark = pytest.mark.slow

RLSYS = Path(sys.executable).with_name("rlsys")
HEAVY = ("torch", "ray", "transformers", "numpy", "datasets")


@pytest.fixture
def job(tmp_path: Path) -> str:
    path, tasks = tmp_path / "job.yaml", tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "23>", "answer": 5}\n')
    build_tokenizer().save_pretrained(tmp_path / "tokenizer")
    path.write_text(f"run: {{steps: 5}}\nmodel: {{path: {tmp_path}/tokenizer}}\ndata: {{path: {tasks}}}\n")
    return str(path)


def test_show_prints_what_loads_back_as_the_same_configuration(job: str, tmp_path: Path):
    shown = CliRunner().invoke(app, ["config", "show", job, "--train.lr=1e-5", "algorithm.clip_high=0.3"])
    assert shown.exit_code == 0
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(shown.stdout)
    given = Config.load(job, ["train.lr=1e-5", "algorithm.clip_high=0.3"])
    assert Config.load(resolved) == with_device_defaults(given)


PLAN = [str(Path(__file__).parents[3] / "docs" / "plan" / "run.yaml"), "train.activation_checkpointing=full"]
PLAN.append(f"model.path={Path(PLAN[0]).with_name('qwen2.5-0.5b')}")


def test_a_plan_says_what_the_job_needs(job: str):
    options = ["asynchrony.max_staleness=1", "rollout.replicas=2", "resources.rollout.gpus=1", "algorithm.kl_coef=0.1"]
    done = CliRunner().invoke(app, ["plan", job, "--json", "--gpu-memory", "80GB", PLAN[-1], *options])
    assert done.exit_code == 0
    resources = json.loads(done.stdout)["resources"]
    assert (resources["permits"], resources["samples_per_step"], resources["max_staleness"]) == (64, 256, 1)
    assert (resources["num_cpus"], resources["num_gpus"]) == (5.0, 2.0)
    assert [(r["name"], r["count"]) for r in resources["roles"]] == [
        ("rollout", 2),
        ("reward", 1),
        ("actor rank", 1),
        ("reference", 1),
    ]


def test_a_plan_prints_a_row_for_each_worker():
    done = CliRunner().invoke(app, ["plan", *PLAN, "--gpus", "8", "--gpu-memory", "80GB"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"\d+ groups in the pipe at most, so no token is more than \d+ steps? stale", lines[2])
    assert "8 GPUs reserved:" in done.stdout
    head, *rows = lines[next(n for n, line in enumerate(lines) if line.startswith("GB on each device  ")) :]
    assert head.split()[-1] == "limit"
    assert [row.split("  ")[0] for row in rows[:2]] == ["actor rank", "rollout"]
    assert rows[-2] == "planned for GPUs: 8 x 80.0 GB; 8 reserved"
    assert rows[-1].startswith("published weights in host memory: at most ")


@pytest.mark.slow
def test_a_plan_that_does_not_fit_ends_with_2_and_the_nearest():
    arguments = [*PLAN, "--gpus", "8", "--gpu-memory", "4GB", "--json"]
    done = subprocess.run([RLSYS, "plan", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert json.loads(done.stdout)["fits"] is False
    assert done.stderr.startswith("rlsys: this does not fit on 8 x 4.0 GB:\n  actor rank: ")
    assert "what fits:" in done.stderr
    assert "Traceback" not in done.stderr


def test_each_command_says_one_thing(job: str):
    checked, shown, dry, planned = (
        CliRunner().invoke(app, [*command, job, PLAN[-1], "reward.fn=exact", "algorithm.group_size=4"]).stdout
        for command in (["config", "check"], ["config", "show"], ["train", "--dry-run"], ["plan"])
    )
    of_keys, of_resources = "group_size: 4", "CPUs and 0 GPUs reserved"
    assert [of_keys in text for text in (checked, shown, dry, planned)] == [False, True, False, False]
    assert [of_resources in text for text in (checked, shown, dry, planned)] == [False, False, False, True]
    assert ["reward of the reply" in text for text in (checked, shown, dry, planned)] == [False, False, True, False]
    assert checked == "the configuration is valid\n"


JUDGE = "def judge(completion, level): return 0.0\n"
OFFLINE = ["rollout.workflow=offline", "algorithm.type=kto", "algorithm.group_size=1"]


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        (["model.path=HERE/none"], ModelError, r"model\.path: there is no folder .*none"),
        (["data.path=HERE/none.jsonl"], DataError, r"^data\.path: cannot read .*none\.jsonl: No such file"),
        (["eval.data=HERE/none.jsonl", "eval.every=1"], DataError, r"^eval\.data\.none: cannot read .*none\.jsonl"),
        (["reward.fn=HERE/judge.py:none"], ConfigError, r"judge\.py has no function none; it has judge"),
        (["reward.fn=HERE/judge.py:judge"], ConfigError, r"^data\.path: reward .* asks for level, which no"),
        (["rollout.workflow=json:None_"], ConfigError, r"rollout\.workflow\.type: module 'json' has no 'None_'"),
        (OFFLINE, DataError, r"data\.path: 1 row cannot be used by .*=offline\n  row 1: no `label`; .* prompt"),
        (OFFLINE[:-1], ConfigError, r"algorithm\.group_size: 8 episodes of a row"),
    ],
)
def test_a_dry_run_looks_up_what_the_job_needs(job: str, tmp_path: Path, options, kind, words):
    (tmp_path / "judge.py").write_text(JUDGE)
    done = CliRunner().invoke(app, ["train", job, "--dry-run", *(o.replace("HERE", str(tmp_path)) for o in options)])
    assert isinstance(done.exception, kind)
    assert re.search(words, str(done.exception))


def test_reward_columns_must_be_in_every_row_of_every_set(job: str, tmp_path: Path):
    (tmp_path / "judge.py").write_text(JUDGE)
    rows = [{"prompt": f"{n}>", "level": 1} for n in range(150)]

    def written(name: str, *more: dict) -> str:
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, *more]))
        return str(path)

    whole, partial = written("whole.jsonl"), written("partial.jsonl", {"prompt": "1>"})
    keys = [f"reward.fn={tmp_path}/judge.py:judge", "eval.every=1", f"eval.data={whole}"]

    def outcome(*more: str) -> str:
        return str(CliRunner().invoke(app, ["train", job, "--dry-run", *keys, *more]).exception)

    assert outcome(f"data.path={whole}") == "None"
    assert outcome(f"data.path={partial}").startswith("data.path: reward ")
    more = [f"data.path={whole}", "eval.data=", f"eval.data={{hard: {partial}}}"]
    assert outcome(*more).startswith("eval.data.hard: reward ")


def test_replicas_that_only_evaluate_are_counted_where_there_are_any(job: str):
    def roles(*options: str) -> list[tuple[str, int, float]]:
        keys = [
            f"eval.data={Path(job).with_name('tasks.jsonl')}",
            "eval.replicas=2",
            "resources.rollout.gpus=1",
            *options,
        ]
        done = CliRunner().invoke(app, ["plan", job, "--json", "--gpu-memory", "80GB", PLAN[-1], *keys])
        return [(r["name"], r["count"], r["num_gpus"]) for r in json.loads(done.stdout)["resources"]["roles"]]

    training = [("rollout", 1, 1.0), ("reward", 1, 0.0), ("actor rank", 1, 0.0)]
    assert roles() == training
    assert roles("eval.every=5") == [*training, ("evaluation", 2, 1.0)]


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ([], ConfigError, r"eval\.data: there is nothing to evaluate on; set it, or give a file: `--data"),
        (["--data", "HERE/none.jsonl"], DataError, r"eval\.data\.none: cannot read .*none\.jsonl: No such file"),
        (
            ["--data", "a=HERE/none.jsonl", "--data", "HERE/empty.jsonl"],
            DataError,
            r"\.a: cannot(.|\n)*\.empty: .*no rows",
        ),
        (["--data", "x/a.jsonl", "--data", "y/a.jsonl"], ConfigError, r"two data sets are called a: x/a.jsonl and y/a"),
        (
            ["--data", "a=1.jsonl", "--data", "a=2.jsonl"],
            ConfigError,
            r"two data sets are called a: 1.jsonl and 2.jsonl",
        ),
        (["--data", "a b=1.jsonl"], ConfigError, r"eval\.data\.a b=1: the name of a data set is letters"),
        (["--data", "a.jsonl", "--n", "4"], ConfigError, r"eval\.samples: greedy samples of a task are all the same"),
        (["--data", "HERE/run=3/x.jsonl"], DataError, r"eval\.data\.x: cannot read .*run=3/x\.jsonl: No such file"),
        (["--data", "a.jsonl", "--limit", "0"], ConfigError, r"eval\.limit: input should be greater than 0"),
    ],
)
def test_an_evaluation_without_usable_data_ends_before_anything_starts(tmp_path: Path, options, kind, words):
    (tmp_path / "empty.jsonl").touch()
    arguments = [option.replace("HERE", str(tmp_path)) for option in options]
    done = CliRunner().invoke(app, ["eval", "org/model", *arguments])
    assert isinstance(done.exception, kind)
    assert re.search(words, str(done.exception))


@pytest.mark.parametrize("target", ["HERE", "HERE/none", "HERE/empty.jsonl"])
def test_a_local_path_without_run_or_model_is_refused(tmp_path: Path, target: str):
    (tmp_path / "empty.jsonl").touch()
    target = target.replace("HERE", str(tmp_path))
    done = CliRunner().invoke(app, ["eval", target, "--data", str(tmp_path / "empty.jsonl")])
    assert isinstance(done.exception, ConfigError)
    reason = "is neither a run directory (it has no config.resolved.yaml) nor a model folder"
    assert str(done.exception) == f"{target} {reason}"


def test_a_dry_run_of_a_run_that_cannot_begin_ends_as_the_run_does(job: str, tmp_path: Path):
    small_run(tmp_path / "runs" / "a")
    keys = [f"run.folder={tmp_path}/runs", "run.name=a", "policies={p: {}, q: {train: null}}", "agents={lead: p, x: q}"]
    done = CliRunner().invoke(app, ["train", job, "--dry-run", *keys])
    assert isinstance(done.exception, ConfigError)
    assert "contains a run of one policy, and this run has several" in str(done.exception)


def test_a_dry_run_tries_the_reward_and_says_that_it_found_everything(job: str):
    done = CliRunner().invoke(app, ["train", job, "--dry-run"])
    first, last = done.stdout.splitlines()
    assert re.fullmatch(r"reward of the reply '5' to task '\w+': 1.0, exact 1", first)
    assert last == "found what 5 steps in runs/run need; `rlsys plan` shows what they take"
    printed = json.loads(CliRunner().invoke(app, ["train", job, "--dry-run", "--json"]).stdout)
    assert (printed["steps"], printed["lines"]) == (5, [first])


def test_the_schema_is_json_and_holds_the_installed_algorithms():
    schema = json.loads(CliRunner().invoke(app, ["config", "schema"]).stdout)
    choices = schema["properties"]["algorithm"]["anyOf"]
    assert {"const": "grpo"} in [c.get("properties", {}).get("type") for c in choices]


def test_installed_plugins_are_listed_in_columns():
    lines = CliRunner().invoke(app, ["algorithms"]).stdout.splitlines()
    assert lines == sorted(lines, key=lambda line: line.split()[1]), "algorithms first"
    for name, kind, place in (
        ("grpo", "algorithm", "algorithms.grpo:GRPO"),
        ("gac", "stabilizer", "algorithms.gac:GAC"),
        ("single_turn", "workflow", "rlsys.agents.workflow:SingleTurn"),
    ):
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert line.split()[1:3] == [kind, place]
    assert len({re.search(r"\S+:\S+", line).start() for line in lines}) == 1  # type: ignore[union-attr]


def test_an_unknown_option_is_a_usage_error(job: str):
    done = CliRunner().invoke(app, ["train", job, "--jsn"])
    assert done.exit_code == 2
    assert "no such option: --jsn" in done.stderr


def test_a_wrong_configuration_ends_with_2_and_no_traceback(job: str):
    done = subprocess.run([RLSYS, "train", job, "train.lrr=1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "rlsys: 1 problem in the configuration:\n"
        "  command line: train.lrr=1: train.lrr: unknown key; did you mean `train.lr`?\n"
    )


def test_a_query_prints_a_table_or_json(tmp_path: Path):
    run = str(small_run(tmp_path / "run"))
    query = "select step, outcome from episodes where truncated and step < 3 order by step"
    done = CliRunner().invoke(app, ["query", run, query])
    assert done.stdout.splitlines() == ["step  outcome", "   1  truncated", "   2  truncated"]
    found = json.loads(CliRunner().invoke(app, ["query", run, query, "--json"]).stdout)
    assert (found["num_rows"], [row["step"] for row in found["rows"]]) == (2, [1, 2])


def test_a_bad_query_ends_with_2_and_the_nearest_column(tmp_path: Path):
    run = str(small_run(tmp_path / "run"))
    done = subprocess.run(
        [RLSYS, "query", run, "select task from episodes where rewrd < 1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "did you mean `reward`?" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("verb", "code"), [(["algorithms"], 0), (["export", "none", "--to", "x"], 2)])
def test_nobody_reading_does_not_change_the_exit_code(verb: list[str], code: int):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rlsys.cli", *verb]
    assert subprocess.run(command, stdout=writer, stderr=writer, check=False).returncode == code
    os.close(writer)


def test_a_result_that_a_full_disk_does_not_take_is_an_error():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [sys.executable, "-m", "rlsys.cli", "algorithms"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (
        1,
        "rlsys: cannot write the result to stdout: No space left on device\n",
    )


def cpu_s_of_children() -> float:
    """CPU time of all child processes that have ended, which does not grow with the load of the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("verb", [["--help"], ["config", "check", "JOB"]])
def test_commands_without_a_cluster_start_fast_without_heavy_imports(job: str, verb: list[str]):
    arguments = [job if part == "JOB" else part for part in verb]
    program = f"import sys; sys.argv[1:] = {arguments}\nfrom rlsys.cli import main\n"
    program += f"try: main()\nfinally: print([m for m in {HEAVY} if m in sys.modules])"
    before_s = cpu_s_of_children()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    took_s = cpu_s_of_children() - before_s
    assert done.stdout.splitlines()[-1] == "[]"
    assert took_s < 3, f"took {took_s:.1f} s of a processor; on a quiet machine it takes less than 1"


# ------------------------------------------------------------------------------------------------------------ simulate

LITTLE = ["local", "--steps", "4", "groups_per_step=2"]


def test_a_sweep_ends_with_json_of_speedups_over_zero():
    done = CliRunner().invoke(app, ["simulate", *LITTLE, "--sweep", "max_staleness=1,0,2", "--json"])
    assert done.exit_code == 0
    said = json.loads(done.stdout.splitlines()[-1])
    assert list(said["speedup"]) == ["1", "0", "2"]
    assert said["baseline"] == "0"
    rates = {value: run["tokens_per_s"] for value, run in said["runs"].items()}
    assert said["speedup"] == pytest.approx({value: rate / rates["0"] for value, rate in rates.items()})


def test_a_simulation_prints_a_table_and_writes_a_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "sweep.png"
    done = CliRunner().invoke(app, ["simulate", *LITTLE, "--sweep", "max_staleness=0,2", "--plot", str(plot)])
    assert done.exit_code == 0
    assert re.search(r"throughput over that of 0 +ratio +1\.00 +\d", done.stdout)
    assert plot.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["arael"], r"unknown profile 'arael'; did you mean `areal`"),
        (["none.yaml"], r"cannot read configuration none\.yaml"),
        (["local", "maxstaleness=3", "train.fix_s=1"], r"(?s)2 problems.*`train\.fixed_s`.*`max_staleness`"),
        (["local", "clip_low=3"], r"clip_low: unknown key; the top level has"),
        (["local", "--sweep", "weight_change=between,inflight"], r"'between', 'inflight': only numbers can be swept"),
        (["local", "--sweep", "max_staleness=1,inf"], r"'inf': only numbers"),
        (["local", "--sweep", "max_staleness"], r"give KEY=VALUE,VALUE"),
        (["local", "--sweep", "max_staleness=1,1"], r"names a value twice"),
        (["local", "--sweep", "weight_change=1,2"], r"weight_change: input should be 'between'"),
        (["local", "inference_share=1"], r"inference_share: input should be less than 1"),
        (["local", "inference_share=0.1"], r"gpus_per_replica: 0 GPUs sample, and one replica needs 1: 0 replicas"),
        (["local", "max_staleness=-1", "slots=0"], r"(?s)2 problems.*slots.*max_staleness"),
        (["local", "routing=prefix"], r"routing: .* needs weight_change: inflight"),
        (["local", "response.cap=40"], r"response: a mean of 48 is not below the cap of 40"),
        (["areal", "cache_tokens=1000"], r"cache_tokens: an episode may hold 28672 tokens"),
        (["local", "--plot", "nowhere/x.png"], r"there is no folder .*nowhere"),
        (["local", "--plot", "x.txt"], r"should end in \.png"),
    ],
)
def test_a_simulation_that_cannot_be_is_refused_with_the_remedy(arguments: list[str], words: str):
    done = CliRunner().invoke(app, ["simulate", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.exit_code == 2
    assert re.search(words, str(done.exception))


def test_simulate_knows_its_options():
    done = CliRunner().invoke(app, ["simulate", "local", "--stepz", "3"])
    assert done.exit_code == 2


def test_a_folder_without_a_failed_step_ends_with_2(tmp_path: Path):
    done = subprocess.run([RLSYS, "replay", str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"rlsys: {tmp_path} contains no failed step")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give one of --to FOLDER and --push ORG/NAME"),
        (["--to", "a", "--push", "me/a"], "give one of --to FOLDER and --push ORG/NAME"),
        (["--to", "a", "--public"], "--public needs --push"),
    ],
)
def test_an_export_has_one_destination(options: list[str], words: str):
    done = CliRunner().invoke(app, ["export", "run", *options])
    assert (done.exit_code, words in done.stderr) == (2, True)


def test_help_lists_every_command_once_by_its_kind() -> None:
    listed = [name for names in KINDS_OF_COMMANDS.values() for name in names]
    command = get_command(app)
    assert sorted(listed) == sorted(command.list_commands(Context(command)))  # type: ignore[attr-defined]
    shown = CliRunner().invoke(app, ["--help"]).output
    assert all(f"\n{kind}:\n" in shown for kind in KINDS_OF_COMMANDS)
    assert all(f"\n  {name} " in shown for name in listed)


def test_the_version_is_shown() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"rlsys {version('rlsys')}\n")
