"""The run's keys and the records by which its processes find each other."""

import json
import re
import stat
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


def test_folder_without_keys_is_refused(tmp_path: Path) -> None:
    message = f"{tmp_path / 'secret'} does not exist: this is no folder of a started run"
    with pytest.raises(TransportError, match=re.escape(message)):
        RunKeys.load(tmp_path)


def test_peers_are_published_and_withdrawn(tmp_path: Path) -> None:
    assert discover(tmp_path) == {}
    publish(tmp_path, "teacher-1", {"endpoint": "tcp://127.0.0.1:1"})
    publish(tmp_path, "teacher-0", {"endpoint": "tcp://127.0.0.1:2"})
    publish(tmp_path, "teacher-1", {"endpoint": "tcp://127.0.0.1:3"})
    assert discover(tmp_path) == {
        "teacher-0": {"endpoint": "tcp://127.0.0.1:2"},
        "teacher-1": {"endpoint": "tcp://127.0.0.1:3"},
    }
    withdraw(tmp_path, "teacher-1")
    withdraw(tmp_path, "teacher-1")
    assert list(discover(tmp_path)) == ["teacher-0"]
    assert mode_of(tmp_path / "peers" / "teacher-0.json") == 0o600


def test_half_written_records_are_not_seen(tmp_path: Path) -> None:
    publish(tmp_path, "teacher-0", {})
    (tmp_path / "peers" / ".teacher-1.json.0123").write_text('{"endp')
    (tmp_path / "peers" / ".teacher-2.json").write_text('{"endp')
    assert list(discover(tmp_path)) == ["teacher-0"]


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
