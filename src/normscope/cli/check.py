"""``normscope check``: the findings of a model on the user's data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from normscope.cli import stored, streams
from normscope.cli.frame import FINDINGS, console, note, progress
from normscope.errors import BadInput

if TYPE_CHECKING:
    from normscope.cli.settings import Settings
    from normscope.doctor.baseline import Baseline
    from normscope.doctor.report import Report
    from normscope.targets import Loaded

WRITTEN = {
    "--html": "report.html",
    "--write-baseline": "normscope-baseline.json",
    "-o": "fixed.safetensors",
}
FORMATS = ("text", "json", "sarif", "github")
HINT = (
    "what these need is given by --data FILE, with the keys inputs, targets and mask, or by a target that returns a "
    "dict with model, inputs, targets, mask, loss_fn, optimizer"
)


def command(
    target: str = typer.Argument(
        ...,
        metavar="TARGET",
        help="package.module:attribute, a .onnx or .pt2 file or one of weights, or demo, demo:healthy.",
    ),
    data: Path | None = typer.Option(
        None, "--data", metavar="FILE", help="A batch: .npz, .npy, .pt (tensors only) or .safetensors."
    ),
    input_: str | None = typer.Option(
        None,
        "--input",
        metavar="SHAPE",
        help="Random input where there is no data: 8x3x224x224, or 2x16:int64:30522 for token ids.",
    ),
    weights: Path | None = typer.Option(
        None,
        "--weights",
        metavar="FILE",
        help="A state dict to load into the model: .safetensors, .pt or a transformers folder.",
    ),
    select: list[str] = typer.Option([], "--select", metavar="CODES", help="Only these rules: NS3,NS101."),
    ignore: list[str] = typer.Option([], "--ignore", metavar="CODES", help="Not these rules."),
    fail_on: str | None = typer.Option(
        None,
        "--fail-on",
        metavar="SEVERITY",
        help="Exit 1 from this severity: info, warning (default), error.",
    ),
    format_: str = typer.Option("text", "--format", metavar="FORMAT", help=f"One of {', '.join(FORMATS)}."),
    html: Path | None = typer.Option(None, "--html", metavar="FILE", help="Also write a page."),
    seed: int | None = typer.Option(None, "--seed", help="Seed of everything random."),
    dataset_size: int | None = typer.Option(
        None, "--dataset-size", min=1, help="Number of training samples."
    ),
    frozen_policy: str | None = typer.Option(
        None, "--frozen-policy", help="What you meant to freeze: statistics, affine or both."
    ),
    trust: bool = typer.Option(
        False, "--trust", help="Of a .pt2 program: load it, which can run code of whoever wrote it."
    ),
    eps: float | None = typer.Option(
        None, "--eps", help="Of a file of weights: the eps your code builds its norms with."
    ),
    momentum: float | None = typer.Option(
        None, "--momentum", help="Of a file of weights: the update fraction of the running statistics."
    ),
    baseline: Path | None = typer.Option(
        None, "--baseline", metavar="FILE", help="Known findings, which do not count."
    ),
    write_baseline: Path | None = typer.Option(
        None, "--write-baseline", metavar="FILE", help="Accept what is found now: write it to FILE."
    ),
    fix: list[str] = typer.Option(
        [], "--fix", metavar="CODES", help="Fix these, as far as weights hold it; needs -o."
    ),
    output: Path | None = typer.Option(
        None, "--output", "-o", metavar="FILE", help="Where --fix writes the state dict: .safetensors."
    ),
    unsafe: bool = typer.Option(False, "--unsafe", help="Let --fix also change what the model computes."),
    explain: bool = typer.Option(
        False,
        "--explain",
        help="Walk from axes to learning rate and say where to begin, instead of the report.",
    ),
    traceback: bool = typer.Option(False, "--traceback", help="Show where an error came from."),
) -> int:
    """Check every normalization of a model on your data; nothing in the model is changed.

    TARGET is a module, or a function returning one, (model, inputs[, targets]), or a dict with model, inputs,
    targets, mask, loss_fn, optimizer, dataset_size. A file given with --data holds one array, or named ones: inputs,
    targets, mask (true where valid); other names are passed to the model as keyword arguments.

    Of a file of weights (.safetensors, .pt, .pth, .ckpt, .bin, an index of shards, a transformers folder) the stored
    norms are checked, without code.

    Exit codes: 0 nothing at or above --fail-on, 1 findings, 2 the command or target is wrong.
    """
    from normscope.cli import settings
    from normscope.doctor.baseline import Baseline
    from normscope.doctor.report import severity_rank

    defaults = settings.load()
    fail_on = defaults.fail_on if fail_on is None else fail_on
    severity_rank(fail_on)
    if format_ not in FORMATS:
        raise BadInput(f"--format is one of {', '.join(FORMATS)}; got {format_!r}")
    fixes = _codes("--fix", fix)
    if bool(fixes) != (output is not None):
        raise BadInput("--fix and -o FILE belong together: --fix NS501 -o fixed.safetensors")
    if output is not None and output.suffix != ".safetensors":
        raise BadInput(f"-o {output}: name a .safetensors file, which is what --fix writes")
    if explain and (html or baseline or write_baseline or fixes or select or ignore):
        raise BadInput(
            "--explain stands instead of the report, with every rule: leave --select, --ignore, --html, the baseline "
            "and --fix out"
        )
    for option, file in (("--html", html), ("--write-baseline", write_baseline), ("-o", output)):
        if file is not None:
            _writable(option, file)
    known = _baseline(baseline, write_baseline, defaults)
    wanted = _codes("--select", select) or defaults.select
    unwanted = _codes("--ignore", ignore) or defaults.ignore
    out = streams.claim()
    with progress() as step:
        from normscope import targets
        from normscope.doctor.check import check
        from normscope.doctor.suppress import suppress
        from normscope.render.grouping import counted
        from normscope.targets import imported, state_files

        loaded = None
        if state_files.names_state(target):
            needing = {
                "--data": data,
                "--input": input_,
                "--weights": weights,
                "--fix": fixes,
                "--explain": explain,
            }
            stored.refuse(target, needing)
            report = stored.check(
                target, select=wanted, ignore=unwanted, eps=eps, momentum=momentum, step=step
            )
        else:
            stored.refuse_stated({"--eps": eps, "--momentum": momentum})
            loaded = targets.resolve(target, data=data, input_spec=input_, weights=weights, trust=trust)
            loaded.fill_in()
            for said in loaded.notes:
                note(said)
            if explain:
                return _explained(
                    loaded,
                    format_,
                    seed=defaults.seed if seed is None else seed,
                    target=target,
                    out=out,
                    step=step,
                )
            sizes = (dataset_size, loaded.dataset_size, defaults.dataset_size)
            report = check(
                loaded.model,
                loaded.inputs,
                loaded.targets,
                loss_fn=loaded.loss_fn,
                optimizer=loaded.optimizer,
                mask=loaded.mask,
                state=loaded.state,
                config=loaded.config,
                select=wanted,
                ignore=unwanted,
                seed=defaults.seed if seed is None else seed,
                dataset_size=next((size for size in sizes if size is not None), None),
                frozen_policy=defaults.frozen_policy if frozen_policy is None else frozen_policy,
                synthetic=loaded.synthetic,
                target=target,
                progress=step,
            )
    if loaded is not None and not report.source:
        report = replace(report, source=imported.source_of(target))
    if write_baseline is not None:
        known = Baseline.of(suppress(report, defaults.ignore_site), known)
        write_baseline.write_text(known.to_json() + "\n", encoding="utf-8")
        note(f"{write_baseline} accepts {counted(len(known.entries), 'finding')}")
    if output is not None and loaded is not None:
        _fixed(report, fixes, loaded, output, unsafe=unsafe)
    report = suppress(report, defaults.ignore_site, known)
    if format_ == "text":
        from normscope.render.text import print_report, to_text

        if out.isatty():
            print_report(report, console(out), hint=HINT)
        else:
            out.write(to_text(report, hint=HINT))
    elif format_ == "github":
        from normscope.render.github import to_github

        out.write(to_github(report))
    else:
        print(report.to_json() if format_ == "json" else report.to_sarif(), file=out)
    out.flush()
    if html is not None:
        report.to_html(html)
    return FINDINGS if report.at_least(fail_on) else 0


def _fixed(report: Report, codes: tuple[str, ...], loaded: Loaded, file: Path, *, unsafe: bool) -> None:
    """Write the state dict of the fixed model; nothing where nothing that weights hold was fixed."""
    from normscope.cli import state_output
    from normscope.transforms.fixes import apply

    fixed, done = apply(
        report,
        codes,
        loaded.model,
        loaded.inputs,
        optimizer=loaded.optimizer,
        unsafe=unsafe,
        stored_only=True,
    )
    note(str(done))
    if not done.done:
        note(f"{file} was not written: nothing was fixed")
        return
    state_output.write(fixed, file, done)


def _explained(
    loaded: Loaded, format_: str, *, seed: int, target: str, out: TextIO, step: Callable[[str], None]
) -> int:
    from normscope.doctor.explain import explain

    if format_ not in ("text", "json"):
        raise BadInput(f"--explain is printed as text or json; got --format {format_}")
    explanation = explain(
        loaded.model,
        loaded.inputs,
        loaded.targets,
        loss_fn=loaded.loss_fn,
        optimizer=loaded.optimizer,
        mask=loaded.mask,
        seed=seed,
        synthetic=loaded.synthetic,
        target=target,
        progress=step,
    )
    out.write(str(explanation) if format_ == "text" else explanation.to_json() + "\n")
    out.flush()
    return 0 if explanation.ok else FINDINGS


def _codes(option: str, words: list[str]) -> tuple[str, ...]:
    codes = tuple(code.strip() for word in words for code in word.split(",") if code.strip())
    if words and not codes:
        raise BadInput(f"{option} names no rule; write codes or their beginnings: {option} NS3,NS101")
    return codes


def _baseline(read: Path | None, write: Path | None, defaults: Settings) -> Baseline | None:
    """What is known already: from the file that is named, else from the one in the settings, or the one to be written
    anew, where it exists."""
    from normscope.doctor.baseline import Baseline

    if read is not None:
        return Baseline.read(read)
    if write is not None:
        return Baseline.read(write) if write.exists() else None
    return Baseline.read(defaults.baseline) if defaults.baseline else None


def _writable(option: str, page: Path) -> None:
    """Raises BadInput for a file that could not be written once the check is done; leaves no file."""
    advice = f"name a file to write, such as {WRITTEN[option]}"
    try:
        if page.is_dir():
            raise BadInput(f"{option} {page} is a folder; {advice}")
        if page.exists() and not page.is_file():
            raise BadInput(f"{option} {page} is no ordinary file; {advice}")
        folder = page.resolve().parent
        if not folder.is_dir():
            raise BadInput(f"{option} {page}: the folder {folder} does not exist; make it first")
        if page.exists():
            page.open("ab").close()
        else:
            page.touch()
            page.unlink()
    except OSError as error:
        raise BadInput(f"{option} {page} cannot be written ({error.strerror}); {advice}") from error
