"""What is shipped: sdist and wheel, the wheel in an empty environment, and README's commands in a clean clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distributions
from pathlib import Path

import pytest

from only_one.testing import redis_server
from rigs.programs import Logged
from rigs.waiting import LIMIT, eventually
from tests.recipes.place import shown_in

ROOT = Path(__file__).parent.parent
NOT_OURS = {"PYTHONPATH", "ONLY_ONE_REDIS_URL", "ONLY_ONE_ACTIVE"}


def environ(**env: str) -> dict[str, str]:
    whole = {"SOURCE_DATE_EPOCH": "1700000000", **os.environ, **env}
    return {name: value for name, value in whole.items() if name not in NOT_OURS}


def run(*command: str | Path, cwd: Path | None = None, **env: str) -> str:
    words = [str(part) for part in command]
    return subprocess.run(words, env=environ(**env), cwd=cwd, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def clones(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders with the files of a clean clone, as they are now: to build twice, and to do what README says."""
    ignored = [name.rstrip("/") for name in (ROOT / ".gitignore").read_text().split()]
    ignore = shutil.ignore_patterns(".git", *ignored)
    folder = tmp_path_factory.mktemp("clones")
    return [shutil.copytree(ROOT, folder / name, ignore=ignore) for name in ("clone", "again", "readme")]


@pytest.fixture(scope="module")
def dists(clones: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of what is built from each; `make release-check` keeps the first.

    It is built by our own setuptools, as to bring one takes longer than all the rest.
    """
    kept = os.environ.get("ONLY_ONE_RELEASE") or tmp_path_factory.mktemp("dist")
    folders = [Path(kept).resolve(), tmp_path_factory.mktemp("dist")]
    for clone, folder in zip(clones, folders, strict=False):
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, clone)
    return folders


@pytest.fixture(scope="module")
def python(dists: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an empty environment into which the wheel has been installed, by our own pip."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder)
    run(sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "-q", "install", *dists[0].glob("*.whl"))
    return folder / "bin" / "python"


def test_what_is_built_twice_is_equal(dists: list[Path]) -> None:
    first, second = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in dists)
    assert len(first) == 2
    assert first == second


def test_it_brings_redis_and_no_celery_its_types_and_its_license(python: Path) -> None:
    place = run(python, "-I", "-c", "import only_one; print(only_one.__file__)")
    assert "site-packages" in place
    installed = {each.metadata["Name"].lower(): each for each in distributions(path=[str(Path(place).parents[1])])}
    assert {"only-one", "redis"} <= installed.keys()
    assert "celery" not in installed
    ours = installed["only-one"]
    files = [str(file) for file in ours.files or ()]
    assert "only_one/py.typed" in files
    assert any(file.endswith("/LICENSE") for file in files)
    assert not any(file.startswith("tests/") for file in files)
    assert (ours.metadata["License-Expression"] or ours.metadata["License"]) == "MIT"
    # PyPI shows README without the files beside it, so all its links lead to the site, whose address stands once.
    links = re.findall(r"\]\(([^)]*)", str(ours.metadata.json["description"]))
    (site,) = re.findall("Documentation = (https://.*/)", (ROOT / "setup.cfg").read_text())
    pages = [re.sub(r"(.*)\.html", r"\1.md", link.removeprefix(site)) for link in links]
    assert len(pages) > 10
    assert [page for page in pages if not (ROOT / "docs" / page).is_file()] == []
    assert run("git", "-C", ROOT, "grep", "-l", "--untracked", site.split("/")[2]).split() == ["setup.cfg"]


def test_the_page_of_versions_says_what_is_run() -> None:
    page, settings, noxfile = ((ROOT / name).read_text() for name in ("docs/versions.md", "setup.cfg", "noxfile.py"))
    pythons, oldest = (
        json.loads(each) for each in re.findall(r"^(?:PYTHONS|OLDEST) = (\[.*?\])", noxfile, re.MULTILINE)
    )
    assert f"| {', '.join(pythons)} |" in page
    assert re.findall(r"Python :: (3\.\d+)", settings) == pythons
    assert f"python: {json.dumps(pythons)}" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert ", ".join(each.split("==")[1] for each in oldest) in page


def test_the_commands_of_the_readme_as_they_stand(clones: list[Path], tmp_path: Path) -> None:
    *_, clone = clones
    readme = (clone / "README.md").read_text()
    install, worker, calls, looks = re.findall(r"^```console\n(.*?)\n```", readme, re.DOTALL | re.MULTILINE)
    program, _forms = re.findall(r"^```python\n(.*?)```", readme, re.DOTALL | re.MULTILINE)
    venv.create(tmp_path / "venv")
    bin_ = tmp_path / "venv" / "bin"
    pip = bin_ / "pip"  # ours, as to bring another takes longer than what it is to do
    pip.write_text(f'#!/bin/sh\nPIP_NO_COMPILE=1 exec "{sys.executable}" -m pip --python "{bin_}/python" "$@"\n')
    pip.chmod(0o755)
    path = f"{bin_}{os.pathsep}{os.environ['PATH']}"

    def paste(command: str) -> str:
        return run("sh", "-c", command, cwd=clone, PATH=path)

    paste(install)
    with redis_server() as server:
        # Its run outlasts what follows here on any machine.
        longer = program.replace("redis://localhost:6379/0", server.url).replace("sleep(10)", f"sleep({10 * LIMIT})")
        (clone / "feeds.py").write_text(longer)
        command, log = ["sh", "-c", f"exec {worker}"], tmp_path / "log"
        with Logged(command, log, grace=1, cwd=clone, env=environ(PATH=path)) as running:
            paste(calls)
            skip = " ".join(shown_in("../../README.md"))
            assert eventually(lambda: re.search(skip, running.text), 2 * LIMIT), running.text
            assert "only_one:feeds.import_feed:" in paste(looks)
