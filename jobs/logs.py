"""The logs of a run, merged as they grow."""

import time

from jobs.run_folder import RunFolder
from toolkit.errors import InputError

_PAUSE_S = 0.5


def print_logs(folder: RunFolder, role: str, follow: bool) -> None:
    """Print the logs, each line after its file's name.

    Args:
        folder: run folder.
        role: beginning of the wanted files' names, or "" for all.
        follow: go on until interrupted.

    Raises:
        InputError: there is no such log.
    """
    offsets: dict[str, int] = {}
    while True:
        for path in sorted(folder.logs.glob(f"{role}*.log")):
            with path.open("rb") as stream:
                stream.seek(offsets.get(path.name, 0))
                data = stream.read()
            whole = data if not follow else data[: data.rfind(b"\n") + 1]
            offsets[path.name] = offsets.get(path.name, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                print(f"{path.stem}: {line}", flush=True)
        if not follow:
            break
        time.sleep(_PAUSE_S)
    if not offsets:
        raise InputError(f"{folder.logs} has no log of {role or 'any role'} yet")
