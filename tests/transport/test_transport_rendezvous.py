"""The run's keys and the records by which its processes find each other."""

import json
import os
import re
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import zmq

from transport.errors import TransportError
from transport.rendezvous import RunKeys, discover, publish, withdraw, write_atomically


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_created_once(tmp_path: Path) -> None:
    keys = RunKeys.create(tmp_path)
    assert RunKeys.create(tmp_path) == RunKeys.load(tmp_path) == keys
    assert mode_of(tmp_path / "secret") == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


def test_keys_are_real_and_differ(tmp_path: Path) -> None:
    keys = RunKeys.create(tmp_path)
    assert len(set(asdict(keys).values())) == 5
    assert zmq.curve_public(keys.teacher_secret.encode()) == keys.teacher_public.encode()
    assert zmq.curve_public(keys.student_secret.encode()) == keys.student_public.encode()


def test_keys_are_not_printed(tmp_path: Path) -> None:
    keys = RunKeys.create(tmp_path)
    assert not any(value in repr(keys) for value in asdict(keys).values())


def test_runs_have_keys_of_their_own(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    one, two = (asdict(RunKeys.create(folder)) for folder in folders)
    assert all(one[name] != two[name] for name in one)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_keys_that_others_can_reach_are_refused(tmp_path: Path, mode: int) -> None:
    RunKeys.create(tmp_path)
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(TransportError, match="can be read by others: chmod 600"):
        RunKeys.load(tmp_path)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o770, 0o777, 0o1777])
@pytest.mark.parametrize("use", [RunKeys.create, RunKeys.load])
def test_folder_in_which_others_can_write_is_refused(
    tmp_path: Path, mode: int, use: Callable[[Path], RunKeys]
) -> None:
    RunKeys.create(tmp_path)
    tmp_path.chmod(mode)
    with pytest.raises(TransportError, match=f"{tmp_path} can be written by others: chmod go-w it"):
        use(tmp_path)
    tmp_path.chmod(0o755)
    use(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
@pytest.mark.parametrize("name", ["", "secret"])
def test_folder_and_keys_of_someone_else_are_refused(tmp_path: Path, name: str) -> None:
    RunKeys.create(tmp_path)
    os.chown(tmp_path / name, 12345, -1)
    with pytest.raises(TransportError, match="belongs to user 12345, this process to user 0"):
        RunKeys.load(tmp_path)


def make_link(path: Path) -> None:
    path.symlink_to(path.rename(path.with_name("elsewhere")))


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (make_link, "Too many levels of symbolic links"),
        (make_fifo, "is not a regular file"),
        (lambda path: path.write_bytes(b"\xff"), "is damaged"),
        (lambda path: path.write_text("[]"), "is damaged"),
        (lambda path: path.write_text('{"run": "x"}'), "is damaged"),
    ],
    ids=["link", "fifo", "bytes", "list", "incomplete"],
)
def test_secret_that_is_none_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    RunKeys.create(tmp_path)
    spoil(tmp_path / "secret")
    with pytest.raises(TransportError, match=message):
        RunKeys.load(tmp_path)


def test_keys_that_many_create_at_once_are_the_same(tmp_path: Path) -> None:
    num_rounds, num_creators = 20, 8
    with ThreadPoolExecutor(num_creators) as creators:
        for number in range(num_rounds):
            folder = tmp_path / str(number)
            folder.mkdir()
            keys = list(creators.map(RunKeys.create, [folder] * num_creators))
            assert len({one.run for one in keys}) == 1
            assert [path.name for path in folder.iterdir()] == ["secret"]


def test_folder_without_keys_is_refused(tmp_path: Path) -> None:
    message = f"{tmp_path / 'secret'} does not exist: this is no folder of a started run"
    with pytest.raises(TransportError, match=re.escape(message)):
        RunKeys.load(tmp_path)


def test_peers_are_published_and_withdrawn(tmp_path: Path) -> None:
    assert discover(tmp_path) == {}
    publish(tmp_path, "teacher-1", "tcp://127.0.0.1:1")
    publish(tmp_path, "teacher-0", "tcp://127.0.0.1:2")
    publish(tmp_path, "teacher-1", "tcp://127.0.0.1:3")
    assert discover(tmp_path) == {
        "teacher-0": "tcp://127.0.0.1:2",
        "teacher-1": "tcp://127.0.0.1:3",
    }
    withdraw(tmp_path, "teacher-1")
    withdraw(tmp_path, "teacher-1")
    assert list(discover(tmp_path)) == ["teacher-0"]
    assert mode_of(tmp_path / "peers") == 0o700
    assert mode_of(tmp_path / "peers" / "teacher-0.json") == 0o600


def test_half_written_records_are_not_seen(tmp_path: Path) -> None:
    publish(tmp_path, "teacher-0", "tcp://127.0.0.1:1")
    (tmp_path / "peers" / ".teacher-1.json.0123").write_text('{"endp')
    (tmp_path / "peers" / ".teacher-2.json").write_text('{"endp')
    assert list(discover(tmp_path)) == ["teacher-0"]


def deeply_nested(path: Path) -> None:
    path.write_text("[" * 4000)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.write_bytes(b"\xff"), "can't decode byte"),
        (lambda path: path.write_text('{"endp'), "Unterminated string"),
        (deeply_nested, "recursion"),
        (lambda path: path.write_text("[]"), r"'\[\]' has no endpoint tcp://address:port"),
        (lambda path: path.write_text('{"endpoint": 3}'), "has no endpoint"),
        (lambda path: path.write_text('{"endpoint": "ipc:///x"}'), "has no endpoint"),
        (lambda path: path.write_text('{"endpoint": "tcp://127.0.0.1:0"}'), "has no endpoint"),
        (lambda path: path.write_text('{"endpoint": "tcp://1.2.3:4"}'), "4 octets"),
        (lambda path: path.write_text('{"endpoint": "' + "x" * 9999), "Unterminated string"),
        (lambda path: path.chmod(0o620), "can be read by others"),
        (make_link, "symbolic links"),
        (make_fifo, "is not a regular file"),
    ],
)
def test_record_that_is_none_is_skipped_with_one_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    for index in range(2):
        publish(tmp_path, f"teacher-{index}", "tcp://127.0.0.1:1")
    spoil(tmp_path / "peers" / "teacher-0.json")
    for _ in range(3):
        assert list(discover(tmp_path)) == ["teacher-1"]
    (warning,) = caplog.messages
    assert warning.startswith("skipped a record: ")
    assert re.search(message, warning)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
def test_record_of_someone_else_is_skipped(tmp_path: Path) -> None:
    publish(tmp_path, "teacher-0", "tcp://127.0.0.1:1")
    os.chown(tmp_path / "peers" / "teacher-0.json", 12345, -1)
    assert discover(tmp_path) == {}


def test_atomic_write_leaves_only_the_file(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for content in ("old", "new"):
        write_atomically(path, json.dumps(content), mode=0o640)
    assert json.loads(path.read_text()) == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_atomic_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "record"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
