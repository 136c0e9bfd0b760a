"""The two curves: their numbers are the formulas', and the pictures hold both lines."""

import csv
import math
import sys
import xml.etree.ElementTree as ET

import pytest

from normscope.errors import MissingExtra
from normscope.verify import figures

# a dozen rounded operations on numbers of at most 2
TOLERANCE = 32 * 2.0**-52


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures") / "new"
    figures.write(folder)
    return folder


def rows_of(path):
    with path.open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def test_four_files_are_written(folder):
    assert sorted(path.name for path in folder.iterdir()) == [
        "first-output-against-companion.csv",
        "first-output-against-companion.svg",
        "output-norm-against-scale.csv",
        "output-norm-against-scale.svg",
    ]


def test_output_norm_is_the_formula(folder):
    rows = rows_of(folder / "output-norm-against-scale.csv")
    assert {row["eps"] for row in rows} == {1e-5, 0.1}
    for row in rows:
        t, eps = row["scale"], row["eps"]
        assert row["output norm"] == pytest.approx(math.sqrt(2) * t / math.sqrt(t * t + eps), abs=TOLERANCE)


def test_first_output_is_the_formula(folder):
    rows = rows_of(folder / "first-output-against-companion.csv")
    assert {row["eps"] for row in rows} == {1e-5, 0.01}
    for row in rows:
        b, eps = row["b"], row["eps"]
        assert row["output of the sample 0"] == pytest.approx(-b / math.sqrt(b * b + 4 * eps), abs=TOLERANCE)


@pytest.mark.parametrize("name", ["output-norm-against-scale", "first-output-against-companion"])
def test_picture_has_two_lines_and_titles(folder, name):
    text = (folder / f"{name}.svg").read_text()
    ET.fromstring(text)
    assert text.count("mark-line role-mark") >= 1
    assert all(colour in text for colour in ("#0072B2", "#D55E00"))
    assert "eps" in text


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_missing_package_names_the_extra(monkeypatch, tmp_path, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra) as error:
        figures.write(tmp_path / "figures")
    assert str(error.value) == (
        f"--figures needs {package}, which is not installed: pip install 'normscope[report]'"
    )
    assert not (tmp_path / "figures").exists()
