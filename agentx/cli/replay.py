"""`agentx replay`: lanes over a corpus, against a live or a simulated deployment."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentx.errors import InputError

if TYPE_CHECKING:
    from agentx.corpus import Corpus
    from agentx.profile import AnyProfile
    from agentx.replay import ReplayOptions
    from agentx.runs import Run
    from agentx.target import LiveTarget

EXIT_NO_GATE = EXIT_ENDED_EARLY = 1
EXIT_DEPLOYMENT = 3
EXIT_INTERRUPTED = 130

CORPUS, TARGET, ENDING, OUTPUT = "Corpus and schedule", "Deployment", "End of the run", "Output"


def option(*names: str, help: str, panel: str = OUTPUT, default: str | None = None, **more: Any) -> Any:
    """An option of the replay command; `default` tells a default that depends on something."""
    more["show_default"] = True if default is None else default
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("replay")(replay)


def replay(
    profile: Annotated[str | None, option(help="Profile to generate and replay.", panel=CORPUS)] = None,
    corpus: Annotated[
        Path | None, option(help="Corpus to replay: made by agentx, or weka sessions.", panel=CORPUS)
    ] = None,
    url: Annotated[
        list[str] | None, option(help="Base URL of a live deployment; repeatable, lanes are spread.", panel=TARGET)
    ] = None,
    sim: Annotated[
        str | None,
        option(help="Simulated deployment (virtual time): mi325x, mi300x or a file.", panel=TARGET),
    ] = None,
    out: Annotated[Path | None, option("-o", "--out", help="Run folder.", default="runs/NAME-TIME")] = None,
    overwrite: Annotated[bool, option("--overwrite", help="Replace a run that is there.")] = False,
    concurrency: Annotated[
        int | None, option(min=1, max=10**6, help="Lanes.", default="the profile's, else 16", panel=CORPUS)
    ] = None,
    duration: Annotated[
        str | None,
        option(help="Measured window: 900s, 15m.", default="the profile's, else 900s", panel=CORPUS),
    ] = None,
    seed: Annotated[
        int | None,
        option(min=0, max=2**63 - 1, help="Seed of order and start.", default="the profile's, else 42", panel=CORPUS),
    ] = None,
    start: Annotated[
        str | None,
        option(
            help="Start window: part of its turns after which a lane's first session starts, or none.",
            default="the profile's",
            panel=CORPUS,
        ),
    ] = None,
    ramp: Annotated[
        str | None,
        option(help="Time over which lanes start.", default="5 % of the window, at most 5s", panel=CORPUS),
    ] = None,
    think_cap: Annotated[str | None, option(help="Longest think time.", default="none", panel=CORPUS)] = None,
    idle_cap: Annotated[
        str | None,
        option(help="Longest time without any call in flight.", default="none", panel=CORPUS),
    ] = None,
    plays: Annotated[
        int | None,
        option(min=1, help="Times each session is played at most.", default="until the window ends", panel=CORPUS),
    ] = None,
    cache_bust: Annotated[str, option(help="on: no play hits another's cache; off: they share.", panel=CORPUS)] = "on",
    max_context: Annotated[
        int | None,
        option(min=1, max=2**31 - 1, help="Context limit in tokens.", default="as served", panel=TARGET),
    ] = None,
    strict_context: Annotated[
        bool, option("--strict-context", help="Refuse a corpus that does not fit whole.", panel=TARGET)
    ] = False,
    model: Annotated[str | None, option(help="Served model.", default="the only one", panel=TARGET)] = None,
    endpoint: Annotated[
        str | None,
        option(help="chat or completions.", default="chat; completions for token ids", panel=TARGET),
    ] = None,
    prompt: Annotated[str, option(help="text or token-ids.", panel=TARGET)] = "text",
    tokenizer: Annotated[
        Path | None,
        option(help="tokenizer.json, or its folder.", default="the server's", panel=TARGET),
    ] = None,
    cache_block: Annotated[
        int | None,
        option(
            min=1, max=2**31 - 1, help="Unit of the server's prefix cache, tokens.", default="as told", panel=TARGET
        ),
    ] = None,
    header: Annotated[list[str] | None, option(help="Extra header 'Name: value'; repeatable.", panel=TARGET)] = None,
    affinity: Annotated[
        str | None,
        option(help="Header that names a call's stream to a router, or auto.", default="none", panel=TARGET),
    ] = None,
    retry: Annotated[
        str | None, option(help="Statuses after which a call is sent again: 429,503.", default="none", panel=TARGET)
    ] = None,
    api_key_env: Annotated[str, option(help="Variable that holds the API key.", panel=TARGET)] = "OPENAI_API_KEY",
    ca: Annotated[Path | None, option(help="Certificates to trust (PEM).", panel=TARGET)] = None,
    insecure: Annotated[bool, option("--insecure", help="Do not check certificates.", panel=TARGET)] = False,
    proxy: Annotated[
        str | None,
        option(help="env: the environment's proxies, never for loopback.", default="none", panel=TARGET),
    ] = None,
    connect_timeout: Annotated[str, option(help="Limit to open a connection.", panel=TARGET)] = "30s",
    first_byte_timeout: Annotated[
        str | None,
        option(help="Limit to the first byte of an answer.", default="none", panel=TARGET),
    ] = None,
    idle_timeout: Annotated[str | None, option(help="Limit between two reads.", default="none", panel=TARGET)] = None,
    total_timeout: Annotated[str | None, option(help="Limit of a whole call.", default="none", panel=TARGET)] = None,
    grace: Annotated[str, option(help="Time calls in flight get after the window.", panel=ENDING)] = "30s",
    drain: Annotated[bool, option("--drain", help="Wait for all calls in flight instead.", panel=ENDING)] = False,
    stall: Annotated[
        str, option(help="Silence of all calls in flight that ends the run as stalled; or none.", panel=ENDING)
    ] = "60m",
    no_self_check: Annotated[
        bool, option("--no-self-check", help="Do not measure the client's own error first.", panel=TARGET)
    ] = False,
    no_canary: Annotated[
        bool, option("--no-canary", help="Do not try one call, then 8 at once, first.", panel=TARGET)
    ] = False,
    workers: Annotated[
        int | None,
        option(min=1, help="Processes that play the lanes.", default="by their number", panel=TARGET),
    ] = None,
    as_json: Annotated[bool, option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Replay a corpus on lanes and report TTFT, ITL and cache hits.

    Example: agentx replay --profile small --sim mi325x
    Example: agentx replay --profile small --url http://localhost:8000 --concurrency 8 --duration 60s
    """
    if bool(url) == (sim is not None):
        raise InputError("replay against what?", "give one of --url URL and --sim NAME")
    if (profile is None) == (corpus is None):
        raise InputError("replay what?", "give one of --profile NAME and --corpus FOLDER")
    if sim is not None:
        _refuse_live_only(
            {
                "--model": model, "--endpoint": endpoint, "--tokenizer": tokenizer, "--cache-block": cache_block,
                "--header": header, "--affinity": affinity, "--retry": retry, "--ca": ca, "--insecure": insecure,
                "--proxy": proxy, "--workers": workers, "--first-byte-timeout": first_byte_timeout,
                "--idle-timeout": idle_timeout, "--total-timeout": total_timeout, "--no-self-check": no_self_check,
                "--no-canary": no_canary, "--prompt": prompt != "text",
            }
        )  # fmt: skip
    from agentx.replay import ReplayOptions
    from agentx.units import parse_duration_ns, seconds_to_ns

    loaded, made_from = _corpus(profile, corpus, quiet=as_json)

    def span(text: str | None, option: str) -> int | None:
        return None if text is None else parse_duration_ns(text, option)

    default_s = made_from.duration_s if made_from else 900.0
    options = ReplayOptions(
        concurrency=concurrency if concurrency is not None else made_from.concurrency[0] if made_from else 16,
        duration_ns=seconds_to_ns(default_s) if duration is None else parse_duration_ns(duration, "--duration"),
        seed=seed if seed is not None else made_from.seed if made_from else 42,
        grace_ns=parse_duration_ns(grace, "--grace"),
        drain=drain,
        ramp_ns=span(ramp, "--ramp"),
        think_cap_ns=span(think_cap, "--think-cap"),
        idle_cap_ns=span(idle_cap, "--idle-cap"),
        start_window=(made_from.start_window if made_from else None) if start is None else parse_window(start),
        plays=plays,
        cache_bust=_choice(cache_bust, "--cache-bust", ("on", "off")) == "on",
        max_context=max_context,
        strict_context=strict_context,
        cache_block=cache_block,
        stall_ns=None if stall == "none" else parse_duration_ns(stall, "--stall"),
        self_check=not no_self_check,
        canary=not no_canary,
        workers=workers,
    )
    folder = out or Path("runs") / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if sim is not None:
        run = _simulated(loaded, sim, options, folder, overwrite)
    else:
        from agentx.exchange import Limits
        from agentx.target import LiveTarget

        assert url
        usual = "completions" if prompt == "token-ids" else "chat"
        target = LiveTarget(
            url=url[0],
            more_urls=tuple(url[1:]),
            model=model,
            endpoint=_choice(endpoint or usual, "--endpoint", ("chat", "completions")),
            prompt=_choice(prompt, "--prompt", ("text", "token-ids")),
            tokenizer=tokenizer,
            api_key_env=api_key_env,
            headers=_headers(header or []),
            affinity=affinity,
            retry=_statuses(retry),
            limits=Limits(
                span(connect_timeout, "--connect-timeout"),
                span(first_byte_timeout, "--first-byte-timeout"),
                span(idle_timeout, "--idle-timeout"),
                span(total_timeout, "--total-timeout"),
            ),
            ca=ca,
            insecure=insecure,
            proxy=None if proxy is None else _choice(proxy, "--proxy", ("env",)),
        )
        run = _live(loaded, target, options, folder, overwrite)
    _conclude(run, as_json)


def parse_window(text: str) -> tuple[float, float] | None:
    """The start window of `0.90,0.98` or `none`; raises InputError for anything else."""
    if text == "none":
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        low, high = 1.0, 0.0
    if not 0 <= low <= high <= 1:
        raise InputError(f"--start {text!r} is no window", "write two parts of 1, such as 0.90,0.98, or none")
    return low, high


def _corpus(profile: str | None, corpus: Path | None, *, quiet: bool) -> tuple[Corpus, AnyProfile | None]:
    """The corpus to replay and the profile it was made from; a profile's corpus is made and gated first."""
    from agentx.corpus import load_corpus
    from agentx.gate import profile_of
    from agentx.profile import load_profile

    if corpus is not None:
        loaded = load_corpus(corpus)
        for note in loaded.notes:
            sys.stderr.write(f"note: {corpus}: {note}\n")
        return loaded, profile_of(loaded) if loaded.manifest.get("profile") else None
    from agentx.cli.gate import print_gate
    from agentx.gate import run_gate
    from agentx.generate import generate_corpus

    assert profile is not None
    chosen = load_profile(profile)
    made = generate_corpus(chosen, Path("corpora") / chosen.name)
    sys.stderr.write(f"corpus {made.folder} {'is up to date' if made.reused else 'made'}\n")
    result = run_gate(made.corpus, chosen)
    if not quiet:
        print_gate(result)
        sys.stdout.write("\n")
        sys.stdout.flush()
    if not result.passed:
        raise typer.Exit(EXIT_NO_GATE)
    return made.corpus, chosen


def _simulated(corpus: Corpus, name: str, options: ReplayOptions, folder: Path, overwrite: bool) -> Run:
    from agentx.cli.progress import Progress
    from agentx.deployment import load_deployment
    from agentx.replay import replay_sim

    deployment = load_deployment(name)
    with Progress(options.duration_ns, simulated=True) as progress:
        return replay_sim(
            corpus, deployment, options, folder, command=sys.argv[1:], observer=progress, overwrite=overwrite
        )


def _live(corpus: Corpus, target: LiveTarget, options: ReplayOptions, folder: Path, overwrite: bool) -> Run:
    from agentx.cli.progress import Progress
    from agentx.replay_live import replay_live

    with Progress(options.duration_ns) as progress:
        return replay_live(
            corpus, target, options, folder, command=sys.argv[1:], observer=progress, overwrite=overwrite
        )


def _conclude(run: Run, as_json: bool) -> None:
    """Report the run and leave with its exit code."""
    from agentx.cli.report import print_report
    from agentx.report import write_report

    report = write_report(run)
    print_report(report, as_json=as_json)
    sys.stderr.write(f"run saved in {run.folder}\n")
    reason = run.manifest["ended"]["reason"]
    if reason == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
    if reason == "stalled" or report.distributions["e2e_ns"].n == 0:
        raise typer.Exit(EXIT_DEPLOYMENT)
    if reason != "window":
        raise typer.Exit(EXIT_ENDED_EARLY)


def _choice(value: str, option: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise InputError(f"{option} {value!r} is not known", f"choose one of {', '.join(known)}")
    return value


def _refuse_live_only(given: dict[str, object]) -> None:
    """Raise InputError for options that a simulation would pass over."""
    names = [name for name, value in given.items() if value]
    if names:
        raise InputError(f"{', '.join(names)} cannot go with --sim", "these belong to --url")


def _headers(given: list[str]) -> dict[str, str]:
    found = {}
    for text in given:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise InputError("--header has no 'Name: value'", "write --header 'X-Tenant: blue'")
        found[name.strip()] = value.strip()
    return found


def _statuses(text: str | None) -> frozenset[int]:
    if text is None:
        return frozenset()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 400 <= int(part) <= 599 for part in parts):
        raise InputError(f"--retry {text!r} is no list of statuses", "write --retry 429,503")
    return frozenset(int(part) for part in parts)
