"""The arena shows a version whole or not at all."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from rose_hpc.errors import LayoutError, WeightsError
from rose_hpc.weights.arena import Arena, ShardRecord
from rose_hpc.weights.digest import digest_image
from rose_hpc.weights.layout import Run, build_layout

LAYOUT = build_layout([("a", (8, 4)), ("b", (5,))], "float32")


def image_of(seed):
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.image_bytes, dtype=np.uint8)


def committed(arena, version, image):
    arena.reserve(version)
    arena.write(version, Run(0, LAYOUT.image_bytes), image)
    arena.commit(version, digest_image(LAYOUT, image))


def test_a_committed_version_reads_back_and_an_uncommitted_one_is_not_visible(tmp_path):
    arena = Arena.create(tmp_path / "arena", LAYOUT)
    committed(arena, 3, image_of(3))
    arena.write(4, Run(0, 4), b"abcd")
    reader = Arena.open(tmp_path / "arena")
    assert reader.versions() == [3] and reader.record(4) is None
    assert (reader.map_version(3) == image_of(3)).all()
    with pytest.raises(WeightsError, match="not committed"):
        reader.map_version(4)


def test_a_committed_version_cannot_be_written_again(tmp_path):
    arena = Arena.create(tmp_path / "arena", LAYOUT)
    committed(arena, 1, image_of(1))
    with pytest.raises(WeightsError, match="committed"):
        arena.write(1, Run(0, 4), b"xxxx")


@pytest.mark.parametrize("run", [Run(-4, 4), Run(LAYOUT.image_bytes - 4, 8), Run(LAYOUT.image_bytes, 4)])
def test_a_write_outside_the_image_is_refused(tmp_path, run):
    arena = Arena.create(tmp_path / "arena", LAYOUT)
    with pytest.raises(WeightsError, match="outside"):
        arena.write(0, run, bytes(run.nbytes))


def test_pruning_keeps_the_newest_and_does_not_pull_a_mapped_image_away(tmp_path):
    arena = Arena.create(tmp_path / "arena", LAYOUT)
    for version in range(5):
        committed(arena, version, image_of(version))
    mapped = arena.map_version(0)
    arena.prune(2)
    assert arena.versions() == [3, 4] and (mapped == image_of(0)).all()


def test_another_layout_is_refused_in_the_same_arena(tmp_path):
    Arena.create(tmp_path / "arena", LAYOUT)
    with pytest.raises(LayoutError):
        Arena.create(tmp_path / "arena", build_layout([("a", (8, 5))], "float32"))


def test_the_folder_is_private_and_a_link_in_place_of_an_image_is_not_followed(tmp_path):
    arena = Arena.create(tmp_path / "arena", LAYOUT)
    assert (tmp_path / "arena").stat().st_mode & 0o777 == 0o700
    (tmp_path / "victim").write_bytes(b"precious")
    (tmp_path / "arena" / "v9.img").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError):
        arena.write(9, Run(0, 4), b"xxxx")
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_shards_of_a_version_are_listed_by_rank(tmp_path):
    arena = Arena.create(tmp_path / "arena", LAYOUT)
    shards = [ShardRecord(2, rank, 7 + rank, (Run(rank * 8, 8),)) for rank in (1, 0)]
    for shard in shards:
        arena.complete_shard(shard)
    assert arena.shards(2) == sorted(shards, key=lambda s: s.rank) and arena.shards(1) == []


def test_a_missing_arena_is_an_error_after_the_deadline(tmp_path):
    with pytest.raises(WeightsError, match="no arena"):
        Arena.open(tmp_path / "nowhere", deadline_s=0.05)


def test_a_writer_killed_at_any_instant_leaves_only_whole_versions(tmp_path):
    program = textwrap.dedent("""
        import sys, itertools, numpy as np
        from pathlib import Path
        from rose_hpc.weights.arena import Arena
        from rose_hpc.weights.digest import digest_image
        from rose_hpc.weights.layout import Run, build_layout
        layout = build_layout([("a", (8, 4)), ("b", (5,))], "float32")
        arena = Arena.create(Path(sys.argv[1]), layout)
        print("up", flush=True)
        for version in itertools.count():
            image = np.random.default_rng(version).integers(0, 256, layout.image_bytes, dtype=np.uint8)
            arena.prune(3)
            for start in range(0, layout.image_bytes, 4):
                arena.write(version, Run(start, 4), image[start:start + 4])
            arena.commit(version, digest_image(layout, image))
    """)
    for attempt in range(3):
        where = tmp_path / f"arena{attempt}"
        writer = subprocess.Popen([sys.executable, "-c", program, str(where)], stdout=subprocess.PIPE)
        writer.stdout.readline()
        time.sleep(0.15 + 0.037 * attempt)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(10)
        writer.stdout.close()
        arena = Arena.open(where)
        assert arena.versions()
        for version in arena.versions():
            assert digest_image(LAYOUT, arena.map_version(version)) == arena.record(version).digest
