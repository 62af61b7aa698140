from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rose_hpc.errors import UsageError
from rose_hpc.models.folder import FolderInUse, new_folder


def test_the_folder_appears_with_all_its_files(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    with new_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert list(target.parent.iterdir()) == [target]


def test_an_empty_folder_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with new_folder(tmp_path / "model") as folder:
        (folder / "a").write_text("1")
    assert (tmp_path / "model" / "a").exists()


@pytest.mark.parametrize("kind", ["folder", "file", "broken link"])
def test_what_is_already_there_is_refused_and_kept(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "model"
    if kind == "folder":
        target.mkdir()
        (target / "mine").write_text("precious")
    elif kind == "file":
        target.write_text("precious")
    else:
        target.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FolderInUse, match="remedy") as refusal, new_folder(target):
        pytest.fail("the block must not run")
    assert isinstance(refusal.value, UsageError)
    assert list(tmp_path.iterdir()) == [target]
    if kind != "broken link":
        assert (target / "mine" if kind == "folder" else target).read_text() == "precious"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError, SystemExit])
def test_an_interrupted_write_leaves_nothing(tmp_path: Path, interruption: type[BaseException]) -> None:
    with pytest.raises(interruption), new_folder(tmp_path / "model") as folder:
        (folder / "half").write_text("1")
        raise interruption
    assert list(tmp_path.iterdir()) == []


def test_of_two_writers_the_later_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FolderInUse), new_folder(tmp_path / "model") as late:
        (late / "who").write_text("late")
        with new_folder(tmp_path / "model") as early:
            (early / "who").write_text("early")
    assert (tmp_path / "model" / "who").read_text() == "early"
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


def test_a_killed_writer_leaves_no_half_made_folder(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from rose_hpc.models.folder import new_folder\n"
        "with new_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('1')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "model")], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    with new_folder(tmp_path / "model") as folder:
        (folder / "a").write_text("1")
    assert [f.name for f in (tmp_path / "model").iterdir()] == ["a"]
