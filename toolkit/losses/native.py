"""The row kernels in native code: C++ on the CPU, CUDA C++ on a GPU.

Shapes: R rows, S columns of a tile. The libraries are a plain C interface
(`toolkit/csrc/rows_api.h`), tied to no version of Python or torch. Kernels check nothing; what is
asserted here is what a wrong pointer would turn into a wild access.
"""

import ctypes
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from toolkit.losses.divergences import Divergence, Objective
from toolkit.losses.rows import RowResults, Tile

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}
_DIVERGENCES = {name: number for number, name in enumerate(get_args(Divergence))}


class NativeError(RuntimeError):
    """A native row kernel could not run; the message holds the driver's own."""


class CTile(ctypes.Structure):
    """`RowsTile` of the C interface."""

    _fields_ = [
        ("student", ctypes.c_void_p),
        ("teacher", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("student_stride", ctypes.c_int64),
        ("teacher_stride", ctypes.c_int64),
        ("first_column", ctypes.c_int64),
        ("student_type", ctypes.c_int32),
        ("teacher_type", ctypes.c_int32),
    ]


class CObjective(ctypes.Structure):
    """`RowsObjective` of the C interface."""

    _fields_ = [
        ("temperature", ctypes.c_double),
        ("teacher_weight", ctypes.c_double),
        ("kd_factor", ctypes.c_double),
        ("ce_factor", ctypes.c_double),
        ("z_factor", ctypes.c_double),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("divergence", ctypes.c_int32),
    ]


class CLaunch(ctypes.Structure):
    """`RowsLaunch` of the C interface."""

    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("device", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    ]


class NativeKernels:
    """The four functions of `RowKernels`, of one library."""

    def __init__(self, library: Path) -> None:
        """Load the library; torch is loaded before it, so that both share its OpenMP threads."""
        self._library = ctypes.CDLL(str(library))
        self._library.rows_chunk_columns.restype = ctypes.c_int64
        self._library.rows_error.restype = ctypes.c_char_p
        self._chunk_columns = int(self._library.rows_chunk_columns())
        self._name = library.name

    def statistics(self, tile: Tile, labels: Tensor, objective: Objective, state: Tensor) -> None:
        """Merge a tile into the state; see `RowKernels`."""
        assert labels.dtype == torch.int64
        self._call(
            "rows_statistics",
            _tile(tile),
            _objective(objective),
            _launch(tile.student),
            labels,
            self._partials(tile, state),
            state,
        )

    def finish(self, state: Tensor, objective: Objective) -> RowResults:
        """Return the results of rows whose tiles are all in; see `RowKernels`."""
        count = len(state)
        shapes = ((count, 5), (count, 2), (count,))
        results = RowResults(*(_empty(shape, state) for shape in shapes))
        self._call(
            "rows_finish",
            _objective(objective),
            _launch(state),
            ctypes.c_int64(count),
            ctypes.c_int32(_TYPES[state.dtype]),
            state,
            *results,
        )
        return results

    def sums(self, tile: Tile, objective: Objective, results: RowResults) -> None:
        """Add a tile's part to the sums of the second pass; see `RowKernels`."""
        self._call(
            "rows_sums",
            _tile(tile),
            _objective(objective),
            _launch(tile.student),
            results.constants,
            self._partials(tile, results.sums),
            results.sums,
        )

    def gradient(
        self,
        tile: Tile,
        labels: Tensor,
        objective: Objective,
        results: RowResults,
        weights: Tensor | None = None,
    ) -> None:
        """Overwrite the student's logits with their gradient; see `RowKernels`."""
        assert labels.dtype == torch.int64
        assert weights is None or weights.dtype == results.sums.dtype
        self._call(
            "rows_gradient",
            _tile(tile),
            _objective(objective),
            _launch(tile.student),
            labels,
            weights,
            results.constants,
            results.sums,
        )

    def _partials(self, tile: Tile, like: Tensor) -> Tensor:
        count, columns = tile.student.shape
        return _empty((count, -(-columns // self._chunk_columns), like.shape[1]), like)

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*map(_passed, arguments))
        if code:
            text = self._library.rows_error(code).decode()
            raise NativeError(f"{function} of {self._name} failed: {text} (code {code})")


def _tile(tile: Tile) -> CTile:
    for logits in (tile.student, tile.teacher):
        assert logits.stride(1) == 1 or logits.shape[1] == 1, "a row's logits must be adjacent"
    assert tile.student.shape == tile.teacher.shape
    return CTile(
        tile.student.data_ptr(),
        tile.teacher.data_ptr(),
        *tile.student.shape,
        tile.student.stride(0),
        tile.teacher.stride(0),
        tile.first_column,
        _TYPES[tile.student.dtype],
        _TYPES[tile.teacher.dtype],
    )


def _objective(objective: Objective) -> CObjective:
    share = objective.teacher_share
    return CObjective(
        objective.temperature,
        1.0 if share is None else share,
        objective.kd_factor,
        objective.ce_factor,
        objective.z_factor,
        objective.scale,
        objective.softcap or 0.0,
        _DIVERGENCES[objective.divergence],
    )


def _launch(tensor: Tensor) -> CLaunch:
    if tensor.device.type == "cpu":
        return CLaunch(None, 0, torch.get_num_threads())
    stream = torch.cuda.current_stream(tensor.device)
    return CLaunch(stream.cuda_stream, tensor.device.index, 0)


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _passed(argument: Any) -> Any:
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    if isinstance(argument, Tensor):
        assert argument.is_contiguous()
        return ctypes.c_void_p(argument.data_ptr())
    return argument
