"""Ending a run from outside."""

import os
import signal

from jobs.run_folder import RunFolder
from jobs.slurm.client import cancel


def cancel_run(folder: RunFolder) -> str:
    """End what works on a run, and return what was done; harmless when nothing does."""
    folder.load()
    holder = folder.holder()
    if holder is not None:
        os.kill(holder, signal.SIGTERM)
        return f"process {holder} was asked to save and end"
    job = folder.job_id()
    if job is None:
        return f"nothing works on {folder.path}"
    cancel(job)
    return f"Slurm job {job} is cancelled"
