"""Command line: `rlsys train`, and the other commands of `KINDS_OF_COMMANDS`.

Every command is a thin layer over a function that Python can call too. An `RlsysError` becomes its message on stderr
and its exit code; any other error is a bug and shows its traceback. Commands import their modules when they run, so
that `--help` is fast.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rlsys.errors import ConfigError, RlsysError, full_text
from rlsys.util.printing import print_note, print_result, printable

if TYPE_CHECKING:
    from rlsys.config import Config
    from rlsys.config.plugins import PluginKind

KINDS_OF_COMMANDS = {
    "Train": ("data", "workflow", "plan", "train", "eval"),
    "On a cluster": ("submit", "logs", "stop", "scale"),
    "Look": ("dashboard", "tail", "query", "report", "replay"),
    "Share": ("export", "serve"),
    "Tools": ("doctor", "config", "convert", "algorithms", "simulate", "profile"),
}
"""Every command, in the order of `rlsys --help`."""


class _CommandsByKind(TyperGroup):
    """Lists the commands by their kinds."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401  (typer has them privately)
        for kind, names in KINDS_OF_COMMANDS.items():
            with formatter.section(kind):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(100)) for name in names])


app = typer.Typer(
    cls=_CommandsByKind,
    help="Reinforcement-learning post-training of language models, on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Check, show or describe a configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")
data_app = typer.Typer(help="Look at data before training on it.", no_args_is_help=True)
app.add_typer(data_app, name="data")
workflow_app = typer.Typer(help="Look at a workflow before training with it.", no_args_is_help=True)
app.add_typer(workflow_app, name="workflow")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print_result(f"rlsys {metadata.version('rlsys')}")
        raise typer.Exit


@app.callback()
def _add_version_option(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


OVERRIDES = {"ignore_unknown_options": True}
"""Pass `--train.lr=1e-5` on to the overrides."""

Job = Annotated[
    list[str],
    typer.Argument(metavar="FILE... [SECTION.KEY=VALUE]...", help="Configuration files, then overrides; later wins."),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Overrides.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="GPUs of the cluster; else as many as the workers reserve.")]
GpuMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Memory of each, as 80GB; else that of this machine's GPU, or 80GB."),
]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The id that `rlsys submit` printed.")]
JobServer = Annotated[
    str | None, typer.Option(metavar="http://HEAD:8265", help="Else RAY_API_SERVER_ADDRESS or RAY_ADDRESS.")
]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON on stdout.")]


@app.command(context_settings=OVERRIDES)
def train(
    job: Job,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Look up model and data, try the rewards, and start nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model with the configuration FILE."""
    config = _load(job)
    from rlsys import launch

    if not dry_run:
        result = launch.train(config).as_json()
        _echo(result, _result_lines(result), as_json=as_json)
        return
    launch.check_can_begin(config)
    config = launch.with_device_defaults(launch.with_steps(launch.with_models_of_runs(config)))
    notes, rewards = launch.look_up(config).notes, launch.try_rewards(config)
    lines = [*notes, *(tried.line() for tried in rewards), *_cautions(config)]
    found = {"run_dir": str(config.run_dir), "steps": config.run.steps, "lines": lines}
    ready = f"found what {config.run.steps} steps in {config.run_dir} need; `rlsys plan` shows what they take"
    _echo(found, [*lines, ready], as_json=as_json)


@app.command(context_settings=OVERRIDES)
def plan(job: Job, gpus: Gpus = None, gpu_memory: GpuMemory = None, as_json: AsJson = False) -> None:
    """Show what the configuration FILE takes: resources, pace, memory of each worker; exit 2 if it does not fit.

    It is computed from the model's config.json: no weights are read, and nothing is started. If the plan does not fit,
    the error names the nearest one that does.
    """
    config = _load(job)
    from rlsys import launch

    planned = launch.memory_plan(launch.with_models_of_runs(config), gpus=gpus, gpu_memory=gpu_memory)
    _echo(planned.as_json(), planned.lines(), as_json=as_json)
    planned.check()


@app.command(context_settings=OVERRIDES)
def submit(
    job: Annotated[
        list[str] | None, typer.Argument(metavar="FILE... [SECTION.KEY=VALUE]...", help="As those of `train`.")
    ] = None,
    address: JobServer = None,
    resume: Annotated[
        str | None, typer.Option(metavar="JOB", help="Go on with the run of this job, from its newest checkpoint.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return when the job is submitted.")] = False,
) -> None:
    """Train on the cluster at ADDRESS, with a copy of the current folder; Ctrl-C leaves the job as it is."""
    files, overrides = _split(job or [])
    if bool(files) == bool(resume):
        raise typer.BadParameter("give the FILE of a configuration, or --resume JOB")
    from rlsys.launch import submission

    if resume:
        found = submission.resume(resume, overrides, address=address)
    else:
        found = submission.submit(files, overrides, address=address)
    print_note(f"job {found}: `rlsys logs {found}` follows it, `rlsys stop {found}` lets it save and ends it")
    if detach:
        print_result(found)
    else:
        raise typer.Exit(_follow(found, address))


@app.command()
def logs(job: JobId, address: JobServer = None) -> None:
    """Print what a submitted job has printed and prints, until it ends; the exit code is its own."""
    raise typer.Exit(_follow(job, address))


@app.command()
def stop(job: JobId, address: JobServer = None) -> None:
    """Let a submitted job finish its step and save; return when it has ended. Exit code 1 if not all is saved.

    A job that fails before its first step ends this command with its own exit code.
    """
    from rlsys.launch import submission

    if not submission.stop(job, address=address):
        print_note(f"job {job} has ended already")
        return
    printed: list[str] = []

    def write(lines: str) -> None:
        printed.append(lines)
        _print_lines(lines)

    code, text = submission.follow(job, write, address=address), "".join(printed)
    if not code or submission.tells_saved(text):
        return
    if submission.has_trained(text):
        print_note(f"job {job} has ended, and not all that it trained is saved: its last lines say why")
        code = 1
    raise typer.Exit(code)


@app.command(context_settings=OVERRIDES)
def scale(
    run: Run, wishes: Annotated[list[str], typer.Argument(metavar="rollouts=N", help="Replicas that it should have.")]
) -> None:
    """Let a running job have more or fewer rollout replicas; it goes on meanwhile, and no token is lost.

    The job must run on this machine. Its events say when each replica has joined or left; after a resume it has the
    configured number again.
    """
    from rlsys.launch import scaling

    number = scaling.scale(run, wishes)
    print_result(f"asked the run for {number} rollout replica{'s' * (number != 1)}")


def _follow(job: str, address: str | None) -> int:
    from rlsys.launch import submission

    return submission.follow(job, _print_lines, address=address)


def _print_lines(lines: str) -> None:
    print_result(lines.removesuffix("\n"))


@app.command("eval", context_settings=OVERRIDES)
def evaluate(
    target: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run directory, a model folder, or org/name.")],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]PATH", help="A data set, instead of eval.data; repeatable.")
    ] = None,
    n: Annotated[int | None, typer.Option(help="Samples per task, instead of eval.samples.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Instead of eval.temperature; 0 is greedy.")] = None,
    limit: Annotated[int | None, typer.Option(help="Tasks of each set, from the first, instead of eval.limit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a run's latest weights, or a model, on tasks it was not trained on."""
    from rlsys import launch
    from rlsys.config.eval_section import datasets_of
    from rlsys.loop.evaluation import table_of

    results = launch.evaluate(
        target,
        config_overrides=overrides or [],
        data=datasets_of(data) if data else None,
        samples=n,
        temperature=temperature,
        limit=limit,
    )
    _echo({name: measures.as_json() for name, measures in results.items()}, table_of(results), as_json=as_json)


@app.command()
def export(
    run: Run,
    to: Annotated[Path | None, typer.Option(help="Folder to write: safetensors, config and tokenizer.")] = None,
    to_hub: Annotated[
        str | None, typer.Option("--push", metavar="ORG/NAME", help="Repository of the Hugging Face Hub to upload to.")
    ] = None,
    is_public: Annotated[bool, typer.Option("--public", help="With --push: a public repository.")] = False,
    step: Annotated[str, typer.Option(help="Number of the checkpoint's step, latest, or best.")] = "latest",
    as_adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the adapter of a run with train.lora, as peft does.")
    ] = False,
) -> None:
    """Write a checkpoint as a model folder that `AutoModelForCausalLM` loads; an adapter is merged into its base.

    With --push instead of --to, upload it with the token of HF_TOKEN or `hf auth login`, to a private repository unless
    --public. The uploaded folder stays in RUN/exports.
    """
    if (to is None) == (to_hub is None):
        raise typer.BadParameter("give one of --to FOLDER and --push ORG/NAME")
    if is_public and to_hub is None:
        raise typer.BadParameter("--public needs --push: a folder is neither public nor private")
    from rlsys import launch

    if to_hub is not None:
        print_result(launch.push(run, to_hub, step, as_adapter=as_adapter, is_public=is_public))
    elif to is not None:
        print_result(str(launch.export(run, to, step, as_adapter=as_adapter)))


@app.command()
def replay(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|FOLDER", help="A run, with --step; or the folder RUN/failed/step_N that its error names."
        ),
    ],
    step: Annotated[int | None, typer.Option(min=1, help="Train this step of the run again.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Open the debugger before --step; one rank only.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compute a step again, without Ray.

    With --step: train it from what the run recorded; exit 1 unless weights and metrics are the same bit for bit. For a
    step with non-finite numbers: compute it sample by sample; exit 1 unless all are finite here.

    Use only folders that you trust: the code which their configuration names is imported.
    """
    if debug and step is None:
        raise typer.BadParameter("--debug needs --step, before which to stop")
    from rlsys import launch

    if step is None:
        found = launch.replay(folder)
        is_fine = found.is_fine
    else:
        found = launch.replay_step(folder, step, debug=debug)
        is_fine = found.is_equal
    _echo(found.as_json(), found.lines(), as_json=as_json)
    raise typer.Exit(not is_fine)


@app.command()
def dashboard(
    folder: Annotated[
        Path, typer.Argument(metavar="[RUN|FOLDER]", help="A run directory, or a folder of them.", show_default="runs")
    ] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address; one beyond this machine needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8321,
    fd: Annotated[int | None, typer.Option(hidden=True, help="A socket of the parent; end when stdin ends.")] = None,
) -> None:
    """Show runs in a browser, live or ended.

    Prints the URL to open, and serves it until Ctrl-C. With --host, other machines can reach it: then a token is
    required, which is part of the URL. Set RLSYS_DASHBOARD_TOKEN to choose the token, or to require one locally too.
    """
    from rlsys.dashboard.listener import Listener
    from rlsys.dashboard.serve import Dashboard

    listener = Listener.bind(host, port) if fd is None else Listener.from_descriptor(fd)
    served = Dashboard(folder, listener)
    if fd is not None:
        served.serve_beside(sys.stdin.buffer)
    typer.echo(listener.url)
    served.serve()


@app.command(context_settings=OVERRIDES)
def serve(
    target: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run directory, a model folder, or org/name.")],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8322,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a reply, instead of rollout.max_new_tokens.")
    ] = None,
) -> None:
    """Answer OpenAI clients with the newest policy of a run, or a model, until Ctrl-C.

    Prints base URL, key and model name. It runs in this process, on the local engine. Set RLSYS_SERVE_TOKEN to choose
    the key.
    """
    from rlsys import launch

    limit = [] if max_tokens is None else [f"rollout.max_new_tokens={max_tokens}"]
    launch.serve(target, host, port, print_result, (*(overrides or ()), *limit))


@app.command()
def tail(
    run: Run,
    once: Annotated[bool, typer.Option("--once", help="Show what there is, and do not wait for more.")] = False,
) -> None:
    """Follow a run in this terminal.

    Shows its latest events, and then new ones until it ends or Ctrl-C.
    """
    from rlsys.dashboard import tail as tailing

    try:
        tailing.tail(run, sys.stdout, once=once)
    except KeyboardInterrupt:
        typer.echo()


@app.command()
def query(
    run: Annotated[Path, typer.Argument(metavar="RUN|FOLDER", help="A run; a folder of them for the table `runs`.")],
    text: Annotated[
        str, typer.Argument(metavar="SQL", help="E.g. 'select task, reward from episodes where reward < 0.1'.")
    ],
    between: Annotated[
        tuple[int, int] | None, typer.Option(metavar="STEP STEP", help="Steps of the table `tasks`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find episodes, groups, tasks, steps, alerts or lines of logs of a run; docs/dashboard.md has the tables.

    It reads the run's files by an index in your cache, which it brings up to date first.
    """
    from rlsys.dashboard.query import query_command

    found = query_command.query(run, text, sys.stderr, between=between, is_whole=as_json)
    _echo(asdict(found), query_command.lines_of(found), as_json=as_json)


@app.command()
def report(
    run: Run,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="To write.")] = Path("report.html"),
) -> None:
    """Write a run as one HTML file.

    It contains scores, alerts, workers, charts, and the best and worst groups, without scripts or external resources.
    It prints on six pages of A4 at most, or as many for each policy.
    """
    from rlsys.config.changed_keys import changed_keys
    from rlsys.dashboard.query.queries import Readings
    from rlsys.dashboard.report.html_report import report_of

    text = report_of(Readings(run), changed_keys)
    _write(output, text)


@app.command(context_settings=OVERRIDES)
def simulate(
    profile: Annotated[
        str, typer.Argument(metavar="PROFILE", help="areal, laminar, local, or the path of a YAML file.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps; the first quarter is not measured.")] = 12,
    sweep: Annotated[str | None, typer.Option(metavar="KEY=V1,V2,...", help="Simulate each of these values.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this .png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a cluster: the real driver on simulated workers and a virtual clock."""
    _refuse_unknown_options(overrides or [])
    from rlsys.simulate import sweep as simulated

    if plot is not None:
        simulated.check_plot(plot)
    swept = simulated.Sweep.parse(sweep) if sweep is not None else None
    outcome = simulated.simulate(profile, overrides or [], steps=steps, sweep=swept)
    if plot is not None:
        simulated.plot(outcome, plot)
    if as_json:
        typer.echo(json.dumps(outcome.as_json()))
        return
    from rich.console import Console

    Console().print(simulated.table_of(outcome))


@app.command()
def profile(
    run: Run,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="To write; without it, print.")
    ] = None,
) -> None:
    """Write a profile of a run, for `rlsys simulate`: its cluster and workload, each value with its source."""
    from rlsys.simulate.measured_profile import measured_profile

    text = measured_profile(run)
    if output is None:
        typer.echo(text, nl=False)
        return
    _write(output, text)


@config_app.command(context_settings=OVERRIDES)
def check(job: Job) -> None:
    """List every problem of a configuration; exit 2 if there is any."""
    config = _load(job)
    typer.echo("the configuration is valid")
    for caution in _cautions(config):
        print_result(caution)


def _cautions(config: Config) -> list[str]:
    """Lines on the cost of the staleness of each policy."""
    own = config.trained_policies.values() or [config]
    return [f"caution: {each.staleness_caution}" for each in own if each.staleness_caution]


@config_app.command(context_settings=OVERRIDES)
def show(job: Job) -> None:
    """Print every key with its value, as in `config.resolved.yaml`."""
    config = _load(job)
    from rlsys import launch
    from rlsys.errors import ModelError

    try:
        config = launch.with_device_defaults(config)
    except ModelError as error:
        keys = "resources.*.gpus, model.dtype, rollout.slots and train.micro_batch_tokens"
        typer.echo(f"{keys} follow from machine and model: {error}", err=True)
    print_result(config.to_yaml().removesuffix("\n"))


@config_app.command()
def schema() -> None:
    """Print the JSON schema of a configuration, for editors."""
    from rlsys.config import Config

    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


@app.command()
def convert(path: Annotated[Path, typer.Argument(metavar="FILE", help="YAML of verl, or arguments of TRL.")]) -> None:
    """Print the configuration that a file of verl or TRL corresponds to, and what has no counterpart."""
    from rlsys.config.conversion import convert as converted

    print_result("\n".join(converted(path).lines()))


@data_app.command("inspect")
def inspect_data(
    path: Annotated[str, typer.Argument(metavar="PATH", help="JSONL or parquet file, folder[#SPLIT] or hub data set.")],
    model: Annotated[str | None, typer.Option(help="Folder or org/name; tokens are shown as it sees them.")] = None,
    columns: Annotated[
        list[str] | None, typer.Option(metavar="OURS=THEIRS", help="E.g. prompt=problem; once for each column.")
    ] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Count longer prompts; needs --model.")] = None,
    chat: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="E.g. system=Hi, a key of rollout.chat; with --model.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe a data file: the form of its rows, the use of its columns, two tasks, and lengths of prompts."""
    if max_prompt_tokens is not None and model is None:
        raise typer.BadParameter("--max-prompt-tokens needs --model, whose tokens it counts")
    if unpaired := next((c for c in columns or [] if "=" not in c), None):
        raise typer.BadParameter(f"--columns {unpaired}: give OURS=THEIRS, as in prompt=problem")
    from rlsys import launch
    from rlsys.config.chat_section import ChatSection
    from rlsys.config.data_section import DataSection
    from rlsys.config.loader import load
    from rlsys.data.inspection import lines_of

    names = load(DataSection, [], ["path=none", *(f"columns.{column}" for column in columns or [])]).columns
    section = load(ChatSection, [], chat or [])
    found = launch.inspect_data(path, columns=names, model=model, max_prompt_tokens=max_prompt_tokens, chat=section)
    _echo(asdict(found), lines_of(found), as_json=as_json)


@workflow_app.command("try", context_settings=OVERRIDES)
def try_workflow(
    job: Annotated[
        list[str],
        typer.Argument(metavar="FILE...|WORKFLOW [SECTION.KEY=VALUE]...", help="Configuration files or one workflow."),
    ],
    task: Annotated[str, typer.Option(help="Number of a row of data.path from 0, its id, or a row as JSON.")] = "0",
    policy: Annotated[
        str | None, typer.Option(metavar="scripted:REPLY|MODULE:FUNCTION", help="A policy to use instead of the model.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Instead of run.seed.")] = None,
    reward: Annotated[bool, typer.Option("--reward", help="Judge it with the reward functions.")] = False,
    as_json: AsJson = False,
) -> None:
    """Play one session of a workflow and print it, in this process: with the configuration's model, or a script."""
    from rlsys import launch

    config = launch.config_to_try(*_split(job))
    tried = launch.try_workflow(config, task, policy=policy, seed=seed, with_reward=reward)
    _echo(tried.as_json(), tried.lines(), as_json=as_json)
    if not as_json:
        for sample in tried.samples:
            print_result(sample.heading)
            for is_trained, text in sample.parts:
                colour = typer.colors.GREEN if is_trained else typer.colors.BRIGHT_BLACK
                label = "  trained " if is_trained else "  context "
                typer.echo(label + typer.style(printable(text).replace("\n", "\n          "), fg=colour))


@app.command()
def algorithms() -> None:
    """List the installed algorithms, stabilizers, workflows and trackers: name, kind, class, first line of its text."""
    from rlsys.config.plugins import KINDS

    rows = [
        (name, kind.name, " or ".join(point.value for point in points), _summary(kind, name))
        for kind in KINDS
        for name, points in kind.entry_points().items()
    ]
    names, kinds, places = (max(len(row[column]) for row in rows) for column in range(3))
    for name, kind, place, summary in rows:
        print_result(f"{name:<{names}}  {kind:<{kinds}}  {place:<{places}}  {summary}")


def _summary(kind: PluginKind[Any], name: str) -> str:
    try:
        return (kind.find(name).__doc__ or "").partition("\n")[0]
    except ConfigError as error:  # of one package: list the others
        return f"does not load: {error}"


@app.command()
def doctor(
    address: Annotated[str | None, typer.Option(help="A running Ray cluster to compare versions with.")] = None,
    as_json: AsJson = False,
) -> None:
    """List problems of this environment with their remedies; exit 1 if one must be fixed."""
    from rlsys.launch.doctor import diagnose, gather

    findings = diagnose(gather(address))
    _echo([asdict(f) for f in findings], map(str, findings), as_json=as_json)
    raise typer.Exit(any(f.level == "fail" for f in findings))


def main() -> None:
    """Entry point of the `rlsys` command."""
    try:
        app()
    except RlsysError as error:
        print_note(f"rlsys: {full_text(error)}")
        sys.exit(error.exit_code)


def _load(job: list[str]) -> Config:
    from rlsys.config import Config

    config = Config.load(*_split(job))
    config.data.check_has_rows()
    return config


def _split(job: list[str]) -> tuple[list[str], list[str]]:
    """Files, the arguments without `=`, and overrides."""
    _refuse_unknown_options(job)
    return [j for j in job if "=" not in j], [j for j in job if "=" in j]


def _refuse_unknown_options(arguments: list[str]) -> None:
    if unknown := next((a for a in arguments if a.startswith("-") and "=" not in a), None):
        raise typer.BadParameter(f"no such option: {unknown}")


def _echo(found: object, lines: Iterable[str], *, as_json: bool) -> None:
    if as_json:
        print_result(json.dumps(found))
    else:
        print_result("\n".join(lines))


def _write(output: Path, text: str) -> None:
    """Write the file of `--output`, and say its path. Raises `ConfigError`."""
    try:
        output.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}; give another place with --output") from None
    print_result(str(output))


def _result_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield two lines on the result of a run, and one for each of several policies."""
    stopped = f", ended early: {result['early_stop']}" if "early_stop" in result else ""
    seconds = result["seconds"].get("start_up", 0.0) + result["seconds"].get("step", 0.0)
    yield f"{result['run_dir']}: {result['steps']} steps" + (f" in {seconds:.0f} s" if seconds else "") + stopped
    of_policies = {f"reward of {name}": own for name, own in result.get("policies", {}).items()}
    for name, own in {"reward": result, **of_policies}.items():
        if own["reward_last"] is not None:
            first, last = own["reward_first"], own["reward_last"]
            yield f"{name} {first:.3f} in the first steps of this session, {last:.3f} in the last"


if __name__ == "__main__":
    main()
