"""Build of disaggkd: three packages and the native libraries beside them.

Nothing here imports torch: native code is a plain C ABI loaded with ctypes, so one wheel fits every
Python and torch version.
"""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

PACKAGES = ("transport", "toolkit", "jobs")


def ucx_include_dir() -> str:
    """Return the folder of the UCX headers: `DISAGGKD_UCX_INCLUDE`, else the libucx wheel's."""
    chosen = os.environ.get("DISAGGKD_UCX_INCLUDE")
    if chosen:
        return chosen
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "UCX headers not found: install the build requirement libucx-cu12 "
            "or set DISAGGKD_UCX_INCLUDE to the folder that holds ucp/api/ucp.h"
        )
    return str(Path(spec.origin).parent / "include")


def find_nvcc() -> str | None:
    """Return the CUDA compiler, or None if there is none or `DISAGGKD_CUDA=0` wants none."""
    wanted = os.environ.get("DISAGGKD_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"DISAGGKD_CUDA={wanted}: set 1 (must be built), 0 (must not) or nothing")
    if wanted == "0":
        return None
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [f"{home}/bin" for home in (*homes, "/usr/local/cuda") if home]
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(folders))
    if nvcc is None and wanted == "1":
        raise SystemExit(
            "DISAGGKD_CUDA=1 but there is no nvcc on PATH, in CUDA_HOME, CUDA_PATH or"
            " /usr/local/cuda: install the CUDA toolkit, or unset DISAGGKD_CUDA"
        )
    return nvcc


def nvcc_command(nvcc: str, source: str, output: str) -> list[str]:
    """Return the command that makes a library for the GPUs of `DISAGGKD_CUDA_ARCHS` ("80;90").

    The newest one is kept as PTX too, for GPUs that come after it.
    """
    archs = os.environ.get("DISAGGKD_CUDA_ARCHS", "80;90").split(";")
    targets = [f"arch=compute_{arch},code=sm_{arch}" for arch in archs]
    targets.append(f"arch=compute_{archs[-1]},code=compute_{archs[-1]}")
    options = ["-O3", "-std=c++17", "--threads", "0", "-Xcompiler", "-fPIC,-Wall"]
    gencode = [option for target in targets for option in ("-gencode", target)]
    return [nvcc, *options, *gencode, "-shared", "-cudart", "static", source, "-o", output]


class BuildNative(build_ext):
    """Builds plain shared libraries: no Python ABI in the file name, nothing linked but libc."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        if ext.name.endswith("_cuda"):
            self.build_cuda(ext)
            return
        if ext.name.endswith("ucx"):
            ext.extra_compile_args += ["-isystem", ucx_include_dir()]
        super().build_extension(ext)

    def build_cuda(self, ext: Extension) -> None:
        nvcc = find_nvcc()
        assert nvcc is not None
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            nvcc_command(nvcc, ext.sources[0], str(output)), capture_output=True, text=True
        )
        if done.returncode:
            raise CompileError(f"{nvcc} failed:\n{done.stderr}")


def native(name: str, *sources: str) -> Extension:
    """Return a library of `transport/`, made from these files of `transport/csrc/`.

    Without a compiler a colocated teacher and the loss alone still work.
    """
    return Extension(
        f"transport.libdisaggkd_{name}",
        sources=[f"transport/csrc/{source}" for source in sources],
        depends=["setup.py", "transport/csrc/common.h"],
        extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra"],
        optional=True,
    )


def row_kernels() -> list[Extension]:
    """Return the loss's row kernels. Where they do not compile, the loss runs in torch ops."""
    headers = [str(path) for path in sorted(Path("toolkit/csrc").glob("*.h"))]
    cpu = Extension(
        "toolkit.libdisaggkd_rows",
        sources=["toolkit/csrc/rows_cpu.cpp"],
        depends=["setup.py", *headers],
        language="c++",
        extra_compile_args=[
            *("-O3", "-g0", "-std=c++17", "-Wall", "-Wextra", "-fopenmp"),
            *("-fno-math-errno", "-fno-trapping-math"),
        ],
        extra_link_args=["-fopenmp"],
        optional=True,
    )
    cuda = Extension(
        "toolkit.libdisaggkd_rows_cuda",
        sources=["toolkit/csrc/rows_cuda.cu"],
        depends=["setup.py", *headers],
        optional=os.environ.get("DISAGGKD_CUDA") != "1",
    )
    return [cpu, cuda] if find_nvcc() else [cpu]


class PlatformWheel(bdist_wheel):
    """Tags the wheel for the platform only, because the libraries know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    name="disaggkd",
    version="0.1.0",
    description="Distill large language models on Slurm: teachers on their own nodes, "
    "hidden states over RDMA, a fused loss",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=[f"{name}{rest}" for name in PACKAGES for rest in ("", ".*")]),
    package_dir={"": "."},
    package_data={
        "": ["py.typed"],
        "transport": ["csrc/*"],
        "toolkit": ["csrc/*", "planner/*.json"],
    },
    ext_modules=[
        native("ucx", "ucx_rma.c"),
        native("memory", "memory.c", "crc32c.c"),
        *row_kernels(),
    ],
    install_requires=[
        "torch>=2.6",
        "transformers>=5.0",
        "tokenizers>=0.21",
        "huggingface_hub>=1.0",
        "safetensors>=0.5",
        "numpy>=1.26",
        "pydantic>=2.8",
        "pyzmq>=26",
        "rich>=13.7",
        "typer>=0.15",
        "tomli-w>=1.0",
        "libucx-cu12>=1.17",
        "submitit>=1.5.4,<1.6",
    ],
    extras_require={
        "parquet": ["pyarrow>=15"],
        "demo": ["accelerate", "gguf"],
        "dev": [
            "build",
            "hypothesis",
            "mypy",
            "psutil",
            "pyarrow>=15",
            "pytest",
            "pytest-cov",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "setuptools>=70.1",
        ],
    },
    entry_points={
        "console_scripts": ["disaggkd=jobs.cli:main"],
        "submitit": ["job_environment=jobs.slurm.environment:HetSlurmJobEnvironment"],
    },
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
