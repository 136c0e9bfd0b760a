"""MkDocs hook: one page a rule and the list of them, made from the rule files when the book is built."""

from __future__ import annotations

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from normscope.doctor.rules import KINDS, all_rules


def on_files(files: Files, config: MkDocsConfig) -> Files:
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
    return files
