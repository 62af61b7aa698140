"""The slot file: whole records only, one writer, a writer known by more than its process id."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_hpc.coserve.slots import SlotReader, SlotWriter, Writer, slot_bytes, slot_offset, start_ticks
from rose_hpc.errors import EnvironmentFault, RoseError

CAPACITY = 256


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slots"


def test_a_reader_sees_the_newest_record_and_who_wrote_it(path: Path) -> None:
    writer = SlotWriter(path, CAPACITY)
    reader = SlotReader(path, CAPACITY)
    for payload in (b"first", b"", b"third"):
        writer.write(payload)
        record = reader.read()
        assert record is not None and record.payload == payload
    assert record.writer == Writer(os.getpid(), start_ticks(os.getpid()) or 0)
    assert record.writer.alive()


def test_there_is_nothing_to_read_before_the_first_record(path: Path) -> None:
    assert SlotReader(path, CAPACITY).read() is None
    writer = SlotWriter(path, CAPACITY)
    assert SlotReader(path, CAPACITY).read() is None
    writer.close()


@given(
    payloads=st.lists(st.binary(max_size=CAPACITY), min_size=1, max_size=5),
    torn=st.binary(max_size=CAPACITY),
    data=st.data(),
)
def test_a_torn_slot_leaves_the_record_before_it(
    tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes], torn: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("torn") / "slots"
    writer = SlotWriter(path, CAPACITY)
    for payload in payloads:
        writer.write(payload)
    new = slot_bytes(len(payloads) + 1, torn)
    cut = data.draw(st.integers(0, len(new)))
    with path.open("r+b") as file:
        file.seek(slot_offset(len(payloads) + 1, CAPACITY))
        file.write(new[:cut])
    record = SlotReader(path, CAPACITY).read()
    writer.close()
    assert record is not None
    before, after = (len(payloads), payloads[-1]), (len(payloads) + 1, torn)
    assert (record.sequence, record.payload) in ([after] if cut == len(new) else [before, after])  # what is missing may be equal


@given(payload=st.binary(min_size=1, max_size=CAPACITY), data=st.data())
def test_a_changed_bit_is_never_read(tmp_path_factory: pytest.TempPathFactory, payload: bytes, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("bits") / "slots"
    writer = SlotWriter(path, CAPACITY)
    writer.write(b"before")
    writer.write(payload)
    at = slot_offset(2, CAPACITY) + data.draw(st.integers(0, 16 + len(payload) - 1))
    image = bytearray(path.read_bytes())
    image[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(image)
    record = SlotReader(path, CAPACITY).read()
    writer.close()
    assert record is not None and record.payload == b"before"


WRITER = """
import sys
from pathlib import Path
from rose_hpc.coserve.slots import SlotWriter
writer = SlotWriter(Path(sys.argv[1]), 4096)
print("up", flush=True)
for n in range(1, 1 << 40):
    writer.write(n.to_bytes(8, "little") * (1 + n % 512))
"""


@pytest.fixture
def busy_writer(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        yield process
        process.kill()


def test_records_read_beside_a_writer_at_full_speed_are_whole_and_in_order(path: Path, busy_writer: subprocess.Popen[bytes]) -> None:
    reader, seen, end_s = SlotReader(path, 4096), [0], time.monotonic() + 30
    while len(set(seen)) <= 100 and time.monotonic() < end_s:
        record = reader.read()
        if record is None:
            continue
        n = int.from_bytes(record.payload[:8], "little")
        assert record.payload == n.to_bytes(8, "little") * (1 + n % 512)
        assert record.sequence == n >= seen[-1]
        seen.append(n)
    assert len(set(seen)) > 100


def test_a_killed_writer_is_not_alive_even_as_a_zombie_and_its_last_record_is_whole(
    path: Path, busy_writer: subprocess.Popen[bytes]
) -> None:
    reader, end_s = SlotReader(path, 4096), time.monotonic() + 30
    while (before := reader.read()) is None and time.monotonic() < end_s:
        time.sleep(0.01)
    busy_writer.kill()
    os.waitid(os.P_PID, busy_writer.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the process table
    record = reader.read()
    assert before is not None and record is not None and not record.writer.alive()
    assert record.sequence >= before.sequence
    n = int.from_bytes(record.payload[:8], "little")
    assert record.payload == n.to_bytes(8, "little") * (1 + n % 512)


def test_another_process_with_the_writers_id_is_not_the_writer() -> None:
    ours = start_ticks(os.getpid())
    assert ours is not None
    assert Writer(os.getpid(), ours).alive()
    assert not Writer(os.getpid(), ours - 1).alive()


def test_a_second_writer_is_refused_while_the_first_lives(path: Path) -> None:
    first = SlotWriter(path, CAPACITY)
    with pytest.raises(EnvironmentFault, match="has a writer already"):
        SlotWriter(path, CAPACITY)
    first.close()
    SlotWriter(path, CAPACITY).close()


def test_the_next_writer_goes_on_with_the_sequence(path: Path) -> None:
    reader = None
    for expected in (b"a", b"b", b"c"):
        writer = SlotWriter(path, CAPACITY)
        writer.write(expected)
        reader = SlotReader(path, CAPACITY) if reader is None else reader
        record = reader.read()
        writer.close()
        assert record is not None and record.payload == expected


def test_the_file_is_private_and_a_stranger_in_its_place_is_refused(path: Path, tmp_path: Path) -> None:
    SlotWriter(path, CAPACITY).close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(EnvironmentFault, match="cannot hold shared state"):
        SlotWriter(path, CAPACITY)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic link"):
        SlotWriter(link, CAPACITY)


def test_a_record_that_is_too_long_is_refused_and_the_one_before_stays(path: Path) -> None:
    writer = SlotWriter(path, CAPACITY)
    writer.write(b"short")
    with pytest.raises(RoseError, match="too long"):
        writer.write(bytes(CAPACITY + 1))
    record = SlotReader(path, CAPACITY).read()
    assert record is not None and record.payload == b"short"


def test_a_file_of_another_capacity_is_an_error_not_a_record(path: Path) -> None:
    writer = SlotWriter(path, CAPACITY)
    writer.write(b"x")
    with pytest.raises(RoseError, match="not a file of ours"):
        SlotReader(path, CAPACITY + 8).read()


def test_two_torn_slots_are_an_error_not_silence(path: Path) -> None:
    writer = SlotWriter(path, CAPACITY)
    writer.write(b"one")
    writer.write(b"two")
    with path.open("r+b") as file:
        for sequence in (1, 2):
            file.seek(slot_offset(sequence, CAPACITY))
            file.write(struct.pack("<Q", 99))
    with pytest.raises(RoseError, match="no whole record"):
        SlotReader(path, CAPACITY).read()


def test_a_reader_finds_the_file_that_took_its_place_when_it_looks_again(path: Path) -> None:
    old = SlotWriter(path, CAPACITY)
    old.write(b"old")
    reader = SlotReader(path, CAPACITY)
    path.unlink()
    new = SlotWriter(path, CAPACITY)
    new.write(b"new")
    assert (record := reader.read()) is not None and record.payload == b"old"
    reader.reopen()
    assert (record := reader.read()) is not None and record.payload == b"new"
    old.close()
