"""The tables of the README, from result files: what it says was measured, and how.

    python benchmarks/readme_table.py benchmarks/results/2026-11-29-cpu-peers.json
    python benchmarks/readme_table.py --write README.md

Prints Markdown, or with --write puts it between `<!-- results: FILE -->` and the next
`<!-- end of results -->` of a page. A file of `peers` gives a row per workload and a column per
engine; others give a row per result. The line below names machine, model, versions, command
and date.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import common

from minivllm.measure import results as bench_results

# A comment with the file, whatever stands below it, a comment that ends it.
PLACE = re.compile(
    r"(?P<begin><!-- results: (?P<file>\S+) -->)\n.*?(?P<end><!-- end of results -->)", re.DOTALL
)
Results = Sequence[Mapping[str, Any]]


def format_results(results: Results) -> str:
    """A table and a line on how it was measured. Raises ValueError for an empty list, or if
    the results are not of one run."""
    if not results:
        raise ValueError("there are no results to show")
    for name in ("machine", "model", "command", "date"):
        if len({str(result.get(name)) for result in results}) > 1:
            raise ValueError(f"the results differ in {name}; show one run at a time")
    engines = list(dict.fromkeys(str(result.get("engine", "minivllm")) for result in results))
    table = one_engine(results) if len(engines) == 1 else several_engines(results, engines)
    return f"{table}\n\n{source(results[0])}"


def one_engine(results: Results) -> str:
    """A row per result."""
    rows = [bench_results.table_cells(result) for result in results]
    return bench_results.markdown_table(bench_results.HEADER, rows)


def several_engines(results: Results, engines: Sequence[str]) -> str:
    """A row per workload, a column per engine, and how many times as fast ours is."""
    by_place = {(result["workload"], result["engine"]): result for result in results}
    others = [engine for engine in engines if engine != "minivllm"]
    rows = []
    for workload in dict.fromkeys(result["workload"] for result in results):
        found = {engine: by_place.get((workload, engine)) for engine in engines}
        ratios = [ratio(found[engine]) for engine in others]
        rows.append([str(workload), *(headline(found[engine]) for engine in engines), *ratios])
    header = ["workload", *engines, *(f"ours / {engine}" for engine in others)]
    return bench_results.markdown_table(header, rows)


def ratio(result: Mapping[str, Any] | None) -> str:
    """How many times as fast as this engine ours was, by medians."""
    return f"{result['ratio']:.2f}" if result and result.get("ratio") else "-"


def headline(result: Mapping[str, Any] | None) -> str:
    """The figure that a workload is about: decode speed, prompt speed, or seconds to ready."""
    if result is None:
        return "-"
    workload = str(result["workload"])
    if workload.startswith("ready"):
        return f"{result['seconds']:.1f} s"
    name = "prompt_tokens_per_s" if workload.startswith("prefill") else "decode_tokens_per_s"
    value = result.get(name)
    return f"{bench_results.speed(result['output_tokens_per_s'] if value is None else value)} tok/s"


def source(result: Mapping[str, Any]) -> str:
    """How it was measured, in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    # The control plane is measured without a model, and so without a dtype.
    what = ", ".join(filter(None, [result.get("model", "no model"), result.get("dtype")]))
    machine = result.get("machine", result["device"])
    return f"{what} on {machine}; {versions}; `{result['command']}`, {result['date']}."


def fill(page: str, root: Path) -> str:
    """The page with the table of each result file that it names, `root` being its folder."""

    def table(match: re.Match[str]) -> str:
        results = bench_results.load_results(root / match["file"])
        return f"{match['begin']}\n{format_results(results)}\n{match['end']}"

    return PLACE.sub(table, page)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="bring its tables up to date")
    arguments = parser.parse_args()
    if arguments.write:
        page = arguments.write.read_text(encoding="utf-8")
        arguments.write.write_text(fill(page, arguments.write.parent), encoding="utf-8")
    tables = [format_results(bench_results.load_results(file)) for file in arguments.files]
    if tables:
        print("\n\n".join(tables))


if __name__ == "__main__":
    common.run(main)
