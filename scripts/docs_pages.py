"""MkDocs hook: pages that are made when the book is built: one a rule, their list, and the code of each study."""

from __future__ import annotations

from importlib.resources import files as resources

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from normscope import studies
from normscope.doctor.rules import KINDS, all_rules


def on_files(files: Files, config: MkDocsConfig) -> Files:
    _rules(files, config)
    for name in studies.names():
        if files.get_file_from_path(f"studies/{name}.md") is not None:
            source = name.replace("-", "_") + ".py"
            text = (resources("normscope.studies") / source).read_text(encoding="utf-8")
            files.append(File.generated(config, f"studies/{name}/{source}", content=text))
    return files


def _rules(files: Files, config: MkDocsConfig) -> None:
    rows = []
    for code, rule in all_rules().items():
        kinds = ", ".join(KINDS[letter] for letter in rule.kinds)
        body = rule.page.split(": ", 1)[1]
        first, _, rest = body.partition("\n")
        text = f"# {code} {rule.name}\n\n{first[0].upper()}{first[1:]}\n\nDecided {kinds}.\n{rest}\n"
        files.append(File.generated(config, f"rules/{code}.md", content=text))
        rows.append(f"| [{code}](rules/{code}.md) | {rule.name} | {rule.summary} | {kinds} |")
    table = "\n".join(["| code | name | fires when | decided |", "|---|---|---|---|", *rows])
    intro = "# Rules\n\nEach page is made from the rule's own file; `normscope rule CODE` prints it.\n\n"
    files.append(File.generated(config, "rules.md", content=intro + table + "\n"))
