"""The wheel and the sdist: built, complete, and installed into an empty environment, where the tutorial runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import wholestep as ws

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere_and_has_a_section_in_the_changelog() -> None:
    assert PROJECT["version"] == ws.__version__
    assert f"\n## {ws.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_extra_and_every_tool_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.partition("==")[0].lower().replace("-", "_") for line in lines if "==" in line}
    asked = [*PROJECT["dependencies"], *(name for group in PROJECT["optional-dependencies"].values() for name in group)]
    names = [re.split(r"[\[>]", each)[0].lower().replace("-", "_") for each in asked]
    assert [name for name in names if name not in pinned] == []
    assert {"accelerate", "lightning", "report", "transformers"} <= set(PROJECT["optional-dependencies"])


def run(*command: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, built from the sdist, and the sdist, built from the tree."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), folder=folder)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.long
def test_the_wheel_and_the_sdist_have_all_that_belongs_to_them(built: tuple[Path, Path]) -> None:
    wheel, sdist = built
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    code = [path for path in (ROOT / "src/wholestep").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    sources = {f"wholestep/{path.relative_to(ROOT / 'src/wholestep')}" for path in code}
    pages = {f"wholestep/error_pages/{path.name}" for path in (ROOT / "docs/errors").glob("*.md")}
    info = f"wholestep-{ws.__version__}.dist-info"
    wanted = {"wholestep/py.typed", f"{info}/licenses/LICENSE", f"{info}/entry_points.txt"}
    assert sources | pages | wanted <= inside
    assert {name for name in inside if not name.startswith(("wholestep/", info))} == set()
    assert not [name for name in inside if name.endswith((".pyc", ".so"))]
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "CHANGELOG.md", "README.md", "constraints.txt", "Makefile", "pyproject.toml"} <= files
    assert {"tests/conftest.py", "docs/tutorial.md", "src/wholestep/py.typed"} <= files
    metadata = metadata_of(wheel)
    assert metadata["Version"] == ws.__version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert set(metadata.get_all("Provides-Extra") or ()) == set(PROJECT["optional-dependencies"])


@pytest.mark.long
def test_installed_into_an_empty_environment_the_wheel_runs_the_tutorial(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """torch and other dependencies are those of this environment: a .pth leads to them, behind what is installed."""
    python = tmp_path / "bin" / "python"
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path), folder=tmp_path)
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    run(*pip, "install", "--no-deps", "--no-index", str(built[0]), folder=tmp_path)
    site = Path(run(str(python), "-c", "import site; print(site.getsitepackages()[0])", folder=tmp_path).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = (
        "import pathlib, sys, wholestep, pages\n"
        "assert pathlib.Path(wholestep.__file__).is_relative_to(sys.prefix), wholestep.__file__\n"
        "pages.run_page('tutorial.md')\n"
        "print('it ran', wholestep.__version__)\n"
    )
    said = run(str(python), "-c", code, folder=tmp_path, PYTHONPATH=str(ROOT / "tests"), WHOLESTEP_LOWER="eager")
    assert said.splitlines()[-1] == f"it ran {ws.__version__}"
    assert "WS-ITEM" in run(str(python), "-m", "wholestep", "explain", "WS-ITEM", folder=tmp_path)
    checked = subprocess.run([*pip, "check"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert [line for line in checked.stdout.splitlines() if line.startswith("wholestep ")] == []
