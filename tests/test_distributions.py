"""The two distributions: their files; the wheel alone, without a checkout, trains and verifies."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import speakernet

ROOT = Path(__file__).resolve().parents[1]
NOT_DISTRIBUTED = {".ci", ".gitignore"}
SMALL_CORPUS = (
    "--speakers 6 --utterances 4 --trial_speakers 6 --trial_utterances 4 --noises 6 "
    "--rooms 3 --workers 0"
)
SHORT_TRAINING = (
    "--max_epoch 1 --batch_size 8 --data.crop_frames 60 --data.num_workers 0 "
    "--model.options.channels 8"
)
SHORT_EVALUATION = "--evaluation.eval_frames 60 --evaluation.bootstrap_samples 20"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*words, folder, statuses=(0,), python_path=""):
    """The output of a command, which must end with one of the statuses and cannot import from this
    checkout.
    """
    command = [str(word) for word in words]
    environment = {**os.environ, "PYTHONPATH": str(python_path)}
    options = {"capture_output": True, "text": True, "check": False, "timeout": 600}
    finished = subprocess.run(command, cwd=folder, env=environment, **options)
    assert finished.returncode in statuses, (
        command,
        finished.stdout[-2000:],
        finished.stderr[-2000:],
    )
    return finished.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A folder with wheel and source distribution, made from a copy of the files that git tracks or
    would add.
    """
    pytest.importorskip(
        "build.__main__", reason="build is not installed (pip install -e '.[test-all]')"
    )
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if listing.returncode:
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("distributions")
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    builder = Path(sys.modules["build.__main__"].__file__ or "")
    options = ["--no-isolation", "--outdir", folder / "dist", folder / "source"]
    run(sys.executable, "-m", "build", *options, folder=folder, python_path=builder.parents[1])
    return folder / "dist"


def test_source_distribution(distributions):
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    assert archive.name == f"speakernet-{speakernet.__version__}.tar.gz"
    source = distributions.parent / "source"
    wanted = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    wanted = {
        name
        for name in wanted
        if name.split("/")[0] not in NOT_DISTRIBUTED and ".egg-info" not in name
    }
    assert len(wanted) > 300 and wanted - held == set()


def test_wheel_content(distributions):
    (archive,) = distributions.glob("*.whl")
    with zipfile.ZipFile(archive) as file:
        held = file.namelist()
    assert {name.split("/")[0].split("-")[0] for name in held} == {"speakernet"}
    source = distributions.parent / "source"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "speakernet").rglob("*")
        if path.is_file()
    }
    recipes = {f"speakernet/recipes/{path.relative_to(source / 'configs').as_posix()}" for path in
               (source / "configs").rglob("*.yaml")}  # fmt: skip
    assert len(recipes) > 10 and (wanted | recipes) - set(held) == set()


def test_wheel_alone(distributions, tmp_path):
    """In an environment with the libraries of this one, but without the checkout or its editable
    install.
    """
    environment = tmp_path / "environment"
    builder = venv.EnvBuilder(with_pip=False)
    places = builder.ensure_directories(environment)
    builder.create(environment)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(places.env_exe, "-c", ask, folder=tmp_path).strip())
    # Only folders: their .pth files, which may lead to this checkout, are not followed.
    libraries = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n", encoding="utf-8")
    (wheel,) = distributions.glob("*.whl")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        places.env_exe,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        wheel,
        folder=tmp_path,
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    command = Path(places.bin_path) / "speakernet"
    assert run(command, "--version", folder=empty) == f"speakernet {speakernet.__version__}\n"
    where = run(places.env_exe, "-c", "import speakernet; print(speakernet.__file__)", folder=empty)
    assert Path(where.strip()).is_relative_to(packages)

    made = run(
        command,
        "prepare",
        "synthetic",
        "--save_path",
        "corpus",
        *SMALL_CORPUS.split(),
        folder=empty,
    )
    program, *words = shlex.split(made.splitlines()[-1])
    assert (program, words[0]) == ("speakernet", "train") and "exp01.yaml" in words
    run(
        places.env_exe,
        "-m",
        program,
        *words,
        *SHORT_TRAINING.split(),
        *SHORT_EVALUATION.split(),
        folder=empty,
    )
    assert (empty / "exps/synthetic/report.html").is_file()
    recordings = sorted((empty / "corpus/trial").rglob("*.wav"))
    answer = run(
        command,
        "verify",
        *recordings[:2],
        "--model",
        "exps/synthetic/best.pt",
        folder=empty,
        statuses=(0, 1),
    )
    assert "speaker" in answer and "threshold" in answer
