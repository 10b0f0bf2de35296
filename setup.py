"""Builds the native module with CMake; everything else about the package is in setup.cfg.

The CMake build directory outlives the build, so that a rebuild compiles only what changed.
CMAKE_ARGS in the environment is passed on, for example CMAKE_ARGS=-DCMAKE_BUILD_TYPE=Debug.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def find(*programs: str) -> str | None:
    """Returns the path of the first of these programs that the environment or PATH has."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    return next(filter(None, (shutil.which(program, path=path) for program in programs)), None)


def run(command: list[str]) -> None:
    """Runs a command whose own messages say what went wrong, so that no traceback need follow."""
    if subprocess.run(command).returncode:
        raise SystemExit(f"megatron-datastates: this failed, see above: {shlex.join(command)}")


class CMakeBuild(build_ext):
    """Runs CMake's target `_native` in place of setuptools' compiler."""

    def build_extension(self, ext: Extension) -> None:
        """Builds `ext` from cuda/ and puts it where setuptools expects it."""
        compilers = shlex.split(os.environ.get("CXX", ""))[:1] or ["c++", "g++", "clang++"]
        if not find(*compilers):
            raise SystemExit(
                f"megatron-datastates needs a C++17 compiler and found no {', '.join(compilers)}. "
                "Install one (Debian, Ubuntu: g++) or set CXX."
            )
        cmake = find("cmake")
        if not cmake:
            raise SystemExit("megatron-datastates needs cmake: python -m pip install cmake ninja")
        build_dir = ROOT / "build" / f"native-{sys.implementation.cache_tag}"
        configure = [cmake, *self.configure_arguments(build_dir)]
        if subprocess.run(configure).returncode:
            # CMake refuses a cache from a tree that was moved, or from another generator.
            shutil.rmtree(build_dir, ignore_errors=True)
            run(configure)
        run([cmake, "--build", str(build_dir), "--target", "_native"])
        (built,) = build_dir.glob("lib/_native*.so")
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(built, target)

    def configure_arguments(self, build_dir: Path) -> list[str]:
        """Names anew at every build what pip's isolated builds keep in temporary folders."""
        nanobind = [sys.executable, "-m", "nanobind", "--cmake_dir"]
        ninja = find("ninja")
        return [
            *("-S", str(ROOT / "cuda"), "-B", str(build_dir)),
            *(["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"] if ninja else []),
            "-DCMAKE_BUILD_TYPE=Release",
            # A few large sources compile in half the time of many: 19 s of processor time in place of 40.
            *("-DCMAKE_UNITY_BUILD=ON", "-DCMAKE_UNITY_BUILD_BATCH_SIZE=0"),
            "-DMDS_WERROR=OFF",  # said each time, as the cache keeps what CI said
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={build_dir / 'lib'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dnanobind_DIR={subprocess.check_output(nanobind, text=True).strip()}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]


setup(
    ext_modules=[Extension("megatron_datastates.engine._native", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
)
