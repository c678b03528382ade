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
from tests.conftest import REPOSITORY

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


def run(line, folder, statuses=(0,), python_path=""):
    """The output of a command, which must end with one of the statuses and cannot import from this
    checkout.
    """
    environment = {**os.environ, "PYTHONPATH": str(python_path)}
    options = {"capture_output": True, "text": True, "check": False, "timeout": 600}
    finished = subprocess.run(shlex.split(line), cwd=folder, env=environment, **options)
    output = finished.stdout[-2000:], finished.stderr[-2000:]
    assert finished.returncode in statuses, (line, *output)
    return finished.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A folder with wheel and source distribution, made from a copy of the files that git tracks or
    would add.
    """
    pytest.importorskip(
        "build.__main__", reason="build is not installed (pip install -e '.[test-all]')"
    )
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout")
    folder = tmp_path_factory.mktemp("distributions")
    for name in filter(None, listing.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / "source" / name)
    packages = Path(sys.modules["build.__main__"].__file__).parents[1]
    line = f"{sys.executable} -m build --no-isolation --outdir {folder}/dist {folder}/source"
    run(line, folder, python_path=packages)
    return folder / "dist"


def files_below(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix() for path in files}


def test_source_distribution(distributions):
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    assert archive.name == f"speakernet-{speakernet.__version__}.tar.gz"
    expected = {
        name
        for name in files_below(distributions.parent / "source")
        if name.split("/")[0] not in NOT_DISTRIBUTED and ".egg-info" not in name
    }
    assert len(expected) > 300 and expected <= held


def test_wheel_content(distributions):
    (archive,) = distributions.glob("*.whl")
    with zipfile.ZipFile(archive) as file:
        held = set(file.namelist())
    assert {name.split("/")[0].split("-")[0] for name in held} == {"speakernet"}
    source = distributions.parent / "source"
    modules = {f"speakernet/{name}" for name in files_below(source / "speakernet")}
    names = [name for name in files_below(source / "configs") if name.endswith(".yaml")]
    recipes = {f"speakernet/recipes/{name}" for name in names}
    assert len(recipes) > 10 and modules | recipes <= held


def test_wheel_alone(distributions, tmp_path):
    """In an environment with the libraries of this one, but without the checkout or its editable
    install.
    """
    environment = tmp_path / "environment"
    builder = venv.EnvBuilder(with_pip=False)
    places = builder.ensure_directories(environment)
    builder.create(environment)
    python = places.env_exe
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(f'{python} -c "{ask}"', tmp_path).strip())
    # Only folders: their .pth files, which may lead to this checkout, are not followed.
    libraries = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n", encoding="utf-8")
    (wheel,) = distributions.glob("*.whl")
    install = f"-m pip --python {python} install -q --no-deps --no-index {wheel}"
    run(f"{sys.executable} {install}", tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    command = f"{places.bin_path}/speakernet"
    assert run(f"{command} --version", empty) == f"speakernet {speakernet.__version__}\n"
    where = run(f"{python} -c 'import speakernet; print(speakernet.__file__)'", empty)
    assert Path(where.strip()).is_relative_to(packages)

    made = run(f"{command} prepare synthetic --save_path corpus {SMALL_CORPUS}", empty)
    training = made.splitlines()[-1].strip()
    assert training.startswith("speakernet train ") and "exp01.yaml" in training
    run(f"{python} -m {training} {SHORT_TRAINING} {SHORT_EVALUATION}", empty)
    assert (empty / "exps/synthetic/report.html").is_file()
    first, second, *_ = sorted((empty / "corpus/trial").rglob("*.wav"))
    verify = f"{command} verify {first} {second} --model exps/synthetic/best.pt"
    answer = run(verify, empty, statuses=(0, 1))
    assert "speaker" in answer and "threshold" in answer
